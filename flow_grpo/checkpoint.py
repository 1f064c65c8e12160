"""Checkpoints that are whole or not there."""

import shutil
from collections.abc import Callable
from pathlib import Path

from flow_grpo.errors import UserError

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
    for old in list_checkpoints(root)[:-keep] if keep else []:
        shutil.rmtree(old)
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Oldest first."""
    found = [p for p in root.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(PREFIX)))


def weights_in(folder: Path) -> Path:
    """The weights to load: of a run its newest checkpoint, of a checkpoint its moving average."""
    if checkpoints := list_checkpoints(folder / "checkpoints"):
        folder = checkpoints[-1]
    names = ("ema_lora", "lora", "ema_transformer", "transformer")
    found = next((folder / name for name in names if (folder / name).is_dir()), folder)
    if not list(found.glob("*.safetensors")):
        raise UserError(f"no checkpoint at {folder}: name a run, a checkpoint or a folder in one")
    return found
