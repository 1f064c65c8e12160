from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from flow_grpo.errors import UserError
from flow_grpo.run.shards import is_sharded, runs_in_step

Batch, Result = TypeVar("Batch"), TypeVar("Result")


def on_all_or_none(accelerator: Accelerator, call: Callable[[], Result]) -> Result:
    """What `call` returns, if it raises a UserError on no process; else that error, on all.

    A mistake that one process alone can see would leave the others waiting for it.
    """
    result, mistake = None, None
    try:
        result = call()
    except UserError as error:
        mistake = str(error)
    mistakes = [m for m in gather_object([mistake]) if m is not None]
    if mistakes:
        raise UserError(mistakes[0])
    return result


def in_step(accelerator: Accelerator, batches: Sequence[Batch]) -> list[tuple[Batch, bool]]:
    """The micro-batches of an update, and whether each counts.

    Where every backward is a joint effort, a process that has fewer than another repeats its first,
    and has to give it no weight.
    """
    counted = [(batch, True) for batch in batches]
    if not runs_in_step(accelerator):
        return counted
    most = max(gather_object([len(batches)]))
    return counted + [(batches[0], False)] * (most - len(batches))


def accumulated(
    accelerator: Accelerator, module: nn.Module, batches: Sequence[Batch]
) -> Iterator[Batch]:
    """The micro-batches of an update, each to run forward and backward: the gradients add up, and
    the last one exchanges them. Those of sharded weights are exchanged at once, as nobody has room
    for all of them."""
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        accelerator.sync_gradients = last
        at_once = last or is_sharded(accelerator)
        with nullcontext() if at_once else accelerator.no_sync(module):
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
