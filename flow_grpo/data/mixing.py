"""Mixing of several datasets in one run, and held-out splits of sets without a test split."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from flow_grpo.data.seeding import Stream, numpy_rng
from flow_grpo.errors import UserError
from flow_grpo.modelscope_hub import PREFIX, is_modelscope


class DataRow(Protocol):
    """A prompt or a question."""

    metadata: dict[str, Any]

    @property
    def identity(self) -> tuple[str, ...]:
        """Key that rows with the same content share."""


T = TypeVar("T", bound=DataRow)
FORMAT_HINT = 'write it like "path/a:0.7,path/b:0.3"'
HELD_OUT_FRACTION, MAX_HELD_OUT = 0.1, 256
MIN_ROWS_TO_SPLIT = 10  # smaller sets are used whole for both training and testing
logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class PromptSource:
    """A dataset (directory, file or hub name) and its sampling weight."""

    path: str
    name: str  # in metadata and metrics
    share: Fraction = Fraction(1)  # relative to the sum of all shares


def parse_sources(dataset: str) -> list[PromptSource]:
    """Parse one path or a mixture such as "path/a:0.7,path/b:0.3"; shares default to equal."""
    if not dataset.strip() or os.path.exists(dataset):
        parts = [(dataset, "")]
    else:
        parts = [_split_share(part.strip()) for part in dataset.split(",")]
    paths = [path for path, _ in parts]
    error = partial(UserError, field="dataset", value=dataset)
    if not all(paths):
        raise error("has an empty path", hint=FORMAT_HINT)
    if repeated := [path for path, count in Counter(paths).items() if count > 1]:
        raise error(f"names {repeated[0]} twice", hint="add up the shares")
    if len({bool(share) for _, share in parts}) > 1:
        raise error("must have a share for every set or for none", hint=FORMAT_HINT)
    shares = [_parse_share(share, dataset) if share else Fraction(1) for _, share in parts]
    names = short_source_names(paths)
    return [PromptSource(*each) for each in zip(paths, names, shares, strict=True)]


def short_source_names(paths: Sequence[str]) -> list[str]:
    """Return the last component of each path, or the whole path if that is not unique."""
    short = [Path(path).stem if os.path.isfile(path) else Path(path).name for path in paths]
    return [s if short.count(s) == 1 else path for s, path in zip(short, paths, strict=True)]


def _split_share(part: str) -> tuple[str, str]:
    if is_modelscope(part):
        path, share = _split_share(part.removeprefix(PREFIX))
        return f"{PREFIX}{path}", share
    path, colon, share = part.rpartition(":")
    return (path, share) if colon and not os.path.exists(part) else (part, "")


def _parse_share(share: str, dataset: str) -> Fraction:
    """Return a share as an exact fraction; raise a UserError unless it is a number above 0."""
    try:
        number = Fraction(share)
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"has the invalid share {share!r}", field="dataset", value=dataset, hint=FORMAT_HINT
        ) from error
    if number <= 0:
        raise UserError(
            f"has the share {share}, which must be above 0", field="dataset", value=dataset
        )
    return number


def allocate_groups(groups: int, shares: Sequence[Fraction]) -> list[int]:
    """Return the groups per epoch of each dataset, by the largest remainder method.

    Args:
        groups: Groups per epoch of all datasets.
        shares: Sampling weight of each dataset.
    """
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
    """Reject a dataset of a mixture with no groups in an epoch, or with fewer rows than groups.

    Args:
        source: The dataset.
        rows: Number of its training rows.
        groups: Groups per epoch that are drawn from it.
        of: Groups per epoch of all datasets.
        what: What a row is, for the message.
        setting: Name of the setting that makes an epoch longer.
    """
    if groups == 0:
        raise UserError(
            f"has too small a share for one of the {of} groups per epoch",
            field=source.path,
            hint=f"raise the share or {setting}",
        )
    if rows < groups:
        raise UserError(
            f"has {rows} training {what}, but its share of the {of} groups per epoch needs "
            f"{groups} distinct {what}",
            field=source.path,
            hint=f"add {what}, lower its share or {setting}",
        )


def interleave(sets: Iterable[Iterable[T]]) -> list[T]:
    """Merge the rows of all sets round-robin, so that the first few come from every set."""
    return [row for each in zip_longest(*sets) for row in each if row is not None]


def tag_rows(rows: Iterable[T], name: str) -> list[T]:
    """Return the rows with the name of their dataset in their metadata."""
    return [replace(row, metadata={**row.metadata, "dataset": name}) for row in rows]


def set_indices(sizes: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """Map rows of concatenated datasets to the index of their set, shape (len(rows),)."""
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


def split_held_out(
    rows: list[T], seed: int, source: str, what: str = "prompts"
) -> tuple[list[T], list[T]]:
    """Return (train, test) of a set without a test split, and log how it was split."""
    train, test = hold_out(rows, numpy_rng(seed, Stream.HOLD_OUT))
    if train is test:
        how = f"its {len(rows)} {what} are too few to hold any out and serve as both"
    else:
        how = f"held out {len(test)} of its {len(rows)} {what} with seed={seed}"
    logger.info(
        "%s has no test %s: %s; to choose them, use a directory with a train and a test file",
        source,
        what,
        how,
    )
    return train, test


def held_out_share(train: Iterable[DataRow], test: Sequence[DataRow]) -> float:
    """Return the fraction of `test` whose content is not in `train`."""
    trained = {row.identity for row in train}
    return sum(row.identity not in trained for row in test) / max(1, len(test))


def hold_out(rows: list[T], rng: np.random.Generator) -> tuple[list[T], list[T]]:
    """Split off about a tenth of the rows for testing; rows with the same content stay together.

    Returns:
        (train, test) in their original order. Both are `rows` itself if it has fewer than
        `MIN_ROWS_TO_SPLIT` distinct rows.
    """
    keys = [row.identity for row in rows]
    counts = Counter(keys)
    distinct = sorted(counts)
    if len(distinct) < MIN_ROWS_TO_SPLIT:
        return rows, rows
    wanted = min(max(1, round(HELD_OUT_FRACTION * len(rows))), MAX_HELD_OUT)
    held_out: set[tuple[str, ...]] = set()
    num_held_out = 0
    for i in rng.permutation(len(distinct))[:-1]:  # at least one key remains for training
        if num_held_out < wanted:
            held_out.add(distinct[i])
            num_held_out += counts[distinct[i]]
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held_out]
    return train, [row for row, key in zip(rows, keys, strict=True) if key in held_out]


def warn_duplicates(
    train: Sequence[DataRow], test: Sequence[DataRow], source: str, what: str = "prompts"
) -> None:
    """Warn if all training rows are identical, or if test rows are also training rows."""
    known = {row.identity for row in train}
    if len(train) > 1 and len(known) == 1:
        logger.warning("%s: all %d training %s are identical", source, len(train), what)
    if train is not test:  # too few rows for a held-out set, as logged by `split_held_out`
        warn_known_rows(train, test, source, what)


def warn_known_rows(
    train: Iterable[DataRow], test: Sequence[DataRow], source: str, what: str = "prompts"
) -> None:
    """Warn if test rows are also training rows."""
    known = {row.identity for row in train}
    if seen := sum(row.identity in known for row in test):
        logger.warning(
            "%s: %d of %d test %s are also training %s, so the evaluation is not held out",
            source,
            seen,
            len(test),
            what,
            what,
        )
