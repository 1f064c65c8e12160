"""Batch plan and path checks of a run; they do not import torch, which takes seconds."""

import os
from pathlib import Path

from flow_grpo.config.overrides import planned_world_size
from flow_grpo.errors import UserError, did_you_mean_file, join_hints
from flow_grpo.hub_access import check_hub_access, split_hub_id


class Plan:
    """Batch arithmetic of an epoch, checked before anything is loaded and logged at the start."""

    num_processes: int
    group_size: int  # samples of one prompt
    updates_per_pass: int  # one pass = all samples of an epoch
    inner_epochs: int  # passes per epoch
    context_parallel: int = 1  # processes that compute each sample together

    @property
    def world_size(self) -> int:
        """Processes of the run; `num_processes` counts those that compute a sample as one."""
        return self.num_processes * self.context_parallel

    @property
    def processes(self) -> str:
        """Return the number of processes that have samples of their own, for `rows`."""
        number, context = self.num_processes, self.context_parallel
        return f"{number} processes" if context == 1 else f"{number} groups of {context} processes"

    @property
    def updates(self) -> int:
        """Optimizer updates per epoch, over all its passes."""
        return self.updates_per_pass * self.inner_epochs

    def rows(self) -> dict[str, str]:
        """Return a label and a derivation for each number of the plan."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return the plan as aligned lines for the log."""
        updates = f"{self.updates} (train.num_inner_epochs={self.inner_epochs})"
        rows = {**self.rows(), "updates per epoch": updates}
        return "\n".join(f"{name:<21} {text}" for name, text in rows.items())


def suggest_divisor(number: int, value: int, noun: str) -> str:
    """Return "use A or B NOUN" with the divisors of `number` next to `value`, for hints."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < value][-1:]
    return _use([*below, *[n for n in divisors if n > value][:1]], noun)


def suggest_multiple(unit: int, value: int, noun: str) -> str:
    """Return "use A or B NOUN" with the multiples of `unit` next to `value`, for hints."""
    below = value // unit * unit
    return _use([*([below] if below else []), below + unit], noun)


def _use(numbers: list[int], noun: str) -> str:
    return f"use {' or '.join(map(str, numbers))} {noun}"


def check_divides(context: int, processes: int, field: str = "sample.context_parallel") -> None:
    """Raise a UserError unless the size of a context group divides the number of processes."""
    if processes % context:
        raise UserError(
            f"does not divide the number of processes, {processes}", field=field, value=context
        )


def context_size(size: int, planned: int | None) -> int:
    """Return the size of the context groups of this run.

    Args:
        size: The configured size.
        planned: Number of processes that a dry run plans for. Without enough processes to measure
            that plan as it is, it measures whole samples on each process.
    """
    here = int(os.environ.get("WORLD_SIZE", "1"))
    return 1 if planned and here % size else size


def count_processes() -> int:
    """Return the number of processes that the launcher started, or that a dry run plans for."""
    return planned_world_size() or 1


def check_start(logdir: str, run_name: str, resume: str, lora_path: str) -> None:
    """Reject an existing run name, and paths to start from that do not exist."""
    folder = Path(logdir, run_name)
    if run_name and not lock_path(folder).exists():  # else the lock decides
        check_run_name_free(folder, resume)
    if resume not in ("none", "auto") and not os.path.exists(resume):
        raise missing_checkpoint_error(resume, hint=did_you_mean_file(resume))
    check_lora_path(lora_path)


def check_lora_path(lora: str) -> None:
    """Reject a `train.lora_path` that exists neither on disk nor on the hub."""
    if is_missing(lora):
        raise UserError(
            "does not exist", field="train.lora_path", value=lora, hint=did_you_mean_file(lora)
        )
    if lora:
        _check_lora_files(Path(lora))
    if hub_id := split_hub_id(lora):
        check_hub_access("train.lora_path", hub_id[0], file=hub_id[1] or "adapter_config.json")


def _check_lora_files(path: Path) -> None:
    """Reject a path that is not a LoRA by its file names; its content is checked with the model."""
    problem, hint = "", "pass a LoRA directory or its .safetensors file"
    if os.path.isfile(path) and path.suffix != ".safetensors":
        problem = "is not a .safetensors file"
    elif os.path.isdir(path) and not os.path.exists(path / "adapter_config.json"):
        for name in ("model_index.json", "config.json"):
            if os.path.exists(path / name):
                problem = f"contains {name}, so it is a full model, not a LoRA"
        for content, kind in (("checkpoints", "a run directory"), ("state", "a checkpoint")):
            if os.path.isdir(path / content):
                problem = f"is {kind}, not a LoRA"
                hint = "pass the lora or ema_lora directory of a checkpoint"
    if problem:
        raise UserError(
            problem,
            field="train.lora_path",
            value=str(path),
            hint=hint,
        )


def is_missing(path: str) -> bool:
    """Return whether `path` neither exists nor can be a hub id (owner/name)."""
    return not os.path.exists(path or ".") and split_hub_id(path) is None


def lock_path(folder: Path) -> Path:
    """Return the lock file of a run directory."""
    return folder.with_name(f".{folder.name}.lock")


def check_run_name_free(folder: Path, resume: str) -> None:
    """Reject a new run whose directory exists, unless torchrun restarted it or it may resume."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # --max_restarts
    if folder.exists() and resume != "auto" and not restarts:
        raise UserError(
            "already exists",
            field=folder,
            hint=f"resume it with --resume {folder}, choose another run_name, or remove it",
        )


def missing_checkpoint_error(resume: str, reason: str = "", hint: str = "") -> UserError:
    """Return the UserError for a `resume` path that is neither a run nor an intact checkpoint."""
    return UserError(
        f"is neither a run nor an intact checkpoint{reason}",
        field="resume",
        value=resume,
        hint=join_hints(hint, "pass the directory of one"),
    )
