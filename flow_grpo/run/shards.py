"""Whole weights, where DeepSpeed ZeRO-3 or FSDP2 sharded them. Call these on all processes."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether every forward is a joint effort, so that all processes must run equally many."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type == DistributedType.FSDP


def runs_in_step(accelerator: Accelerator) -> bool:
    """Whether every backward is a joint effort, so that all processes must run equally many."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def gathered(parameters: Iterable[Tensor], *, fixed: bool = False) -> AbstractContextManager:
    """While it is entered, parameters that ZeRO-3 has sharded are whole. Unless they are
    `fixed`, they can be changed as long as all processes change them alike."""
    shared = [p for p in parameters if hasattr(p, "ds_id")]
    if not shared:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(shared, modifier_rank=None if fixed else 0)


def hold_with(module: nn.Module, weight: Tensor) -> None:
    """Tell ZeRO-3 that the forward of `module` uses a weight that belongs to a layer within."""
    if hasattr(weight, "ds_id"):
        import deepspeed

        deepspeed.zero.register_external_parameter(module, weight)


def whole(tensor: Tensor) -> Tensor:
    """A copy in one piece, of a tensor that FSDP2 may have sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process has of each: in place, FSDP2 has no operations on lists."""
    tensors = [tensor.detach() for tensor in tensors]
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, sharded as `like` is and on its device."""
    if isinstance(like, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)


@torch.no_grad()
def whole_state(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU."""
    with gathered(named.values(), fixed=True):
        return {name: whole(parameter).cpu() for name, parameter in named.items()}


def hollow_copy(module: nn.Module) -> nn.Module:
    """Without weights, for `filled`. Made before an engine puts its hooks on the module, it runs
    without any, so that processes may call it as often as each likes."""
    weights = list(module.parameters())
    memo = {id(w): nn.Parameter(w.detach().new_empty(0), requires_grad=False) for w in weights}
    return copy.deepcopy(module, memo)


@contextmanager
def filled(hollow: nn.Module, module: nn.Module) -> Iterator[None]:
    """While it is entered, the hollow copy has the weights of `module`, whole, each in the dtype
    that the copy has it in."""
    pairs = list(zip(hollow.parameters(), module.parameters(), strict=True))
    try:
        for place, weight in pairs:  # one by one, so that little is held twice
            with gathered([weight], fixed=True):
                place.data = whole(weight).to(place.device, place.dtype)
        yield
    finally:
        for place, _ in pairs:
            place.data = place.new_empty(0)
