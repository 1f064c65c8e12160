"""Sampling without replacement over a data set, in passes that use every row once.

Problem: an epoch (a fixed number of groups) rarely divides the data set, yet its rows must be
distinct and no row should be used more often than another.

A data set of `size` rows is an endless sequence of passes. Pass p is a random permutation that
depends only on (seed, data set, p), so neither world size nor resuming changes it. A caller takes
any number of rows at a time, so a pass may end in the middle of an epoch. Rows of the next pass
that are already in the epoch are then skipped, and the next epoch takes them first.

Invariants: the rows of an epoch are distinct, and a pass uses every row once before the next pass
begins. The state is two integers and the skipped rows, fewer than an epoch has.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flow_grpo.data.seeding import Stream, numpy_rng


@dataclass(frozen=True)
class PassState:
    """Position in the passes over a data set; small enough to save with every checkpoint."""

    size: int  # rows of the data set
    taken: int = 0  # rows since the run began; `taken // size` is the index of the pass
    skipped: tuple[int, ...] = ()  # rows of the current pass to take first

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "PassState":
        return cls(saved["size"], saved["taken"], tuple(saved["skipped"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"skipped": list(self.skipped)}


def take_rows(
    state: PassState, count: int, used: Collection[int], *, seed: int, number: int
) -> tuple[list[int], PassState]:
    """Take the next rows of a data set.

    Args:
        state: Position in the passes.
        count: Number of rows; at most the number of rows that are not `used`.
        used: Rows of this set that are already in the epoch.
        seed: Seed of the run.
        number: Index of the data set if several are mixed.

    Returns:
        Row indices from 0 to `state.size` - 1, distinct and not in `used`, and the new state.
    """
    used = set(used)
    if count > state.size - len(used):
        raise ValueError(f"cannot take {count} of {state.size} rows, {len(used)} of them in use")
    pass_number, position = divmod(state.taken, state.size)
    carried = list(state.skipped)
    left = _permutation(seed, number, pass_number, state.size)[position + len(carried) :]
    rows: list[int] = []
    while True:
        skipped, scanned = [], 0
        for row in (*carried, *left):
            if len(rows) == count:
                break
            (skipped if row in used else rows).append(row)
            scanned += 1
        if len(rows) == count:
            skipped += carried[scanned:]
            return rows, PassState(state.size, state.taken + count, tuple(skipped))
        # The pass is over, and none of its rows was skipped: otherwise all would be in use.
        used.update(rows)
        pass_number += 1
        carried, left = [], _permutation(seed, number, pass_number, state.size)


def _permutation(seed: int, number: int, pass_number: int, size: int) -> list[int]:
    return numpy_rng(seed, Stream.QUESTIONS, number, pass_number).permutation(size).tolist()


def restore_pass_states(
    sizes: Sequence[int], saved: Sequence[Mapping[str, Any]]
) -> tuple[list[PassState], bool]:
    """Return the states to continue with, and whether they are the saved ones.

    New passes begin if nothing was saved or the size of a data set changed.
    """
    states = [PassState.read(each) for each in saved]
    if [state.size for state in states] == list(sizes):
        return states, True
    return [PassState(size) for size in sizes], False
