"""Where a run begins: a new folder, its own last checkpoint, or that of another run."""

import json
import logging
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from flow_grpo.checkpoint import PREFIX, Progress, is_intact, newest_intact
from flow_grpo.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    folder: Path  # of the run
    checkpoint: Path | None  # to go on from
    is_new: bool  # the folder is still to be made


def find_start(accelerator: Accelerator, logdir: str, run_name: str, resume: str) -> Start:
    """What `resume` ("none", "auto" or a path) means here; one process decides for all."""
    decision: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            decision = [_find_start(Path(logdir), run_name, resume)]
        except UserError as error:
            decision = [error]
    broadcast_object_list(decision)
    if isinstance(decision[0], UserError):
        raise decision[0]
    return decision[0]


def was_restarted() -> bool:
    """torchrun and accelerate start a run again whose processes died (--max_restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _find_start(logdir: Path, run_name: str, resume: str) -> Start:
    if resume == "auto" and not run_name:
        raise UserError("resume=auto needs a run_name, the folder under logdir to go on with")
    folder = logdir / (run_name or datetime.now().strftime("%Y.%m.%d_%H.%M.%S"))
    if not folder.exists():
        checkpoint = None if resume in ("none", "auto") else _checkpoint_at(Path(resume))
        return Start(folder, checkpoint, is_new=True)
    if resume == "auto" or was_restarted():
        return Start(folder, newest_intact(folder / "checkpoints"), is_new=False)
    raise UserError(
        f"{folder} already exists; go on with it (--config.resume=auto), choose another run_name "
        "or remove it"
    )


def _checkpoint_at(path: Path) -> Path:
    found = path if path.name.startswith(PREFIX) else newest_intact(path / "checkpoints")
    if found is None or not is_intact(found.resolve()):
        raise UserError(f"resume={str(path)!r} is neither a run nor a whole checkpoint of one")
    return found.resolve()


def prepare_folder(start: Start, config: dict[str, Any]) -> None:
    """Make the folder, or bring it back to where its checkpoint was; on one process."""
    start.folder.mkdir(parents=True, exist_ok=True)
    path = start.folder / "config.json"
    if path.exists():
        _tell_changes(json.loads(path.read_text("utf-8")), config)
    _replace(path, json.dumps(config, indent=2) + "\n")
    metrics = start.folder / "metrics.jsonl"
    if start.checkpoint is not None:
        source = start.checkpoint.parents[1] / "metrics.jsonl" if start.is_new else metrics
        progress = Progress.read(start.checkpoint)
        _replace(metrics, "".join(_lines_until(source, progress)))
    elif metrics.exists():
        _replace(metrics, "")  # it was stopped before its first checkpoint


def _lines_until(path: Path, progress: Progress) -> list[str]:
    """The lines of the epochs that the checkpoint has; later ones will be written again."""
    lines = []
    for line in path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []:
        try:
            epoch = json.loads(line)["epoch"]
        except ValueError:  # cut off when the run was killed
            break
        if epoch <= progress.epoch:
            lines.append(line if line.endswith("\n") else line + "\n")
    last = json.loads(lines[-1])["epoch"] if lines else -1
    if last < progress.epoch and progress.record:
        lines.append(json.dumps(progress.record) + "\n")
    return lines


def _tell_changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> None:
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            _tell_changes(old, new, f"{prefix}{key}.")
        elif old != new and prefix + key != "resume":
            log.warning("resumed with another %s%s: %r, it was %r", prefix, key, new, old)


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
