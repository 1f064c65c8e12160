"""Two transformers that take turns, as in Wan 2.2 A14B: one for much noise, one for little."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft import LoraConfig
from torch import Tensor, nn

from flow_grpo.errors import UserError

SECOND = "transformer_2"  # what a pipeline calls it, and the folder of its weights in the first's


class Experts(ModelMixin):
    """`transformer` at time steps from the `boundary` on, `transformer_2` below; a batch may have
    both. Each has a LoRA of its own."""

    _supports_gradient_checkpointing = True

    def __init__(self, transformer: ModelMixin, transformer_2: ModelMixin, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.boundary = transformer, transformer_2, boundary
        self._repeated_blocks = transformer._repeated_blocks
        self._no_split_modules = transformer._no_split_modules

    @property
    def config(self) -> dict:
        return self.transformer.config

    def add_adapter(self, lora: LoraConfig, adapter_name: str = "default") -> None:
        for part in self.children():
            part.add_adapter(deepcopy(lora), adapter_name=adapter_name)

    def forward(self, timestep: Tensor, **inputs: Tensor | bool | None) -> tuple[Tensor]:
        early = (timestep >= self.boundary).cpu()
        given = {"timestep": timestep, **inputs}
        if early.all() or not early.any():
            one, other = list(self.children())[:: 1 if early[0] else -1]
            (out,) = one(**given)
            # A gradient of 0 for the other: without any, DDP would wait for it, and the optimizer's
            # state would depend on how samples are shared out.
            if torch.is_grad_enabled():
                out = out + 0 * sum(p.sum() for p in other.parameters() if p.requires_grad)
            return (out,)
        places = [each.nonzero().flatten().to(timestep.device) for each in (early, ~early)]
        parts = [
            part(**{k: v[rows] if isinstance(v, Tensor) else v for k, v in given.items()})[0]
            for part, rows in zip(self.children(), places, strict=True)
        ]
        return (torch.cat(parts)[torch.cat(places).argsort()],)


def parts_of(
    transformer: nn.Module, weights: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Each transformer, with the folder of its weights inside that of the first and, of `weights`,
    those that are its own."""
    if not isinstance(transformer, Experts):
        yield "", transformer, weights or {}
        return
    for name, part in transformer.named_children():
        own = {k: v for k, v in (weights or {}).items() if k.startswith(f"{name}.")}
        place = SECOND if name == SECOND else ""
        yield place, part, {k.removeprefix(f"{name}."): v for k, v in own.items()}


def joined(
    transformer: nn.Module, weights: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Merge the weights of each transformer, given by folder as in `parts_of`, into one dict that
    is keyed by the names in `transformer`."""
    if not isinstance(transformer, Experts):
        return dict(weights[""])
    places = {name: SECOND if name == SECOND else "" for name, _ in transformer.named_children()}
    return {
        f"{name}.{key}": tensor
        for name, place in places.items()
        for key, tensor in weights.get(place, {}).items()
    }


def places_of(pipeline: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the folders of `parts_of` for the model with this pipeline config."""
    return ("",) if pipeline.get("boundary_ratio") is None else ("", SECOND)


def places_of_model(model: str) -> tuple[str, ...]:
    """Return the folders of `parts_of` for the model in this folder or of this hub id."""
    try:
        return places_of(DiffusionPipeline.load_config(model))
    except (OSError, ValueError):  # reported when the model is loaded
        return ("",)


def check_places(folder: str | Path, places: Sequence[str]) -> None:
    """Reject weights for a different number of transformers than the model has.

    Args:
        folder: A LoRA or whole weights, as `ModelAdapter.load_weights` takes them. A folder that
            does not exist passes: it is reported where it is read.
        places: The folders of `parts_of` for the model.
    """
    has_second = Path(folder, SECOND).is_dir()
    if has_second and SECOND not in places:
        raise UserError(
            f"{folder} has weights for a {SECOND}, which this model does not have; use weights "
            "that were trained from this model"
        )
    if SECOND in places and not has_second and Path(folder).exists():
        raise UserError(
            f"{folder} has no folder {SECOND}, but this model has two transformers; use a folder "
            "with the weights of both"
        )
