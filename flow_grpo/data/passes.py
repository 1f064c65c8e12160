"""Sampling without replacement over a data set, in passes that use every row once.

A data set of `size` rows is an endless sequence of passes, each a random permutation that depends
on the seed, the set and the number of the pass alone: neither world size nor a resumed run changes
it. A caller takes any number of rows at a time, so a pass may end in the middle of an epoch. Rows
of the next pass that are already in the epoch are then skipped, and the next epoch takes them
first: the rows of an epoch are distinct, and a pass uses every row before the next pass begins.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flow_grpo.data.seeding import Stream, numpy_rng


@dataclass(frozen=True)
class PassState:
    """Position in the passes over a data set; small enough to save with every checkpoint."""

    size: int  # rows of the data set
    taken: int = 0  # since the run began; divided by `size`, the number of the pass
    skipped: tuple[int, ...] = ()  # rows of the current pass to take first

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "PassState":
        return cls(saved["size"], saved["taken"], tuple(saved["skipped"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"skipped": list(self.skipped)}


def take_rows(
    state: PassState, count: int, used: Collection[int], *, seed: int, number: int
) -> tuple[list[int], PassState]:
    """Take the next rows of a data set, from 0 to `state.size` - 1.

    Args:
        count: Number of rows; at most the rows of the set that are not `used`.
        used: Rows of this set that are already in the epoch.
        number: Index of the data set if several are mixed.

    Returns:
        The rows, which are distinct and not among `used`, and the state after them.
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


def pass_states(
    sizes: Sequence[int], saved: Sequence[Mapping[str, Any]]
) -> tuple[list[PassState], bool]:
    """Return the states to continue with, and whether they are the saved ones. New passes begin if
    nothing was saved or the sizes of the data sets changed."""
    states = [PassState.read(each) for each in saved]
    if [state.size for state in states] == list(sizes):
        return states, True
    return [PassState(size) for size in sizes], False
