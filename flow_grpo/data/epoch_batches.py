"""Assignment of prompts to the samples of an epoch of a diffusion model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampleBatch:
    """Samples that one process generates together."""

    index: np.ndarray  # (batch_size,), position in the epoch over all processes
    row: np.ndarray  # (batch_size,), row of the data set; also the group id


def build_epoch_batches(
    *,
    rows: int,
    groups: int,
    group_size: int,
    batch_size: int,
    updates: int,
    process: int,
    num_processes: int,
    rng: np.random.Generator,
    sets: Sequence[tuple[int, int]] = (),
) -> list[SampleBatch]:
    """Draw distinct rows for an epoch and return the batches of one process.

    Each update takes the next samples by index, divided equally among processes, so its content
    depends only on the seed and not on world size. Samples of a group are adjacent, so a batch has
    few distinct prompts.

    Args:
        rows: Rows of the data set.
        groups: Groups per epoch, each of a distinct row.
        group_size: Samples per group.
        batch_size: Samples per batch and process.
        updates: Optimizer updates per epoch.
        process: Rank of this process.
        num_processes: World size.
        rng: Source of randomness; the same on all processes.
        sets: (rows, groups) of each data set if several are concatenated.
    """
    if len(sets) > 1:
        chosen = sample_mixed_rows(sets, rng)
    else:
        chosen = rng.choice(rows, size=groups, replace=False)
    index = np.arange(groups * group_size).reshape(updates, num_processes, -1)[:, process]
    return [
        SampleBatch(index=i, row=chosen[i // group_size]) for i in index.reshape(-1, batch_size)
    ]


def sample_mixed_rows(sets: Sequence[tuple[int, int]], rng: np.random.Generator) -> np.ndarray:
    """Draw distinct rows of several concatenated sets, shuffled so that updates mix the sets.

    Args:
        sets: (number of rows, rows to draw) of each set.
        rng: Source of randomness.

    Returns:
        Indices into the concatenation, (rows to draw in total,).
    """
    offsets = np.cumsum([0, *(rows for rows, _ in sets)])
    parts = [
        offset + rng.choice(rows, size=groups, replace=False)
        for offset, (rows, groups) in zip(offsets[:-1], sets, strict=True)
    ]
    return rng.permutation(np.concatenate(parts))
