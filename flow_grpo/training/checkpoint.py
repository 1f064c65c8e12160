"""Write, verify, prune and find checkpoints.

Problem: a run may be killed, lose power or fill the disk at any moment, even while it saves. A
resumed run must neither load a half-written checkpoint nor lose the previous one.

Invariant: a directory named `checkpoint-<step>` was written completely. A checkpoint is written to
`.partial-checkpoint-<step>`, every file is flushed to disk (fsync), and only then is the directory
renamed, which is atomic. `state/files.json` lists size and SHA-256 of every other file, so later
damage is found before anything is loaded, and the previous checkpoint is used instead. An older
checkpoint is removed only after a newer one has its final name.

    checkpoints/
      checkpoint-<step>/
        lora/, ema_lora/       weights for other libraries; transformer/ or model/ without LoRA
        state/                 what only a resumed run needs
          trained.safetensors, ema.safetensors, reference.safetensors, optimizer.bin,
          random_states_<rank>.pkl    (DeepSpeed and FSDP write their own, sharded files)
          lora.json            rank and alpha
          progress.json        `Progress`
          files.json           the manifest
      latest, best             symbolic links

Trade-off: every file is read once more to hash it, on saving and on loading. That is negligible
for LoRA but slows down saving all weights of a model; in return, a run never trains on damaged
state.
"""

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

from flow_grpo import atomic_io
from flow_grpo.errors import UserError, first_line
from flow_grpo.rewards import TOTAL
from flow_grpo.training.distributed import call_on_main
from flow_grpo.untrusted_files import reject_pickles

log = logging.getLogger(__name__)

CHECKPOINT_PREFIX = "checkpoint-"
STATE_DIR = "state"  # what only a resumed run needs
MANIFEST_FILE = "files.json"  # size and SHA-256 of every other file of the checkpoint
PROGRESS_FILE = f"{STATE_DIR}/progress.json"
WEIGHT_FOLDERS = ("lora", "transformer", "model")  # averaged weights have the prefix "ema_"
LATEST, BEST = "latest", "best"
MIN_FREE_BYTES = 2**20  # a disk with less free space counts as full


@dataclass
class Progress:
    """How far a run has come; stored in a checkpoint as state/progress.json."""

    epoch: int = -1  # last finished epoch; 0 is the evaluation before training
    step: int = 0  # optimizer updates, including skipped ones
    skipped: int = 0  # updates skipped because of a non-finite gradient
    skipped_in_a_row: int = 0  # most recent ones, except those that fp16 loss scaling recovers from
    passes: int = 0  # forward passes of the transformer, in samples, over all processes
    best: float | None = None  # highest eval/avg so far
    algorithm: dict[str, float] = field(default_factory=dict)  # state of the algorithm
    # position in each question data set: flow_grpo.data.passes.PassState
    questions: list[dict[str, Any]] = field(default_factory=list)
    # line of metrics.jsonl for this state; the run may be killed before it writes that line
    record: dict[str, Any] = field(default_factory=dict)
    # False: saved for resuming only, and removed as soon as there is a newer checkpoint
    kept: bool = True

    @property
    def applied(self) -> int:
        """Number of updates applied to the weights; learning rate and EMA depend on it."""
        return self.step - self.skipped

    def write(self, checkpoint: Path) -> None:
        _write_json(checkpoint / PROGRESS_FILE, asdict(self))

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        return cls(**atomic_io.read_json_limited(checkpoint / PROGRESS_FILE))


def save_checkpoint(
    accelerator: Accelerator,
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    keep: int,
    best: bool = False,
) -> Path:
    """Write a checkpoint atomically and update the links `latest` and `best`.

    Call it on all processes. An error on any of them is raised on all.

    Args:
        root: The `checkpoints` directory of the run.
        step: Optimizer step, the number in the checkpoint's name.
        write: Fills the given temporary directory; called on all processes.
        keep: Number of most recent checkpoints to keep, 0 for all. Those that `latest` and `best`
            point to always stay.
        best: Whether `best` points to this checkpoint afterwards.

    Returns:
        The directory of the checkpoint. If an intact one exists for `step`, nothing is written.
    """
    name = f"{CHECKPOINT_PREFIX}{step}"
    final, partial = root / name, root / f".partial-{name}"
    if call_on_main(accelerator, lambda: is_intact(final)):
        return final
    # Each failure is shared before any process continues, so that no process waits for another.
    problem = call_on_main(
        accelerator, lambda: _try_and_describe(lambda: _create_partial(partial), root)
    )
    if problem is None:
        problem = _try_and_describe(lambda: write(partial), root)
        problem = next(filter(None, gather_object([problem])), None)
    if problem is None:
        problem = call_on_main(
            accelerator, lambda: _try_and_describe(lambda: _publish(partial, final, best), root)
        )
    if problem is not None:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"cannot save {final}: {problem}", hint=describe_latest_intact(accelerator, root)
        )
    if accelerator.is_main_process:
        _remove_superseded(root, step, keep)
    accelerator.wait_for_everyone()
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in `root`, oldest first, whether or not they are intact."""
    found = [
        p
        for p in root.glob(f"{CHECKPOINT_PREFIX}*")
        if p.name.removeprefix(CHECKPOINT_PREFIX).isdigit()
    ]
    return sorted(found, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(CHECKPOINT_PREFIX))


def find_latest_intact(root: Path) -> Path | None:
    """Return the newest intact checkpoint, or None; warn about each damaged one."""
    for folder in reversed(list_checkpoints(root)):
        damage = find_damage(folder)
        if damage is None:
            return folder
        log.warning("%s is incomplete or damaged (%s); trying the previous one", folder, damage)
    return None


def describe_latest_intact(accelerator: Accelerator, root: Path) -> str:
    """Return a phrase that names the newest intact checkpoint. Call it on all processes."""
    found = call_on_main(accelerator, lambda: find_latest_intact(root))
    return f"the last good checkpoint is {found}" if found else "there is no checkpoint yet"


def repair_links(newest: Path) -> None:
    """Repair `latest` and `best` if a run was killed before it updated them.

    Args:
        newest: The checkpoint to resume from. `best` is the first checkpoint whose eval score
            equals the highest one that `newest` has recorded.
    """
    root, best = newest.parent, Progress.read(newest).best
    known = [p for p in list_checkpoints(root) if _step_of(p) <= _step_of(newest)]
    best_checkpoint = next((p for p in known if best is not None and _eval_score(p) == best), None)
    for link, target in ((root / LATEST, newest), (root / BEST, best_checkpoint)):
        if target is not None and link.resolve() != target.resolve():
            _update_link(link, target.name)
            log.warning("%s did not point to %s; repaired", link, target.name)


def _eval_score(checkpoint: Path) -> float | None:
    """Return the mean evaluation reward recorded in a checkpoint, or None if there is none."""
    try:
        return Progress.read(checkpoint).record.get(f"eval/{TOTAL}")
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def is_intact(checkpoint: Path) -> bool:
    return find_damage(checkpoint) is None


def find_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if all its files match the manifest."""
    try:
        manifest = _read_manifest(checkpoint)
        if PROGRESS_FILE not in manifest:
            return f"{STATE_DIR}/{MANIFEST_FILE} does not list {PROGRESS_FILE}"
        if damage := _verify_files(checkpoint, manifest):
            return damage
        Progress.read(checkpoint)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, TypeError, AttributeError) as error:
        return f"{STATE_DIR} cannot be read: {error}"
    return None


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    return atomic_io.read_json_limited(checkpoint / STATE_DIR / MANIFEST_FILE)


def _verify_files(checkpoint: Path, manifest: dict[str, Any]) -> str | None:
    """Return the first file that differs from the manifest in size or checksum; None if none does.

    A missing file raises OSError.
    """
    for name, entry in manifest.items():
        # manifests of old versions have sizes only
        size, checksum = (entry, None) if isinstance(entry, int) else entry
        path = checkpoint / name
        found = path.stat()
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            return f"{name} is not a file of {size} bytes"
        if checksum is not None and _checksum(path) != checksum:
            return f"{name} has a wrong checksum"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_weights(folder: Path) -> Path:
    """Return the directory with the weights to load, the EMA weights if there are any.

    Args:
        folder: A run (its newest intact weights are used), a checkpoint, or a directory of weights.

    Raises:
        UserError: If there are no weights, or all are damaged.
    """
    damage = None
    for candidate in list_checkpoints(folder / "checkpoints")[::-1] or [folder]:
        names = [prefix + name for name in WEIGHT_FOLDERS for prefix in ("ema_", "")]
        found = next((candidate / name for name in names if (candidate / name).is_dir()), candidate)
        damage = find_weight_damage(found)
        if damage is None and list(found.glob("*.safetensors")):
            return found
        if damage is None:
            reject_pickles(found)
            raise UserError(
                "has no weights",
                field=candidate,
                hint="pass a run, a checkpoint, or a weights directory in a checkpoint",
            )
        log.warning("%s is damaged (%s)", found, damage)
    raise UserError(f"is damaged: {damage}", field=folder, hint="use another checkpoint")


def find_weight_damage(weights: Path) -> str | None:
    """Return what is wrong with a directory of weights; None if intact or not in a checkpoint."""
    checkpoint = weights.resolve().parent
    try:
        manifest = _read_manifest(checkpoint).items()
        own = {name: entry for name, entry in manifest if Path(name).parts[:1] == (weights.name,)}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    try:
        return _verify_files(checkpoint, own)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _try_and_describe(call: Callable[[], None], root: Path) -> str | None:
    """Return why `call` failed, or None if it did not; mention the disk of `root` if it is full."""
    try:
        call()
    except Exception as error:  # not every library reports a full disk as such
        log.debug("saving failed", exc_info=True)
        reason = first_line(error)
        full = os.strerror(errno.ENOSPC)
        if full not in reason and _is_full(root):
            return f"{full} ({reason})"
        return reason
    return None


def _is_full(root: Path) -> bool:
    """Return whether the disk of `root` has less than `MIN_FREE_BYTES` available."""
    try:
        return shutil.disk_usage(root).free < MIN_FREE_BYTES
    except OSError:  # the directory was removed
        return False


def _create_partial(partial: Path) -> None:
    """Create an empty directory to write to.

    The run directory itself is not recreated: if it was removed, so were its config and metrics.
    """
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(exist_ok=True)
    (partial / STATE_DIR).mkdir(parents=True)


def _publish(partial: Path, final: Path, best: bool) -> None:
    """Write the manifest, give the checkpoint its final name and update the links."""
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    _write_json(
        partial / STATE_DIR / MANIFEST_FILE,
        {str(p.relative_to(partial)): [p.stat().st_size, _checksum(p)] for p in files},
    )
    atomic_io.fsync_tree(partial)  # before it gets the name of a complete checkpoint
    damaged = final.with_name(f".damaged-{final.name}")
    if final.exists() or final.is_symlink():
        _remove(damaged)
        final.rename(damaged)
    partial.rename(final)
    atomic_io.fsync_path(final.parent)
    atomic_io.fsync_path(final.parents[1])  # the directory entry of checkpoints/
    for link in (LATEST, BEST) if best else (LATEST,):
        _update_link(final.parent / link, final.name)
    _remove(damaged)  # now that its replacement is in place


def _remove(path: Path) -> None:
    """Remove a directory, or a link to one; warn if that fails."""
    try:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error.strerror or error)


def _update_link(link: Path, name: str) -> None:
    """Point `link` to `name` atomically; it is a symbolic link, so `best/lora` is a path."""
    new = link.with_name(f".{link.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    new.replace(link)
    atomic_io.fsync_path(link.parent)


def _remove_superseded(root: Path, step: int, keep: int) -> None:
    """Remove old checkpoints, except the last `keep` and those that `latest` and `best` point to.

    Checkpoints with `Progress.kept` False do not count as one of the last `keep`, and are removed
    unless linked. Checkpoints after `step`, which exist if a run fell back, stay.
    """
    checkpoints = [p for p in list_checkpoints(root) if _step_of(p) <= step]
    linked = {(root / link).resolve() for link in (LATEST, BEST)}
    kept = [p for p in checkpoints if _is_kept(p)]
    stay = {p.resolve() for p in (kept[-keep:] if keep else kept)} | linked
    for folder in checkpoints:
        if folder.resolve() not in stay:
            _remove(folder)


def _is_kept(checkpoint: Path) -> bool:
    """Return `Progress.kept` of a checkpoint, or True if its progress cannot be read."""
    try:
        return Progress.read(checkpoint).kept
    except (OSError, ValueError, TypeError):
        return True  # its state is damaged, but its weights may be intact


def _write_json(path: Path, value: Any) -> None:
    atomic_io.write_text_atomic(path, json.dumps(value, indent=1) + "\n")
