"""Checkpoints that are whole or not there, which of them stay, and which one to go on from."""

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from flow_grpo import disk
from flow_grpo.errors import UserError
from flow_grpo.files import refuse_pickles
from flow_grpo.rewards import TOTAL

log = logging.getLogger(__name__)

PREFIX = "checkpoint-"
STATE = "state"  # what only a resumed run needs
MANIFEST = "files.json"  # every other file of a checkpoint, its size and its SHA-256
PROGRESS = f"{STATE}/progress.json"
LATEST, BEST = "latest", "best"
FULL = 2**20  # bytes: with fewer left, a disk is full


@dataclass
class Progress:
    """How far a run is; a checkpoint has it as state/progress.json."""

    epoch: int = -1  # the last one done; 0 is the evaluation before training
    step: int = 0  # optimizer updates done, including skipped ones
    skipped: int = 0  # of these, skipped because of a non-finite gradient
    skipped_in_a_row: int = 0  # latest ones, except those that fp16 loss scaling recovers from
    passes: int = 0  # of the transformer over samples, on all processes
    best: float | None = None  # highest eval/avg so far
    algorithm: dict[str, float] = field(default_factory=dict)  # its state beside the weights
    # position in each data set of questions: flow_grpo.data.passes.PassState
    questions: list[dict[str, Any]] = field(default_factory=list)
    # the line of metrics.jsonl that belongs to this state, in case it was not written any more
    record: dict[str, Any] = field(default_factory=dict)
    # False: made to resume from, and removed as soon as there is a newer one
    kept: bool = True

    @property
    def applied(self) -> int:
        """Updates that changed the weights; the learning rate and moving average count these."""
        return self.step - self.skipped

    def write(self, checkpoint: Path) -> None:
        _write_json(checkpoint / PROGRESS, asdict(self))

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        return cls(**disk.read_json(checkpoint / PROGRESS))


def save_checkpoint(
    accelerator: Accelerator,
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    keep: int,
    best: bool = False,
) -> Path:
    """Let `write`, called on all processes, fill a temporary folder; then rename it.

    `latest` points to it afterwards, and `best` if it is the best. The newest `keep` checkpoints
    to be kept stay (0 keeps all), and these two always.
    """
    final, partial = checkpoint_folder(root, step), root / f".partial-{PREFIX}{step}"
    main = accelerator.is_main_process
    if gather_object([main and is_intact(final)])[0]:
        return final
    # Every failure is shared before any process continues, so that none waits for another.
    problem = _attempt(lambda: _begin(partial), root) if main else None
    problem = gather_object([problem])[0]
    if problem is None:
        problem = _attempt(lambda: write(partial), root)
        problem = next(filter(None, gather_object([problem])), None)
    if main and problem is None:
        problem = _attempt(lambda: _finish(partial, final, best), root)
    problem = gather_object([problem])[0]
    if problem is not None:
        left = ""
        if main:
            shutil.rmtree(partial, ignore_errors=True)
            left = _what_is_left(root)
        raise UserError(f"cannot save {final}: {problem}; {gather_object([left])[0]}")
    if main:
        _prune(root, step, keep)
    accelerator.wait_for_everyone()
    return final


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step}"


def list_checkpoints(root: Path) -> list[Path]:
    """Oldest first."""
    found = [p for p in root.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def newest_intact(root: Path) -> Path | None:
    """The checkpoint to go on from; those that were damaged are passed over with a warning."""
    for folder in reversed(list_checkpoints(root)):
        damage = find_damage(folder)
        if damage is None:
            return folder
        log.warning("%s is incomplete or damaged (%s); trying the one before", folder, damage)
    return None


def repair_links(newest: Path) -> None:
    """A run that was killed between the rename of a checkpoint and its links left them behind.
    `newest` is the one to go on from; the best is the first that scored what `newest` knows as the
    highest."""
    root, best = newest.parent, Progress.read(newest).best
    known = [p for p in list_checkpoints(root) if _step(p) <= _step(newest)]
    holder = next((p for p in known if best is not None and _score(p) == best), None)
    for marker, right in ((root / LATEST, newest), (root / BEST, holder)):
        if right is not None and marker.resolve() != right.resolve():
            _point(marker, right.name)
            log.warning("%s did not point to %s; now it does", marker, right.name)


def _score(checkpoint: Path) -> float | None:
    try:
        return Progress.read(checkpoint).record.get(f"eval/{TOTAL}")
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def is_intact(checkpoint: Path) -> bool:
    return find_damage(checkpoint) is None


def find_damage(checkpoint: Path) -> str | None:
    """What is not as it was written; None if every file is. Reads all of them."""
    try:
        manifest = _read_manifest(checkpoint)
        if PROGRESS not in manifest:
            return f"{STATE}/{MANIFEST} does not list {PROGRESS}"
        if damage := _compare(checkpoint, manifest):
            return damage
        Progress.read(checkpoint)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, TypeError, AttributeError) as error:
        return f"{STATE} cannot be read: {error}"
    return None


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    return disk.read_json(checkpoint / STATE / MANIFEST)


def _compare(checkpoint: Path, manifest: dict[str, Any]) -> str | None:
    for name, entry in manifest.items():
        # manifests once had the size only
        size, checksum = (entry, None) if isinstance(entry, int) else entry
        path = checkpoint / name
        found = path.stat()
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            return f"{name} has not the {size} bytes it was written with"
        if checksum is not None and _checksum(path) != checksum:
            return f"{name} has another checksum than when it was written"
    return None


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def weights_in(folder: Path) -> Path:
    """The weights to load: of a run its newest that are whole, of a checkpoint its average."""
    damage = None
    for place in [*reversed(list_checkpoints(folder / "checkpoints"))] or [folder]:
        names = ("ema_lora", "lora", "ema_transformer", "transformer", "ema_model", "model")
        found = next((place / name for name in names if (place / name).is_dir()), place)
        damage = damage_of_weights(found)
        if damage is None and list(found.glob("*.safetensors")):
            return found
        if damage is None:
            refuse_pickles(found)
            raise UserError(
                f"no checkpoint at {place}: name a run, a checkpoint or a folder in one"
            )
        log.warning("%s is damaged (%s)", found, damage)
    raise UserError(f"{folder} is damaged: {damage}; take another checkpoint")


def damage_of_weights(weights: Path) -> str | None:
    """What is not as it was written, if the weights still lie in a checkpoint: it knows them."""
    checkpoint = weights.resolve().parent
    try:
        manifest = _read_manifest(checkpoint).items()
        own = {name: entry for name, entry in manifest if Path(name).parts[:1] == (weights.name,)}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    try:
        return _compare(checkpoint, own)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _attempt(call: Callable[[], None], root: Path) -> str | None:
    """Why `call` failed, None if it did not. Libraries have errors of their own for a full disk."""
    try:
        call()
    except Exception as error:
        log.debug("saving failed", exc_info=True)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        full = os.strerror(errno.ENOSPC)
        if full not in reason and _is_full(root):
            return f"{full} ({reason})"
        return reason
    return None


def _is_full(root: Path) -> bool:
    try:
        return shutil.disk_usage(root).free < FULL
    except OSError:  # it was removed
        return False


def _begin(partial: Path) -> None:
    """Create an empty folder to write to. The run directory itself is not recreated: if it was
    removed, so were its config and metrics."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(exist_ok=True)
    (partial / STATE).mkdir(parents=True)


def _finish(partial: Path, final: Path, best: bool) -> None:
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    _write_json(
        partial / STATE / MANIFEST,
        {str(p.relative_to(partial)): [p.stat().st_size, _checksum(p)] for p in files},
    )
    disk.sync_all(partial)  # before the name says so
    damaged = final.with_name(f".damaged-{final.name}")
    if final.exists() or final.is_symlink():
        _remove(damaged)
        final.rename(damaged)
    partial.rename(final)
    disk.sync(final.parent)
    disk.sync(final.parents[1])  # which names checkpoints/ and metrics.jsonl
    for marker in (LATEST, BEST) if best else (LATEST,):
        _point(final.parent / marker, final.name)
    _remove(damaged)  # only now that there is another


def _remove(path: Path) -> None:
    """A folder, or a link to one that somebody moved elsewhere, which stays there."""
    try:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error.strerror or error)


def _point(marker: Path, name: str) -> None:
    """A symbolic link, so that `checkpoints/best/lora` can be loaded as it is."""
    new = marker.with_name(f".{marker.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    new.replace(marker)
    disk.sync(marker.parent)


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove what the checkpoint of `step` has superseded: nothing that is ahead of it, where a
    run fell back from a damaged one."""
    checkpoints = [p for p in list_checkpoints(root) if _step(p) <= step]
    pointed = {(root / marker).resolve() for marker in (LATEST, BEST)}
    kept = [p for p in checkpoints if _is_kept(p)]
    stay = {p.resolve() for p in (kept[-keep:] if keep else kept)} | pointed
    for folder in checkpoints:
        if folder.resolve() not in stay:
            _remove(folder)


def _is_kept(checkpoint: Path) -> bool:
    try:
        return Progress.read(checkpoint).kept
    except (OSError, ValueError, TypeError):
        return True  # damaged, but its weights may be good


def _what_is_left(root: Path) -> str:
    last = newest_intact(root)
    return f"{last} is intact" if last else "there is no earlier checkpoint"


def _write_json(path: Path, value: Any) -> None:
    disk.write_text(path, json.dumps(value, indent=1) + "\n")
