"""Prompt sets, and which prompt each sample of an epoch is drawn from."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flow_grpo.access import check_access
from flow_grpo.config.places import check_made
from flow_grpo.data.columns import parse_names
from flow_grpo.data.mixing import files_named, warn_of_unread
from flow_grpo.data.rows import (
    Columns,
    Prompt,
    Split,
    is_hub_name,
    read_csv,
    read_hub,
    read_jsonl,
    read_lines,
    read_parquet,
)
from flow_grpo.errors import UserError, with_nearest_file

READERS = {".txt": read_lines, ".jsonl": read_jsonl, ".csv": read_csv, ".parquet": read_parquet}
# what may follow "train" and "test"; of several files the first is read
ENDINGS = {
    "auto": ("_metadata.jsonl", ".jsonl", ".csv", ".parquet", ".txt"),
    "text": (".txt",),
    "metadata": ("_metadata.jsonl",),
}


def load_prompts(
    source: str | Path,
    split: Split,
    prompt_fn: str = "auto",
    column: str = "prompt",
    image_column: str = "",
    metadata_columns: str = "",
) -> list[Prompt]:
    """Prompts from a folder, a file or a Hugging Face name; one without this split is an error."""
    columns = column, image_column, metadata_columns
    prompts = find_prompts(source, split, prompt_fn, *columns)
    if prompts is None:
        raise UserError(_missing(source, split, prompt_fn))
    return prompts


def find_prompts(
    source: str | Path,
    split: Split,
    prompt_fn: str = "auto",
    column: str = "prompt",
    image_column: str = "",
    metadata_columns: str = "",
) -> list[Prompt] | None:
    """None where there is no such split: a single file is all for training."""
    _check_prompt_fn(prompt_fn)
    check_made(str(source))
    if is_hub_name(str(source)):
        return read_hub(str(source), split, column, image_column, metadata_columns)
    file = _find_file(Path(source), split, prompt_fn)
    if prompt_fn == "auto":  # else it is the user who has chosen
        warn_of_unread(Path(source), split, [file] if file else [])
    return None if file is None else read_file(file, column, image_column, metadata_columns)


def check_there(source: str, prompt_fn: str) -> None:
    """Refuse a set without prompts to train on, before it is read."""
    _check_prompt_fn(prompt_fn)
    if is_hub_name(source):
        check_access("dataset", source, kind="dataset", file="README.md")
    elif _find_file(Path(source), "train", prompt_fn) is None:
        raise UserError(_missing(source, "train", prompt_fn))


def _check_prompt_fn(prompt_fn: str) -> None:
    if prompt_fn not in ENDINGS:
        raise UserError(f"unknown prompt_fn={prompt_fn!r}; choose one of {', '.join(ENDINGS)}")


def _find_file(path: Path, split: Split, prompt_fn: str) -> Path | None:
    if os.path.isfile(path):  # which does not raise for a name that is too long
        return path if split == "train" else None
    if path.suffix in READERS and not os.path.exists(path):
        raise UserError(with_nearest_file(f"no dataset at {path}: there is no such file", path))
    files = (path / f"{split}{ending}" for ending in ENDINGS[prompt_fn])
    return next((each for each in files if os.path.isfile(each)), None)


def _missing(source: str | Path, split: Split, prompt_fn: str) -> str:
    wanted = _either(f"{split}{ending}" for ending in ENDINGS[prompt_fn])
    message = f"no dataset at {source}: it must hold {wanted} (prompt_fn={prompt_fn!r})"
    if others := files_named(Path(source), split):
        return f"{message}; it has {', '.join(file.name for file in others[:4])}"
    return message if os.path.exists(source) else with_nearest_file(message, source)


def read_file(
    path: Path, column: str = "prompt", image_column: str = "", metadata_columns: str = ""
) -> list[Prompt]:
    if path.suffix not in READERS:
        raise UserError(f"cannot read prompts from {path}: it must be {_either(READERS)}")
    try:
        columns = Columns(column, image_column, parse_names(metadata_columns))
        prompts = READERS[path.suffix](path, columns)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not prompts:
        raise UserError(f"{path} is empty; write one prompt per line")
    return prompts


def _either(names) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True)
class Draw:
    """The samples one process draws together. Both arrays are (batch_size,)."""

    index: np.ndarray  # of the sample within the epoch, over all processes
    row: np.ndarray  # of the dataset; also the group id


def epoch_draws(
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
) -> list[Draw]:
    """Draw `groups` distinct rows, `group_size` samples each, and deal them out in batches.

    `sets`: rows and groups of each prompt set, where there are several, one after the other.

    Each of the `updates` of an epoch takes the next samples by index, of which every process has an
    equal share: what makes up an update follows from the seed alone. Samples of a group lie side by
    side, so a batch holds few distinct prompts.
    """
    if len(sets) > 1:
        chosen = mixed_rows(sets, rng)
    else:
        chosen = rng.choice(rows, size=groups, replace=False)
    index = np.arange(groups * group_size).reshape(updates, num_processes, -1)[:, process]
    return [Draw(index=i, row=chosen[i // group_size]) for i in index.reshape(-1, batch_size)]


def mixed_rows(sets: Sequence[tuple[int, int]], rng: np.random.Generator) -> np.ndarray:
    """As many distinct rows of each set as it has groups, shuffled: updates mix the sets."""
    first = np.cumsum([0, *(rows for rows, _ in sets)])
    parts = [
        start + rng.choice(rows, size=groups, replace=False)
        for start, (rows, groups) in zip(first[:-1], sets, strict=True)
    ]
    return rng.permutation(np.concatenate(parts))
