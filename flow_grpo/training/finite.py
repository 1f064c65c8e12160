"""Keep non-finite values (NaN, inf) out of the weights, the optimizer state and checkpoints.

A single NaN gradient turns every weight into NaN: the global norm used for clipping is NaN, and so
is every gradient after clipping. Losses and gradients are therefore checked before each optimizer
step, and weights and optimizer state before they are written and after they are read.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flow_grpo.errors import UserError
from flow_grpo.training.distributed import get_context_size, to_full_tensor
from flow_grpo.weight_checks import is_finite


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or infinite element, or None.

    Only the local shard of a sharded tensor is read.
    """
    for name, tensor in named:
        if not all(map(is_finite, _local_parts(tensor))):
            return name
    return None


def _local_parts(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(tensor, "ds_tensor"):  # ZeRO-3: the parameter itself is empty between two passes
        yield tensor.ds_tensor


def find_nonfinite(
    parameters: dict[str, nn.Parameter], optimizer: Optimizer, average: dict[str, Tensor]
) -> str | None:
    """Return the first trained weight, average or optimizer state that is not finite, or None.

    Call it on all processes; each reads its local shards.
    """
    own = first_nonfinite(_trained_state(parameters, optimizer, average))
    return next(filter(None, gather_object([own])), None)


def _trained_state(
    parameters: dict[str, nn.Parameter], optimizer: Optimizer, average: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained weights, their average and the optimizer's state of this process, by name.

    DeepSpeed's optimizer holds flat partitions of the weights, which have no names.
    """
    yield from parameters.items()
    for name, tensor in average.items():
        yield f"the moving average of {name}", tensor
    names = {id(parameter): name for name, parameter in parameters.items()}
    for number, (parameter, state) in enumerate(optimizer.state.items()):
        name = names.get(id(parameter), f"partition {number}")
        if id(parameter) not in names:
            yield name, parameter
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"the optimizer's {key} of {name}", value


def backward(accelerator: Accelerator, loss: Tensor, **options: object) -> None:
    """Run the backward pass; a non-finite loss gives NaN gradients, even with finite derivatives.

    The update is then skipped on all processes, because gradient reductions propagate NaN. This
    does not synchronize with the device.

    With context parallelism the gradient is the sum over a context group, but reductions average
    over all processes, so the loss is multiplied by the size of the group.
    """
    finite, size = loss.detach().isfinite(), float(get_context_size(accelerator))
    factor = torch.where(finite, size, math.nan).to(loss.dtype)
    accelerator.backward(loss * factor, **options)


def clip_gradients(
    accelerator: Accelerator, parameters: Iterable[nn.Parameter], max_norm: float
) -> float:
    """Clip the gradients to `max_norm` and return their global norm before clipping.

    The norm is NaN or infinite on all processes if it is on any. DeepSpeed has already clipped and
    stepped in the last backward pass; there it is the norm of that step. This synchronizes with the
    device, once per update.
    """
    norm = accelerator.clip_grad_norm_(parameters, max_norm)
    norm = to_full_tensor(torch.as_tensor(math.nan if norm is None else norm)).to(
        accelerator.device
    )
    if accelerator.num_processes > 1:
        others = accelerator.reduce((~norm.isfinite()).double(), "sum")
        norm = torch.where((others > 0) & norm.isfinite(), math.nan, norm)
    return norm.item()


def step_if_finite(accelerator: Accelerator, optimizer: Optimizer, norm: float) -> bool:
    """Take the optimizer step unless `norm` is NaN or infinite; return whether it was taken.

    Gradients are cleared in both cases. A skipped step changes neither weights nor optimizer
    state; with fp16 it lowers the loss scale.

    Raises:
        UserError: If DeepSpeed has already applied an update with a non-finite gradient.
    """
    finite = math.isfinite(norm)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if not finite and not accelerator.optimizer_step_was_skipped:
            raise UserError(
                f"DeepSpeed applied an update with gradient norm {norm}, so the current weights "
                "are invalid",
                hint="remove bf16, fp16 and compute_grad_norm from the DeepSpeed config and resume "
                "from the last checkpoint",
            )
        finite = finite and not accelerator.optimizer_step_was_skipped
    elif finite:
        optimizer.step()
    elif accelerator.scaler is not None:
        accelerator.scaler.update()  # the overflow was recorded when gradients were unscaled
    optimizer.zero_grad()
    return finite


def loss_scale(accelerator: Accelerator) -> float | None:
    """Return the current fp16 loss scale; None without loss scaling."""
    return None if accelerator.scaler is None else accelerator.scaler.get_scale()
