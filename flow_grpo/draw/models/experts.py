"""Two transformers that take turns, as in Wan 2.2 A14B: one for much noise, one for little."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from diffusers import ModelMixin
from peft import LoraConfig
from torch import Tensor, nn

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
