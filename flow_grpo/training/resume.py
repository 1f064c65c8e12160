"""Decide where a run starts and restore its state: new, resumed, or from another run's checkpoint.

Problem: a resumed run should continue as if it had never stopped. The files it finds may be
damaged, written with other settings, still in use, or crafted to execute code.

Invariants:

- Resuming equals never stopping, bit for bit on one device. The checkpoint holds everything that
  changes: trained weights, EMA, optimizer, random states and `Progress` (files: `checkpoint.py`).
- A changed setting is used and logged, or rejected (`config_changes.py`).
- No file executes code (`safe_loading.py`).
- The main process locks the directory and decides; the others receive its decision or its error.
- Nothing is written until all checks have passed.

    <logdir>/<run_name>/
      config.json      settings of the latest start
      start.json       working directories and prompt file hashes (`provenance.py`)
      metrics.jsonl    cut back to the checkpoint's epoch, because later epochs are trained again
      checkpoints/

Trade-off: a run without config.json resumes with a warning instead of an error, although its
changed settings cannot be detected.
"""

import errno
import json
import logging
import os
import pickle
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.optim import Optimizer

from flow_grpo import atomic_io
from flow_grpo.config.saved_config import CONFIG_FILE
from flow_grpo.errors import UserError, first_line
from flow_grpo.training.checkpoint import (
    CHECKPOINT_PREFIX,
    STATE_DIR,
    Progress,
    find_damage,
    find_latest_intact,
    list_checkpoints,
    repair_links,
)
from flow_grpo.training.config_changes import compare_configs
from flow_grpo.training.distributed import raise_on_all_ranks
from flow_grpo.training.lock import RunLock, find_writer
from flow_grpo.training.plan import check_run_name_free, missing_checkpoint_error
from flow_grpo.training.provenance import data_settings, write_provenance
from flow_grpo.training.safe_loading import (
    LOADING_ERRORS,
    reject_unsafe_files,
    weights_only_loading,
)
from flow_grpo.untrusted_files import parse_json

log = logging.getLogger(__name__)


def load_training_state(
    accelerator: Accelerator,
    checkpoint: Path | None,
    optimizer: Optimizer,
    settings: dict[str, Any],
) -> Progress:
    """Restore weights, optimizer, EMA and random states from a checkpoint.

    Args:
        checkpoint: Checkpoint to load; None for a new run.
        optimizer: Optimizer whose hyperparameters are then overwritten by `settings`.
        settings: Optimizer hyperparameters of the current config.

    Returns:
        The progress of the checkpoint, or that of a new run.
    """
    if checkpoint is None:
        return Progress()
    try:
        with weights_only_loading(accelerator):
            # DeepSpeed's files lack the frozen weights; other backends ignore the argument
            accelerator.load_state(str(checkpoint / STATE_DIR), load_module_strict=False)
        progress = Progress.read(checkpoint)
    except LOADING_ERRORS as error:
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):  # torch's message suggests unsafe loading
            reason = "it contains pickled code, which is never executed"
        raise UserError(
            f"cannot resume from {checkpoint}: {reason}",
            hint="check that model, LoRA rank and distributed backend are those of the checkpoint",
        ) from error
    for group in optimizer.param_groups:
        group.update(settings)
    return progress


@dataclass(frozen=True)
class RunStart:
    """Where a run starts."""

    folder: Path  # run directory
    checkpoint: Path | None  # to resume from
    is_new: bool  # the run directory does not exist yet

    @property
    def resumed_run(self) -> Path | None:
        """Directory of the run that is resumed; None for a new run from the model itself."""
        if self.checkpoint is not None:
            return self.checkpoint.parents[1]
        return None if self.is_new else self.folder


def find_start(
    accelerator: Accelerator, config: dict[str, Any], cleanup: ExitStack
) -> tuple[RunStart, RunLock | None]:
    """Lock the run directory and decide where the run starts. Call it on all processes.

    Args:
        config: All settings; `resume` is "none", "auto" or a path.
        cleanup: Stack that releases the lock when it is closed.

    Returns:
        The start, the same on all processes, and the lock on the main process.
    """

    def find() -> tuple[RunStart, RunLock]:
        """Lock the run directory, decide where the run starts, and check that it may."""
        folder = _run_directory(config["logdir"], config["run_name"], config["resume"])
        lock = _lock_run_directory(folder)
        cleanup.callback(lock.release)
        try:
            start = _find_start(folder, config["resume"])
            if run := start.resumed_run:
                compare_configs(run, start.checkpoint, config, same_run=not start.is_new)
            if start.checkpoint is not None:
                reject_unsafe_files(accelerator, start.checkpoint)
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
        return start, lock

    main = accelerator.is_main_process
    start, lock = raise_on_all_ranks(accelerator, lambda: find() if main else (None, None))
    return gather_object([start])[0], lock


def _run_directory(logdir: str, run_name: str, resume: str) -> Path:
    """Return `logdir`/`run_name`; a run without a name is named after the current time."""
    if resume == "auto" and not run_name:
        raise UserError(
            "needs a run_name",
            field="resume",
            value=resume,
            hint="set --config.run_name to the name of its directory in logdir",
        )
    return Path(logdir) / (run_name or datetime.now().strftime("%Y.%m.%d_%H.%M.%S"))


def _lock_run_directory(folder: Path) -> RunLock:
    """Lock a run directory; raise a UserError if it cannot be written to or is already locked."""
    try:
        if folder.exists() and not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return RunLock(folder)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}",
            hint="choose another directory with --config.logdir",
        ) from error


def _find_start(folder: Path, resume: str) -> RunStart:
    """Return the start of the run in `folder`.

    An existing directory is resumed from its newest intact checkpoint, if it has any. A new one
    starts from the checkpoint that `resume` names, or from the model.

    Raises:
        UserError: If the run exists and may not be resumed, or all its checkpoints are damaged.
    """
    if not folder.exists():
        checkpoint = None if resume in ("none", "auto") else _resolve_checkpoint(Path(resume))
        return RunStart(folder, checkpoint, is_new=True)
    check_run_name_free(folder, resume)
    root = folder / "checkpoints"
    checkpoint = find_latest_intact(root)
    if checkpoint is None and (damaged := list_checkpoints(root)):
        raise UserError(
            f"has only damaged checkpoints ({len(damaged)})",
            field=root,
            hint="restore one from a backup, or start a new run with another run_name, optionally "
            "from intact LoRA weights with --config.train.lora_path",
        )
    return RunStart(folder, checkpoint, is_new=False)


def _resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`, or the newest intact one of the run at `path`."""
    target = path.resolve()  # latest and best are links
    if target.name.startswith(CHECKPOINT_PREFIX):
        found = target
    else:
        found = find_latest_intact(target / "checkpoints")
    damage = "" if found is None else find_damage(found)
    if damage is not None:
        raise missing_checkpoint_error(str(path), f" ({damage})" if damage else "")
    _check_run_inactive(found, path)
    return found


def _check_run_inactive(checkpoint: Path, path: Path) -> None:
    """Reject a checkpoint of an active run, which may prune it while it is read."""
    if checkpoint.parent.name == "checkpoints" and (writer := find_writer(checkpoint.parents[1])):
        raise UserError(
            f"is in use by {writer}, which may remove the checkpoint while it is read",
            field="resume",
            value=str(path),
            hint=f"wait until it ends, or copy {checkpoint} and resume from the copy",
        )


def prepare_run_directory(start: RunStart, config: dict[str, Any]) -> None:
    """Create the run directory, or reset it to its checkpoint. Call it on the main process."""
    created: list[Path] = []
    try:
        created = atomic_io.make_directories(start.folder)
        atomic_io.write_text_atomic(start.folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        write_provenance(start.folder, **data_settings(config))
        _prepare_metrics(start, start.folder / "metrics.jsonl")
        if start.checkpoint is not None and not start.is_new:
            repair_links(start.checkpoint)
    except OSError as error:
        if start.folder in created:  # a partial run directory would block the same command
            shutil.rmtree(start.folder, ignore_errors=True)
        raise UserError(f"cannot write to {start.folder}: {error.strerror}") from error


def _prepare_metrics(start: RunStart, metrics: Path) -> None:
    """Write metrics.jsonl up to the checkpoint's epoch.

    A file without a checkpoint, or with unreadable lines, is moved aside.
    """
    if start.checkpoint is None:
        if metrics.exists() and metrics.stat().st_size:
            aside = _move_aside(metrics)
            log.warning("%s has no checkpoint; moved its metrics to %s", start.folder, aside)
        return
    source = start.resumed_run / metrics.name
    lines, damaged = _metrics_until(source, Progress.read(start.checkpoint))
    if damaged:
        kept = source if start.is_new else _move_aside(metrics)
        log.warning("dropped lines that are not JSON with an epoch: %s of %s", damaged, kept)
    atomic_io.write_text_atomic(metrics, "".join(lines))


def _metrics_until(path: Path, progress: Progress) -> tuple[list[str], str]:
    """Return the lines up to the checkpoint's epoch, and the numbers of unreadable lines."""
    content = path.read_bytes() if path.exists() else b""
    lines, damaged, last = [], [], -1
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            text = line.decode("utf-8")
            epoch = int(parse_json(text, str(path))["epoch"])
        except (UserError, ValueError, KeyError, TypeError, OverflowError):
            is_cut_off = line.startswith(b"{") and not line.endswith(b"\n")  # the run was killed
            if not is_cut_off:
                damaged.append(number)
            continue
        if epoch <= progress.epoch:
            last = epoch
            lines.append(text.rstrip() + "\n")
    if last < progress.epoch and progress.record:
        lines.append(json.dumps(progress.record) + "\n")
    return lines, ", ".join(map(str, damaged))


def _move_aside(path: Path) -> Path:
    """Rename a file to the first free `<name>.<number>`."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(aside)
