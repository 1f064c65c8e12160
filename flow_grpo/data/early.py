"""Read small data sets before the imports that take seconds, so that mistakes in them are reported
like mistakes in the settings."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flow_grpo.data.mixing import PromptSource

ENDINGS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
MOST_BYTES = 2**24  # takes a fraction of a second to read and parse


def read_early(sources: Iterable[PromptSource], read: Callable[[], Any]) -> None:
    """Call `read`, which raises a UserError for a mistake in the data, if all data sets are local
    and small. Its result and log messages are discarded: the run reads the data again."""
    if not all(is_small(Path(source.path)) for source in sources):
        return
    logger = logging.getLogger("flow_grpo")
    before = logger.disabled
    logger.disabled = True
    try:
        read()
    finally:
        logger.disabled = before


def is_small(path: Path) -> bool:
    """Return whether a file, or the tables of a folder that the readers look for, are small."""
    if os.path.isfile(path):
        return path.stat().st_size <= MOST_BYTES
    folders = [path, path / "data", path / "data/train", path / "train"]
    files = [f for folder in folders if folder.is_dir() for f in folder.iterdir() if f.is_file()]
    sizes = [f.stat().st_size for f in files if f.suffix in ENDINGS]
    return bool(sizes) and sum(sizes) <= MOST_BYTES
