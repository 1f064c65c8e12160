"""What the trainer needs to know of a model family. An adapter is the only place that knows it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

GuidanceGradient = Literal["both", "conditional"]


@dataclass(frozen=True)
class Schedule:
    """The model's own noise schedule, on the host so that no step waits for the device."""

    sigmas: tuple[float, ...]  # num_steps + 1, from 1 (about) down to 0
    timesteps: tuple[float, ...]  # num_steps, in the units that the transformer takes

    def __len__(self) -> int:
        return len(self.timesteps)


@dataclass(frozen=True)
class Conditioning:
    """Text embeddings of a batch, each distinct text held once."""

    embeds: Tensor  # (texts, tokens, width)
    pooled: Tensor  # (texts, width)
    positive: Tensor  # (B,) the text of each sample
    negative: Tensor | None  # (B,) its negative prompt; None when nothing is guided

    def __len__(self) -> int:
        return len(self.positive)

    def __getitem__(self, part: slice | Tensor) -> "Conditioning":
        negative = None if self.negative is None else self.negative[part]
        return replace(self, positive=self.positive[part], negative=negative)

    @staticmethod
    def join(parts: "Sequence[Conditioning]") -> "Conditioning":
        starts = list(accumulate((len(p.embeds) for p in parts), initial=0))
        moved = [(p, start) for p, start in zip(parts, starts, strict=False)]
        guided = parts[0].negative is not None
        return Conditioning(
            torch.cat([p.embeds for p in parts]),
            torch.cat([p.pooled for p in parts]),
            positive=torch.cat([p.positive + start for p, start in moved]),
            negative=torch.cat([p.negative + start for p, start in moved]) if guided else None,
        )


class ModelAdapter(Protocol):
    transformer: nn.Module  # as loaded; the methods below take the one to call
    lora_targets: list[str]
    compiled: bool
    replayed: bool

    def encode(self, prompts: list[str], negative_prompts: list[str] | None) -> Conditioning:
        """Embed a batch; `negative_prompts` is None when sampling without guidance."""

    def encode_ahead(self, texts: list[str]) -> None:
        """Embed all at once what `encode` will be asked for: idle encoders then move once."""

    def schedule(self, num_steps: int, height: int, width: int) -> Schedule:
        """The sigmas and time steps that the family's own pipeline would use."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample, without the batch dimension."""

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        timestep: float | Tensor,
        conditioning: Conditioning,
        guidance_scale: float,
        *,
        gradient: GuidanceGradient = "both",
    ) -> Tensor:
        """The guided velocity; `timestep` is one for all, or (B,).

        `gradient`: through both halves of guidance, which go through the transformer as one batch,
        or through the conditional half alone, each half in a pass of its own.
        """

    def compile(self) -> None:
        """Have torch.compile make what runs often faster, from its next call on."""

    def replay(self) -> None:
        """Run the transformer as CUDA graphs from now on, recorded for each new batch size."""

    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1], float32."""

    def save_lora(self, folder: Path, transformer: nn.Module, weights: dict[str, Tensor]) -> None:
        """Write the adapter's weights so that `pipe.load_lora_weights(folder)` takes them."""

    def load_lora(self, folder: str | Path) -> None:
        """Put the LoRA in `folder` on the transformer, as the adapter "default"."""

    def load_weights(self, folder: Path) -> None:
        """Load what a run saved: a LoRA folder or a whole transformer."""


def latent_dtype(transformer: nn.Module) -> torch.dtype:
    """Latents stay in float32 under a half-precision model: rounding them breaks the ratio."""
    parameter = next(transformer.parameters())
    return torch.promote_types(parameter.dtype, torch.float32)
