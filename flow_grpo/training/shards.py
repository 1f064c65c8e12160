"""Whole weights, where DeepSpeed ZeRO-3 or FSDP2 shared them out. Call these on all processes."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether every forward is a joint effort, so that all processes must run equally many."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type == DistributedType.FSDP


def gathered(parameters: Iterable[Tensor]) -> AbstractContextManager:
    """While it is entered, parameters that ZeRO-3 has shared out are whole, and can be changed
    as long as all processes change them alike."""
    shared = [p for p in parameters if hasattr(p, "ds_id")]
    if not shared:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(shared, modifier_rank=0)


def whole(tensor: Tensor) -> Tensor:
    """A copy in one piece, of a tensor that FSDP2 may have shared out."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` shared out as `like` is, and where `like` is."""
    if isinstance(like, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)


@torch.no_grad()
def whole_state(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU."""
    with gathered(named.values()):
        return {name: whole(parameter).cpu() for name, parameter in named.items()}
