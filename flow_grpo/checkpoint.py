"""Checkpoints that are whole or not there."""

import shutil
from collections.abc import Callable
from pathlib import Path

PREFIX = "checkpoint-"


def save_checkpoint(root: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Let `write` fill a temporary folder, then rename it to checkpoint-<step>.

    The newest `keep` checkpoints stay; 0 keeps all.
    """
    final = root / f"{PREFIX}{step}"
    partial = root / f".partial-{PREFIX}{step}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    partial.rename(final)
    for old in list_checkpoints(root)[: -keep or None] if keep else []:
        shutil.rmtree(old)
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Oldest first."""
    found = [p for p in root.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(PREFIX)))
