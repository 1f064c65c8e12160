"""What can be told of a run by its settings and the disk alone, before torch is imported, which
takes seconds."""

import os
from pathlib import Path

from flow_grpo.access import check_access
from flow_grpo.config.custom import check_file
from flow_grpo.config.fields import SharedFields
from flow_grpo.config.overrides import planned_processes
from flow_grpo.errors import UserError, with_nearest_file


class Plan:
    """The arithmetic of an epoch: checked before anything is loaded, printed before it starts."""

    num_processes: int
    group_size: int  # samples of one prompt
    updates_per_pass: int  # over the samples of an epoch
    inner_epochs: int  # passes

    @property
    def updates(self) -> int:
        return self.updates_per_pass * self.inner_epochs

    def rows(self) -> dict[str, str]:
        """What the numbers are of, and how they come about."""
        raise NotImplementedError

    def describe(self) -> str:
        updates = f"{self.updates} (train.num_inner_epochs={self.inner_epochs})"
        rows = {**self.rows(), "updates per epoch": updates}
        return "\n".join(f"{name:<21} {text}" for name, text in rows.items())


def count_processes() -> int:
    """Return the number of processes that the launcher started, or that a dry run plans for."""
    return planned_processes() or 1


def was_restarted() -> bool:
    """torchrun and accelerate start a run again whose processes died (--max_restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def check_places(config: SharedFields) -> None:
    """Refuse the name of a run that there is, and what to start from where there is nothing."""
    folder = Path(config.logdir, config.run_name)
    if config.run_name and not lock_of(folder).exists():  # else another process is at it
        check_free(folder, config.resume)
    if config.resume not in ("none", "auto") and not os.path.exists(config.resume):
        raise UserError(with_nearest_file(no_checkpoint(config.resume), config.resume))
    check_lora_path(config.train.lora_path)
    for name in (*config.reward_fn, *config.eval_reward_fn):
        if name in config.custom_rewards and not config.reward_servers.get(name):
            check_file(config.custom_rewards[name], f"reward {name!r}")


def check_lora_path(lora: str) -> None:
    """Reject a `train.lora_path` that exists neither on disk nor on the hub."""
    if is_lost(lora):
        message = f"no LoRA at train.lora_path={lora!r}: there is no such file or folder"
        raise UserError(with_nearest_file(message, lora))
    if lora:
        _check_lora_files(Path(lora))
    check_access("train.lora_path", lora, file="adapter_config.json")


def _check_lora_files(path: Path) -> None:
    """Reject what is no LoRA by its names alone: to read it, the model is loaded first."""
    what = ""
    if os.path.isfile(path) and path.suffix != ".safetensors":
        what = "is not a .safetensors file"
    elif os.path.isdir(path) and not os.path.exists(path / "adapter_config.json"):
        for name in ("model_index.json", "config.json"):
            if os.path.exists(path / name):
                what = f"has a {name}, so it is a model and not a LoRA"
    if what:
        raise UserError(
            f"train.lora_path={str(path)!r} {what}; name the folder of a LoRA, or its file"
        )


def is_lost(path: str) -> bool:
    """Whether there is nothing, and it is no name for the hub either, which would be asked for it
    again and again."""
    there, parts = os.path.exists(path or "."), Path(path).parts
    return not there and (os.path.isabs(path) or len(parts) != 2 or Path(path).parent.is_dir())


def lock_of(folder: Path) -> Path:
    """The file that says who writes to the folder of a run."""
    return folder.with_name(f".{folder.name}.lock")


def check_free(folder: Path, resume: str) -> None:
    """Refuse a new run where there is one of its name."""
    if folder.exists() and resume != "auto" and not was_restarted():
        raise UserError(
            f"{folder} already exists; go on with it (--resume {folder}), choose another "
            "run_name or remove it"
        )


def no_checkpoint(resume: str, reason: str = "") -> str:
    return (
        f"resume={resume!r} is neither a run nor a whole checkpoint{reason}; name the folder of one"
    )
