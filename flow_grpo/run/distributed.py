"""What processes do together: fail, count, exchange gradients and rows, and hold sharded weights.

Call these on all processes.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from flow_grpo.errors import RewardOutage, UserError

Batch, Result = TypeVar("Batch"), TypeVar("Result")


def on_all_or_none(accelerator: Accelerator, call: Callable[[], Result]) -> Result:
    """What `call` returns, if it raises a UserError on no process; else that error, on all.

    A mistake that one process alone can see would leave the others waiting for it.
    """
    result, mistake = None, None
    try:
        result = call()
    except UserError as error:
        kind = RewardOutage if isinstance(error, RewardOutage) else UserError  # by its exit code
        mistake = (kind, str(error))
    mistakes = [m for m in gather_object([mistake]) if m is not None]
    if mistakes:
        kind, told = mistakes[0]
        raise kind(told)
    return result


def in_step(accelerator: Accelerator, batches: Sequence[Batch]) -> list[tuple[Batch, bool]]:
    """The micro-batches of an update, each with whether it counts. Where a backward pass needs all
    processes, one that has fewer batches than another repeats its first, with no weight."""
    counted = [(batch, True) for batch in batches]
    if not runs_in_step(accelerator):
        return counted
    most = max(gather_object([len(batches)]))
    return counted + [(batches[0], False)] * (most - len(batches))


def accumulated(
    accelerator: Accelerator,
    module: nn.Module,
    batches: Iterable[Batch],
    count: int,
    *,
    at_once: bool = False,
) -> Iterator[Batch]:
    """The micro-batches of an update, `count` of them, each to run forward and backward: the
    gradients add up, and the last one exchanges them. `at_once`: each exchanges its own, where
    nobody has room for the gradients of all weights."""
    for number, batch in enumerate(batches, 1):
        last = number == count
        accelerator.sync_gradients = last
        with nullcontext() if last or at_once else accelerator.no_sync(module):
            yield batch


def gather_rows(
    accelerator: Accelerator, index: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows of all processes, on the CPU, in the order of their index.

    Processes may hold different numbers of rows, also none. The order makes sums over the rows
    the same for any number of processes.
    """

    def gather(tensor: Tensor, fill: int) -> Tensor:
        tensor = tensor.to(accelerator.device)
        padded = accelerator.pad_across_processes(tensor, dim=0, pad_index=fill)
        return accelerator.gather(padded).cpu()

    index = gather(index, -1)
    order = torch.argsort(index, stable=True)
    order = order[index[order] >= 0]
    return index[order], {name: gather(rows, 0)[order] for name, rows in columns.items()}


def gather_scores(
    accelerator: Accelerator, index: np.ndarray, batches: list[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Columns of all batches of all processes, in the order of the index; NaN where a batch
    lacks one."""
    names = dict.fromkeys(gather_object([name for batch in batches for name in batch]))
    lengths = [len(next(iter(batch.values()))) for batch in batches]
    columns = {
        name: np.concatenate(
            [np.zeros(0)]
            + [b.get(name, np.full(n, np.nan)) for b, n in zip(batches, lengths, strict=True)]
        )
        for name in names
    }
    rows = {name: torch.from_numpy(column) for name, column in columns.items()}
    _, gathered = gather_rows(accelerator, torch.from_numpy(index), rows)
    return {name: column.numpy() for name, column in gathered.items()}


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether weights are sharded (ZeRO-3, FSDP): a forward pass needs all processes, and each must
    run equally many."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type == DistributedType.FSDP


def runs_in_step(accelerator: Accelerator) -> bool:
    """Whether a backward pass needs all processes (DeepSpeed, FSDP), so that each must run equally
    many."""
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
