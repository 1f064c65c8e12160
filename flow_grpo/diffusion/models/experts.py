"""Models with a transformer for high and one for low noise levels, such as Wan 2.2 A14B."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft import LoraConfig
from torch import Tensor, nn

from flow_grpo.errors import UserError

# Name of the low-noise transformer in a pipeline, and of its directory within that of the first.
SECOND_TRANSFORMER = "transformer_2"


class Experts(ModelMixin):
    """Dispatch each sample to one of two transformers by its timestep.

    `transformer` handles timesteps from `boundary` on, `transformer_2` those below; a batch may
    contain both. Each has its own LoRA.
    """

    _supports_gradient_checkpointing = True

    def __init__(self, transformer: ModelMixin, transformer_2: ModelMixin, boundary: float) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.boundary = transformer, transformer_2, boundary
        self._repeated_blocks = transformer._repeated_blocks
        self._no_split_modules = transformer._no_split_modules

    @property
    def config(self) -> dict:
        """Config of the high-noise transformer."""
        return self.transformer.config

    def add_adapter(self, lora: LoraConfig, adapter_name: str = "default") -> None:
        for part in self.children():
            part.add_adapter(deepcopy(lora), adapter_name=adapter_name)

    def forward(self, timestep: Tensor, **inputs: Tensor | bool | None) -> tuple[Tensor]:
        """Run each sample through the transformer for its timestep, (B,).

        Other arguments and the output as in the transformer.
        """
        early = (timestep >= self.boundary).cpu()
        inputs = {"timestep": timestep, **inputs}
        if early.all() or not early.any():
            first, second = self.transformer, self.transformer_2
            used, unused = (first, second) if early[0] else (second, first)
            (out,) = used(**inputs)
            # Give the unused one a gradient of 0: DDP would wait for it otherwise, and the state of
            # the optimizer would depend on how samples are distributed.
            if torch.is_grad_enabled():
                out = out + 0 * sum(p.sum() for p in unused.parameters() if p.requires_grad)
            return (out,)
        rows = [each.nonzero().flatten().to(timestep.device) for each in (early, ~early)]
        outputs = [
            part(**{k: v[index] if isinstance(v, Tensor) else v for k, v in inputs.items()})[0]
            for part, index in zip(self.children(), rows, strict=True)
        ]
        return (torch.cat(outputs)[torch.cat(rows).argsort()],)


def iter_experts(
    transformer: nn.Module, weights: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield each transformer with its subdirectory in a weight directory and its own weights.

    Args:
        transformer: A transformer or `Experts`.
        weights: State dict of `transformer`; the names that are yielded are those of the part.
    """
    if not isinstance(transformer, Experts):
        yield "", transformer, weights or {}
        return
    for name, part in transformer.named_children():
        own = {k: v for k, v in (weights or {}).items() if k.startswith(f"{name}.")}
        yield _subfolder(name), part, {k.removeprefix(f"{name}."): v for k, v in own.items()}


def _subfolder(name: str) -> str:
    return SECOND_TRANSFORMER if name == SECOND_TRANSFORMER else ""


def merge_expert_weights(
    transformer: nn.Module, weights: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Merge the weights of each subdirectory into one state dict of `transformer`."""
    if not isinstance(transformer, Experts):
        return dict(weights[""])
    return {
        f"{name}.{key}": tensor
        for name, _ in transformer.named_children()
        for key, tensor in weights.get(_subfolder(name), {}).items()
    }


def expert_folders(pipeline: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the subdirectories of `iter_experts` for a model with this pipeline config."""
    return ("",) if pipeline.get("boundary_ratio") is None else ("", SECOND_TRANSFORMER)


def expert_folders_of_model(model: str) -> tuple[str, ...]:
    """Return the subdirectories of `iter_experts` for a pipeline directory or hub id."""
    try:
        return expert_folders(DiffusionPipeline.load_config(model))
    except (OSError, ValueError):  # reported when the model is loaded
        return ("",)


def check_expert_folders(folder: str | Path, places: Sequence[str]) -> None:
    """Reject weights for a different number of transformers than the model has.

    Args:
        folder: LoRA or full weights, as for `ModelAdapter.load_weights`. A directory that does not
            exist is accepted: the loader reports it.
        places: Subdirectories of `iter_experts` for the model.
    """
    has_second = Path(folder, SECOND_TRANSFORMER).is_dir()
    if has_second and SECOND_TRANSFORMER not in places:
        raise UserError(
            f"has weights for a {SECOND_TRANSFORMER}, which this model does not have",
            field=folder,
            hint="use weights that were trained from this model",
        )
    if SECOND_TRANSFORMER in places and not has_second and Path(folder).exists():
        raise UserError(
            f"has no directory {SECOND_TRANSFORMER}, but this model has two transformers",
            field=folder,
            hint="use a directory with the weights of both",
        )
