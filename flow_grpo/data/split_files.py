"""Find the files of a split in a directory: one table, or the shards of a downloaded dataset."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from flow_grpo.data.rows import Split
from flow_grpo.errors import UserError

# names of a split in order of precedence
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "test": ("test", "validation", "val"),
}


def split_files(path: Path, split: Split, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a split: one file, or the shards of a hub dataset.

    Shards are named data/train-00000-of-00002.parquet or data/train/0000.parquet.

    Args:
        path: Directory.
        split: "train" or "test", which may be named "validation".
        suffixes: Suffixes of the tables, in order of precedence.
    """
    for name in SPLIT_NAMES[split]:
        for folder in (path, path / "data"):
            for ending in suffixes:
                if os.path.isfile(folder / f"{name}{ending}"):
                    return [folder / f"{name}{ending}"]
                if shards := sorted(folder.glob(f"{name}-*-of-*{ending}")):
                    _check_all_shards(shards)
                    return shards
            if shards := sorted((folder / name).glob("*.parquet")):
                return shards
    return []


def _check_all_shards(shards: list[Path]) -> None:
    """Reject an incomplete download, which would otherwise go unnoticed."""
    total = int(re.search(r"-of-(\d+)", shards[0].name)[1])
    if len(shards) != total:
        raise UserError(
            f"has {len(shards)} of the {total} shards of {shards[0].name}",
            field=shards[0].parent,
            hint="download it again",
        )
