"""What is exported: the weights of a checkpoint, put into the model that they were trained from."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from flow_grpo import disk
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import read_json
from flow_grpo.run.checkpoint import PREFIX, damage_of_weights, weights_in
from flow_grpo.run.finite import first_nonfinite

NAMES = ("lora", "transformer", "model")  # what weights are called in a checkpoint, if not averaged


@dataclass(frozen=True)
class Source:
    """The weights to export and what their place in a run says of them."""

    weights: Path  # a LoRA folder or a whole transformer

    @classmethod
    def find(cls, checkpoint: Path, *, raw: bool = False) -> "Source":
        """`checkpoint` is what `weights_in` takes; `raw` asks for weights that are not averaged."""
        weights = weights_in(checkpoint).resolve()  # "best" and "latest" are links
        plain = weights.with_name(weights.name.removeprefix("ema_"))
        if raw and plain != weights:
            if weights == checkpoint.resolve():
                raise UserError(f"{checkpoint} is averaged; name {plain.name} or leave out --raw")
            weights = plain
        if raw and not weights.is_dir():
            raise UserError(f"no {plain.name} in {weights.parent}; leave out --raw for the average")
        if damage := damage_of_weights(weights):
            raise UserError(f"{weights} is damaged: {damage}; take another checkpoint")
        return cls(weights)

    @property
    def is_lora(self) -> bool:
        return not (self.weights / "config.json").is_file()

    @property
    def averaged(self) -> bool | None:
        """Whether the folder has averaged weights; None if its name does not tell."""
        name = self.weights.name
        return name.startswith("ema_") if name.removeprefix("ema_") in NAMES else None

    @property
    def step(self) -> int | None:
        step = self.weights.parent.name.removeprefix(PREFIX)
        return int(step) if step.isdigit() else None

    @property
    def run(self) -> Path | None:
        """RUN/checkpoints/checkpoint-8/lora lies in RUN."""
        if len(self.weights.parents) < 3:
            return None
        run = self.weights.parents[2]
        return run if (run / "config.json").is_file() and self.step is not None else None

    def trained_model(self) -> tuple[str, str]:
        """The model that the run started from, and its revision."""
        if self.run is None:
            raise UserError(f"name the model with --model: {self.weights} is not in a run")
        try:
            config = read_json(self.run / "config.json")["pretrained"]
            return str(config["model"]), str(config.get("revision", "main"))
        except (UserError, OSError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"name the model with --model: {self.run / 'config.json'} does not tell it"
            ) from error

    def __str__(self) -> str:
        """No more of the path than says which run and step."""
        return str(self.weights.relative_to(self.run.parent)) if self.run else self.weights.name


def refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists; choose another --out or remove it")


def refuse_nonfinite(weights: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """Raise a UserError if a parameter is not finite in the dtype it is stored in."""
    if name := first_nonfinite(model.named_parameters()):
        dtype_name = str(dtype).removeprefix("torch.")
        raise UserError(f"{weights}: {name} contains NaN or infinite values in {dtype_name}")


def write_folder(out: Path, fill: Callable[[Path], None]) -> None:
    """The new folder `out`, whole or not at all: `fill` gets an empty one to write to."""
    partial = out.with_name(f".partial-{out.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        disk.publish(partial, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
