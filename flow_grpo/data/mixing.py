"""Several prompt sets in one run, and test prompts where a set has none of its own."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flow_grpo.data.seeding import Stream, numpy_rng
from flow_grpo.errors import UserError

T = TypeVar("T")
FORM = 'write it like "path/a:0.7,path/b:0.3"'
HELD_OUT, MOST_HELD_OUT = 0.1, 256
FEWEST = 10  # of which a part can be held out
logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class PromptSource:
    """A prompt set: a folder, a file or a Hugging Face name, and how much is drawn from it."""

    path: str
    name: str  # in metadata and metrics
    share: Fraction = Fraction(1)  # of the sum of all shares


def parse_sources(dataset: str) -> list[PromptSource]:
    """ "path/a:0.7,path/b:0.3", or one path; without numbers all have equal shares."""
    if not dataset.strip() or os.path.exists(dataset):  # which many sets are too long for
        parts = [(dataset, "")]
    else:
        parts = [_split_share(part.strip()) for part in dataset.split(",")]
    paths = [path for path, _ in parts]
    if not all(paths):
        raise UserError(f"dataset={dataset!r} names no prompt set in one place; {FORM}")
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise UserError(f"dataset={dataset!r} names {twice[0]} twice; add up the shares")
    if len({bool(share) for _, share in parts}) > 1:
        raise UserError(f"dataset={dataset!r} must have a share for each set or for none; {FORM}")
    shares = [_to_share(share, dataset) if share else Fraction(1) for _, share in parts]
    return [PromptSource(*each) for each in zip(paths, names_of(paths), shares, strict=True)]


def names_of(paths: Sequence[str]) -> list[str]:
    """Short ones, where they differ."""
    short = [Path(path).stem if os.path.isfile(path) else Path(path).name for path in paths]
    return [s if short.count(s) == 1 else path for s, path in zip(short, paths, strict=True)]


def _split_share(part: str) -> tuple[str, str]:
    path, colon, share = part.rpartition(":")
    return (path, share) if colon and not os.path.exists(part) else (part, "")


def _to_share(share: str, dataset: str) -> Fraction:
    try:
        number = Fraction(share)
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"dataset={dataset!r}: {share!r} is no share; {FORM}") from error
    if number <= 0:
        raise UserError(f"dataset={dataset!r}: the share {share} must be above 0")
    return number


def share_out(groups: int, shares: Sequence[Fraction]) -> list[int]:
    """Whole groups that add up, by largest remainder; of equal ones the first gets it."""
    exact = [groups * share / sum(shares) for share in shares]
    counts = [int(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in order[: groups - sum(counts)]:
        counts[i] += 1
    return counts


def check_groups(
    source: PromptSource,
    rows: int,
    groups: int,
    of: int,
    what: str = "prompts",
    setting: str = "sample.num_batches_per_epoch",
) -> None:
    """Enough prompts for its part of an epoch, and a part at all. `setting`: which makes an epoch
    longer."""
    if groups == 0:
        raise UserError(
            f"the share of {source.path} comes to none of the {of} groups of an epoch; raise it, "
            f"or {setting}"
        )
    if rows < groups:
        raise UserError(
            f"{source.path} has {rows} {what} to train on but its share of the {of} groups of an "
            f"epoch needs {groups} distinct ones; add {what}, lower its share or {setting}"
        )


def in_turn(sets: Iterable[Iterable[T]]) -> list[T]:
    """One of each set, and so on: the first few have something of all."""
    return [row for each in zip_longest(*sets) for row in each if row is not None]


def set_of(sizes: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """The number of the set that each row is of, where sets of these sizes follow one another."""
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


def split_off(
    rows: list[T],
    seed: int,
    source: str,
    what: str = "prompts",
    key: Callable[[T], Any] = attrgetter("prompt"),
) -> tuple[list[T], list[T]]:
    """(train, test) of a set without a test part; a line tells how."""
    train, test = hold_out(rows, numpy_rng(seed, Stream.HOLD_OUT), key)
    if train is test:
        how = f"its {len(rows)} {what}, too few to hold any out, are for both"
    else:
        how = f"held out {len(test)} of its {len(rows)} {what} by seed={seed}"
    logger.info(
        "%s has no test %s: %s; for your own, give a folder with a train and a test file",
        *(source, what, how),
    )
    return train, test


def held_out_share(train: Iterable[T], test: Sequence[T], key: Callable[[T], Any]) -> float:
    """Return the share of `test` whose `key` is not in `train`."""
    trained = set(map(key, train))
    return sum(key(row) not in trained for row in test) / max(1, len(test))


def hold_out(
    rows: list[T], rng: np.random.Generator, key: Callable[[T], Any] = attrgetter("prompt")
) -> tuple[list[T], list[T]]:
    """(train, test): a tenth for testing, with no `key` (the text) in both, in their order. Fewer
    than ten stay together."""
    texts = sorted({key(p) for p in rows})
    if len(texts) < FEWEST:
        return rows, rows
    wanted = min(max(1, round(HELD_OUT * len(rows))), MOST_HELD_OUT)
    count, chosen, often = 0, set(), Counter(map(key, rows))
    for i in rng.permutation(len(texts))[:-1]:  # one is left to train on
        if count < wanted:
            chosen.add(texts[i])
            count += often[texts[i]]
    train = [p for p in rows if key(p) not in chosen]
    return train, [p for p in rows if key(p) in chosen]


def files_named(folder: Path, split: str, known: Collection[Path] = ()) -> list[Path]:
    """The files of a folder that are named like those of a split, except `known` ones."""
    if not os.path.isdir(folder):
        return []
    names = (f"{split}.", f"{split}_metadata.")
    files = (each for each in sorted(folder.iterdir()) if each.name.startswith(names))
    return [each for each in files if each.is_file() and each not in known]


def warn_of_unread(folder: Path, split: str, read: Sequence[Path]) -> None:
    """Warn where a folder has more files of a split than those that are read."""
    if others := files_named(folder, split, read):
        names = [", ".join(each.name for each in files) for files in (others, read)]
        logger.warning("%s: ignores %s and reads %s", folder, names[0], names[1] or "no such file")


def warn_of_repeats(
    train: Sequence[T],
    test: Sequence[T],
    source: str,
    what: str = "prompts",
    key: Callable[[T], Any] = attrgetter("prompt"),
) -> None:
    """Warn where all training rows are the same, and where the test set is not held out."""
    known = set(map(key, train))
    if len(train) > 1 and len(known) == 1:
        logger.warning("%s: all %d training %s are identical", source, len(train), what)
    if train is test:  # too few rows for a held-out set, which `split_off` logs
        return
    if seen := sum(key(row) in known for row in test):
        logger.warning(
            "%s: %d of %d test %s are also training %s, so the evaluation is not held out",
            *(source, seen, len(test), what, what),
        )
