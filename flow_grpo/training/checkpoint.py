"""The files of a checkpoint: find, verify and describe them. `checkpoint_writer.py` writes them.

Problem: a run may be killed, lose power or fill the disk at any moment, even while it saves. A
resumed run must neither load a half-written checkpoint nor lose the previous one.

Invariant: a directory named `checkpoint-<step>` was written completely. `state/files.json` lists
size and SHA-256 of every other file, so later damage is found before anything is loaded, and the
previous checkpoint is used instead.

    checkpoints/
      checkpoint-<step>/
        lora/, ema_lora/       weights for other libraries; transformer/ or model/ without LoRA
        state/                 what only a resumed run needs
          trained.safetensors, ema.safetensors, reference.safetensors, optimizer.bin
                               (DeepSpeed and FSDP write their own, sharded files)
          lora.json            rank and alpha
          progress.json        `Progress`
          files.json           the manifest
      latest, best             symbolic links

Trade-off: every file is read once more to hash it, on saving and on loading. That is negligible
for LoRA but slows down loading all weights of a model; in return, a run never trains on damaged
state.
"""

import hashlib
import json
import logging
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flow_grpo import atomic_io
from flow_grpo.errors import UserError
from flow_grpo.rewards import TOTAL
from flow_grpo.training.distributed import call_on_main
from flow_grpo.untrusted_files import reject_pickles

log = logging.getLogger(__name__)

CHECKPOINT_PREFIX = "checkpoint-"
STATE_DIR = "state"  # what only a resumed run needs
MANIFEST_FILE = "files.json"  # size and SHA-256 of every other file of the checkpoint
PROGRESS_FILE = f"{STATE_DIR}/progress.json"
WEIGHT_FOLDERS = ("lora", "transformer", "model")
EMA_PREFIX = "ema_"  # of the directories of averaged weights
LATEST, BEST = "latest", "best"


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

    def dumps(self) -> str:
        return dump_json(asdict(self))

    def write(self, checkpoint: Path) -> None:
        atomic_io.write_text_atomic(checkpoint / PROGRESS_FILE, self.dumps())

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        return cls(**atomic_io.read_json_limited(checkpoint / PROGRESS_FILE))


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in `root`, oldest first, whether or not they are intact."""
    found = [
        p
        for p in root.glob(f"{CHECKPOINT_PREFIX}*")
        if p.name.removeprefix(CHECKPOINT_PREFIX).isdigit()
    ]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
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
    known = [p for p in list_checkpoints(root) if step_of(p) <= step_of(newest)]
    best_checkpoint = next((p for p in known if best is not None and _eval_score(p) == best), None)
    for link, target in ((root / LATEST, newest), (root / BEST, best_checkpoint)):
        if target is not None and link.resolve() != target.resolve():
            update_link(link, target.name)
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
        if checksum is not None and file_checksum(path) != checksum:
            return f"{name} has a wrong checksum"
    return None


def file_checksum(path: Path) -> str:
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
        names = [prefix + name for name in WEIGHT_FOLDERS for prefix in (EMA_PREFIX, "")]
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


def update_link(link: Path, name: str) -> None:
    """Point `link` to `name` atomically; it is a symbolic link, so `best/lora` is a path."""
    new = link.with_name(f".{link.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    new.replace(link)
    atomic_io.fsync_path(link.parent)


def dump_json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"
