"""Where a run begins: a new folder, its own last checkpoint, or that of another run."""

import errno
import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, load
from safetensors import SafetensorError
from torch.optim import Optimizer

from flow_grpo import disk
from flow_grpo.config import places
from flow_grpo.config.custom import CUSTOM
from flow_grpo.config.fields import SharedFields
from flow_grpo.config.mistakes import line_to_type
from flow_grpo.config.saved import CONFIG, PLACES, as_started, start_folders
from flow_grpo.config.trade import OPEN_FIELDS, Unchecked
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import dotted, parse_json, read_json
from flow_grpo.run.checkpoint import (
    PREFIX,
    STATE,
    Progress,
    find_damage,
    list_checkpoints,
    newest_intact,
    repair_links,
)
from flow_grpo.run.lock import RunLock, find_writer
from flow_grpo.run.origin import changed_prompts, write_origin
from flow_grpo.run.plan import check_free, no_checkpoint

log = logging.getLogger(__name__)

TORCH_FILES = ("*.bin", "*.pt", "*.pkl")  # written by torch.save
SHARDS = "torch.distributed.checkpoint"
# what the index of FSDP's files is made of
INDEX_TYPES = {
    *((f"{SHARDS}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    *((f"{SHARDS}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((f"{SHARDS}.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((f"{SHARDS}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath")),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError),
    *(pickle.UnpicklingError, SafetensorError),
)
# what a run is for; a setting beside it may change
GOAL = (
    *("algorithm", "train.loss", "pretrained.model", "pretrained.revision", "dataset"),
    *("reward_fn", "eval_reward_fn", "custom_rewards", *CUSTOM),
    *("environment", "environment_options"),
)
# What the weights and the optimizer's state were made for. A LoRA that was loaded brings its own
# rank and alpha, which are compared when the state is.
FIXED = ("use_lora", "train.use_8bit_adam", "train.lora_rank", "train.lora_alpha")


def refuse_code(accelerator: Accelerator, checkpoint: Path) -> None:
    """Tell of a file that is not plain data before anything expensive starts."""
    state = checkpoint / STATE
    if next(state.glob("custom_checkpoint_*.pkl"), None):
        raise UserError(
            f"cannot resume from {checkpoint}: an older version wrote it, with the moving average "
            "as a pickle; start a new run from its lora folder with --config.train.lora_path"
        )
    files = {path: _read_data for name in TORCH_FILES for path in state.rglob(name)}
    files |= {path: _read_index for path in state.rglob(".metadata")}
    for path, read in files.items():
        try:
            with data_only(accelerator):
                read(path)
        except LOADING_ERRORS as error:
            log.debug("%s was refused", path, exc_info=True)
            raise UserError(
                f"cannot resume from {checkpoint}: {path.relative_to(checkpoint)} is damaged, "
                "of another way to distribute, or holds more than data, which is never run"
            ) from error


def load_progress(
    accelerator: Accelerator,
    checkpoint: Path | None,
    optimizer: Optimizer,
    settings: dict[str, Any],
) -> Progress:
    """Bring everything that the accelerator knows back to where it was.

    `settings` of the optimizer are what the config says now, whatever they were.
    """
    if checkpoint is None:
        return Progress()
    try:
        with data_only(accelerator):
            # DeepSpeed's own files have no frozen weights (the others have no use for the argument)
            accelerator.load_state(str(checkpoint / STATE), load_module_strict=False)
        progress = Progress.read(checkpoint)
    except LOADING_ERRORS as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, pickle.UnpicklingError):  # torch would advise to run it
            reason = "it holds more than data, which is never run"
        raise UserError(
            f"cannot resume from {checkpoint}: {reason}; was it another model, LoRA rank or way "
            "to distribute?"
        ) from error
    for group in optimizer.param_groups:
        group.update(settings)
    return progress


@contextmanager
def data_only(accelerator: Accelerator) -> Iterator[None]:
    """torch.load, whoever calls it, reads tensors and plain values only.

    accelerate and DeepSpeed ask it for more; that is what torch's own variable is for.
    """
    force, allow = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = {name: os.environ.pop(name, None) for name in (force, allow)}
    os.environ[force] = "1"
    try:
        with torch.serialization.safe_globals(_types_of_engine(accelerator)):
            yield
    finally:
        del os.environ[force]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _types_of_engine(accelerator: Accelerator) -> list[type]:
    """DeepSpeed's files hold objects of its own, which do nothing when they are made."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return []
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]


def _read_data(path: Path) -> None:
    load(path, map_location="cpu", mmap=True)  # tensors stay on the disk


def _read_index(path: Path) -> None:
    with path.open("rb") as file:
        _Index(file).load()


class _Index(pickle.Unpickler):
    """torch reads it with plain pickle."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in INDEX_TYPES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


@dataclass(frozen=True)
class Start:
    folder: Path  # of the run
    checkpoint: Path | None  # to go on from
    is_new: bool  # the folder is still to be made


def find_start(
    accelerator: Accelerator, config: dict[str, Any], until: ExitStack
) -> tuple[Start, RunLock | None]:
    """What `resume` ("none", "auto" or a path) means here; one process decides for all.

    That one locks the folder, and holds it until `until` is closed.
    """
    decision: list[Any] = [None]
    lock = None
    if accelerator.is_main_process:
        try:
            folder = _run_folder(config["logdir"], config["run_name"], config["resume"])
            lock = _take_lock(folder)
            until.callback(lock.release)
            start = _find_start(folder, config["resume"])
            if start.checkpoint or not start.is_new:
                compare_configs(start, config)
            if start.checkpoint is not None:
                refuse_code(accelerator, start.checkpoint)
            decision = [start]
        except UserError as error:
            decision = [error]
        except OSError as error:
            decision = [UserError(f"cannot read {error.filename}: {error.strerror}")]
    broadcast_object_list(decision)
    if isinstance(decision[0], UserError):
        raise decision[0]
    return decision[0], lock


def _run_folder(logdir: str, run_name: str, resume: str) -> Path:
    if resume == "auto" and not run_name:
        raise UserError("resume=auto needs a run_name, the folder under logdir to go on with")
    return Path(logdir) / (run_name or datetime.now().strftime("%Y.%m.%d_%H.%M.%S"))


def _take_lock(folder: Path) -> RunLock:
    try:
        if folder.exists() and not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return RunLock(folder)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; name another folder with --config.logdir"
        ) from error


def _find_start(folder: Path, resume: str) -> Start:
    if not folder.exists():
        checkpoint = None if resume in ("none", "auto") else _checkpoint_at(Path(resume))
        return Start(folder, checkpoint, is_new=True)
    check_free(folder, resume)
    root = folder / "checkpoints"
    checkpoint = newest_intact(root)
    if checkpoint is None and (damaged := list_checkpoints(root)):
        raise UserError(
            f"cannot go on: none of the {len(damaged)} checkpoints in {root} is whole; bring one "
            "back from a copy, or choose another run_name to start anew, from a LoRA in there that "
            "is good with --config.train.lora_path"
        )
    return Start(folder, checkpoint, is_new=False)


def _checkpoint_at(path: Path) -> Path:
    named = path.resolve()  # latest and best are links
    found = named if named.name.startswith(PREFIX) else newest_intact(named / "checkpoints")
    damage = "" if found is None else find_damage(found)
    if damage is not None:
        reason = f" ({damage})" if damage else ""
        raise UserError(no_checkpoint(str(path), reason))
    _check_not_written(found, path)
    return found


def _check_not_written(checkpoint: Path, path: Path) -> None:
    """Reject a checkpoint of a run that is still active, as it prunes older checkpoints."""
    if checkpoint.parent.name == "checkpoints" and (writer := find_writer(checkpoint.parents[1])):
        raise UserError(
            f"resume={str(path)!r} is a run that {writer} still writes to, and it may remove the "
            f"checkpoint while it is read; wait until it ends, or copy {checkpoint} and resume "
            "from the copy"
        )


def compare_configs(start: Start, config: dict[str, Any]) -> None:
    """Tell what is not as it was in the run to go on with; refuse what cannot be used, and another
    goal than it had."""
    run = start.checkpoint.parents[1] if start.checkpoint else start.folder
    path = run / CONFIG
    try:
        before, now = _before(run), by_name(config)
    except FileNotFoundError:
        log.warning("there is no %s, so what has changed since is not told", path)
        return
    except (UserError, OSError, AttributeError) as error:
        raise UserError(
            f"cannot resume from {start.checkpoint or run}: {first_line(error)}; bring {CONFIG} "
            "back, or remove it and what has changed since is not told"
        ) from error
    loaded = before.get("train.lora_path") or now.get("train.lora_path")
    for name in FIXED[:2] if loaded or not now["use_lora"] else FIXED:
        if start.checkpoint and name in before and before[name] != now[name]:
            raise UserError(
                f"{name}={now[name]} but {start.checkpoint} was trained with {before[name]}; set "
                "it back, or start a new run"
            )
    changed = _changed(before, now)
    prompts = [] if "dataset" in changed else changed_prompts(run, config["dataset"])
    _refuse_another_goal(run, before, now, prompts, goes_on=not start.is_new)
    for name in prompts:
        log.warning("resumed with other prompts: %s changed", name)
    for name in changed:
        log.warning("resumed with another %s: %r, it was %r", name, now[name], before[name])


def check_goal(config: Unchecked | SharedFields) -> None:
    """Refuse another goal than that of the run to go on with, before its settings are checked:
    those of another method would be told first, and obeyed in vain."""
    fields = config.to_dict() if isinstance(config, Unchecked) else asdict(config)
    fields = json.loads(json.dumps(fields, default=str))  # as a run writes them: tuples are lists
    run = Path(str(fields.get("logdir", ""))) / str(fields.get("run_name", ""))
    if fields.get("resume") != "auto" or not fields.get("run_name"):
        return
    try:
        before, now = _before(run), by_name(fields)
    except (UserError, OSError, AttributeError):
        return  # the checks tell of it
    _refuse_another_goal(run, before, now)


def _before(run: Path) -> dict[str, Any]:
    return by_name(as_started(read_json(run / CONFIG), start_folders(run)))


def _refuse_another_goal(
    run: Path,
    before: dict[str, Any],
    now: dict[str, Any],
    prompts: Sequence[str] = (),
    *,
    goes_on: bool = True,
) -> None:
    """`prompts`: files of the data set that are not as they were."""
    others = [name for name in _changed(before, now) if name in GOAL]
    told = [f"{name}={now[name]!r} (it was {before[name]!r})" for name in others]
    told += [f"the prompts in {', '.join(prompts)} changed"] if prompts else []
    if told and now.get("resume_changed") is not True:
        back = "set it back" if others else "bring the prompts back"
        if others and goes_on:
            line = line_to_type(f"--resume {run}", without=[*PLACES, *others])
            back = f"go on as it was with {line}"
        raise UserError(
            f"{run} had another goal: {', '.join(told)}; {back}, or, to change it on purpose, add "
            "--config.resume_changed=True"
        )


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    both = (before.keys() & now.keys()) - {*PLACES, "resume_changed"}
    return [name for name in sorted(both) if _place(before[name]) != _place(now[name])]


def by_name(config: dict[str, Any]) -> dict[str, Any]:
    """The fields by their full names; of those with names of the user's, what is not empty. An
    environment may read anything from its options, also False."""
    fields = {name: value for name, value in config.items() if name not in OPEN_FIELDS}
    whole = {name: config[name] for name in OPEN_FIELDS if name in config}
    used = {
        name: {k: v for k, v in each.items() if v or name == "environment_options"}
        for name, each in whole.items()
    }
    return {**dict(dotted(fields)), **used}


def _place(value: Any) -> Any:
    """A folder, or several, by one name, whatever it was called from."""

    def real(path: str) -> str:
        found = places.find(path)
        return os.path.realpath(found) if os.path.exists(found) else path

    return places.each_set(value, real) if isinstance(value, str) else value


def prepare_folder(start: Start, config: dict[str, Any]) -> None:
    """Make the folder, or bring it back to where its checkpoint was; on one process."""
    made: list[Path] = []
    try:
        made = disk.make_folders(start.folder)
        disk.write_text(start.folder / CONFIG, json.dumps(config, indent=2) + "\n")
        write_origin(start.folder, config["dataset"])
        _prepare_metrics(start, start.folder / "metrics.jsonl")
        if start.checkpoint is not None and not start.is_new:
            repair_links(start.checkpoint)
    except OSError as error:
        if start.folder in made:  # a partial run directory would block the same command
            shutil.rmtree(start.folder, ignore_errors=True)
        raise UserError(f"cannot write to {start.folder}: {error.strerror}") from error


def _prepare_metrics(start: Start, metrics: Path) -> None:
    if start.checkpoint is None:
        if metrics.exists() and metrics.stat().st_size:
            aside = _set_aside(metrics)
            log.warning("%s has no checkpoint; its metrics so far are %s", start.folder, aside)
        return
    source = start.checkpoint.parents[1] / metrics.name if start.is_new else metrics
    lines, damaged = _lines_until(source, Progress.read(start.checkpoint))
    if damaged:
        kept = source if start.is_new else _set_aside(metrics)
        log.warning("left out what is no JSON with an epoch: line %s of %s", damaged, kept)
    disk.write_text(metrics, "".join(lines))


def _lines_until(path: Path, progress: Progress) -> tuple[list[str], str]:
    """The lines of the epochs that the checkpoint has; later ones will be written again. Also the
    numbers of those that cannot be read."""
    content = path.read_bytes() if path.exists() else b""
    lines, damaged, last = [], [], -1
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            text = line.decode("utf-8")
            epoch = int(parse_json(text, str(path))["epoch"])
        except (UserError, ValueError, KeyError, TypeError, OverflowError):
            was_cut = line.startswith(b"{") and not line.endswith(b"\n")  # the run was killed
            damaged += [] if was_cut else [number]
            continue
        if epoch <= progress.epoch:
            last = epoch
            lines.append(text.rstrip() + "\n")
    if last < progress.epoch and progress.record:
        lines.append(json.dumps(progress.record) + "\n")
    return lines, ", ".join(map(str, damaged))


def _set_aside(path: Path) -> Path:
    """Under a name that is free; nothing that was written is lost."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(aside)
