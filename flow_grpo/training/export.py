"""Export the weights of a checkpoint, merged into the model they were trained from."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from flow_grpo import atomic_io
from flow_grpo.errors import UserError, first_line
from flow_grpo.hub_access import split_hub_id
from flow_grpo.training.checkpoint import (
    CHECKPOINT_PREFIX,
    EMA_PREFIX,
    WEIGHT_FOLDERS,
    find_weight_damage,
    find_weights,
)
from flow_grpo.training.finite import first_nonfinite
from flow_grpo.training.weight_sources import locate_weights
from flow_grpo.untrusted_files import read_json


@dataclass(frozen=True)
class ExportSource:
    """The weights to export, and what is known from their path."""

    weights: Path  # directory of a LoRA or of a full model, or file of a LoRA

    @classmethod
    def find(cls, checkpoint: Path, *, raw: bool = False) -> "ExportSource":
        """Return the weights to export.

        Args:
            checkpoint: A run, a checkpoint or a directory of weights, as for `find_weights`, the
                .safetensors file of a LoRA, or a hub id.
            raw: Whether to export the trained weights instead of their moving average.
        """
        if checkpoint.is_file() or split_hub_id(str(checkpoint)):
            found = locate_weights(str(checkpoint))
        else:
            found = find_weights(checkpoint)
        weights = found.resolve()  # "best" and "latest" are links
        plain = weights.with_name(weights.name.removeprefix(EMA_PREFIX))
        if raw and plain != weights:
            if weights == checkpoint.resolve():
                raise UserError(
                    "contains EMA weights, but --raw asks for the raw ones",
                    field=checkpoint,
                    hint=f"pass {plain.name} or omit --raw",
                )
            weights = plain
        if raw and not weights.is_dir():
            raise UserError(
                "does not exist", field=weights, hint="omit --raw to export the EMA weights"
            )
        if damage := find_weight_damage(weights):
            raise UserError(f"is damaged: {damage}", field=weights, hint="use another checkpoint")
        return cls(weights)

    @property
    def is_lora(self) -> bool:
        """Whether the weights are a LoRA; a directory of full weights has a config.json."""
        return not (self.weights / "config.json").is_file()

    @property
    def is_ema(self) -> bool | None:
        """Whether these are averaged weights; None if the directory's name does not show it."""
        name = self.weights.name
        known = name.removeprefix(EMA_PREFIX) in WEIGHT_FOLDERS
        return name.startswith(EMA_PREFIX) if known else None

    @property
    def step(self) -> int | None:
        """Optimizer step of the checkpoint; None outside a directory checkpoint-N."""
        step = self.weights.parent.name.removeprefix(CHECKPOINT_PREFIX)
        return int(step) if step.isdigit() else None

    @property
    def run(self) -> Path | None:
        """The run directory, if the path is RUN/checkpoints/checkpoint-N/lora."""
        if len(self.weights.parents) < 3:
            return None
        run = self.weights.parents[2]
        return run if (run / "config.json").is_file() and self.step is not None else None

    def trained_model(self) -> tuple[str, str]:
        """Return model and revision that the run started from.

        Raises:
            UserError: If the weights are not in a run directory.
        """
        hint = "pass --model"
        if self.run is None:
            raise UserError(
                "is not in a run directory, so its base model is unknown",
                field=self.weights,
                hint=hint,
            )
        try:
            config = read_json(self.run / "config.json")["pretrained"]
            return str(config["model"]), str(config.get("revision", "main"))
        except (UserError, OSError, KeyError, TypeError, AttributeError) as error:
            path = self.run / "config.json"
            raise UserError("does not name a model", field=path, hint=hint) from error

    def __str__(self) -> str:
        """Return the part of the path that identifies the run and the step."""
        return str(self.weights.relative_to(self.run.parent)) if self.run else self.weights.name


def reject_existing(out: Path) -> None:
    """Raise a UserError if the output path exists."""
    if out.exists() or out.is_symlink():
        raise UserError("already exists", field=out, hint="choose another --out or remove it")


def reject_nonfinite(weights: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """Raise a UserError if a parameter is not finite in the dtype in which it is stored."""
    if name := first_nonfinite(model.named_parameters()):
        dtype_name = str(dtype).removeprefix("torch.")
        raise UserError(f"contains NaN or infinite values in {name} ({dtype_name})", field=weights)


def write_folder_atomically(out: Path, fill: Callable[[Path], None]) -> None:
    """Create the directory `out` completely or not at all; `fill` writes its content.

    Raises:
        UserError: If the directory cannot be written.
    """
    partial = out.with_name(f".partial-{out.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        atomic_io.fsync_and_rename(partial, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
