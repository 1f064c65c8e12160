"""Validation of small datasets before slow imports, so that their errors are reported at once."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flow_grpo.data.mixing import PromptSource
from flow_grpo.data.rows import READERS

MAX_BYTES = 2**24  # takes a fraction of a second to read and parse


def check_small_data_early(sources: Iterable[PromptSource], read: Callable[[], Any]) -> None:
    """Call `read` for its errors if all datasets are local and small.

    Its result and log messages are discarded: the run reads the data again.
    """
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
    """Return whether a file, or the total of a directory's tables, has at most `MAX_BYTES`.

    A directory without tables is not small.
    """
    if os.path.isfile(path):
        return path.stat().st_size <= MAX_BYTES
    folders = [path, path / "data", path / "data/train", path / "train"]
    files = [f for folder in folders if folder.is_dir() for f in folder.iterdir() if f.is_file()]
    sizes = [f.stat().st_size for f in files if f.suffix in READERS]
    return bool(sizes) and sum(sizes) <= MAX_BYTES
