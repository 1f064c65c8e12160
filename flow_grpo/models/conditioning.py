"""What a model is given beside the latents: noise levels and texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.speed.transfer import send

Texts = dict[str, Tensor]  # (texts, ...) each


@dataclass(frozen=True)
class Schedule:
    """The model's own noise schedule, on the host so that no step waits for the device."""

    sigmas: tuple[float, ...]  # num_steps + 1, from 1 (about) down to 0
    timesteps: tuple[float, ...]  # num_steps, as the model's scheduler gives them

    def __len__(self) -> int:
        return len(self.timesteps)


@dataclass(frozen=True)
class Conditioning:
    """The texts of a batch, each distinct one held once.

    What is on the CPU, like the texts' lengths, stays there: a model may take it apart without
    waiting for the device.
    """

    texts: Texts
    positive: Tensor  # (B,) the text of each sample, on the CPU
    negative: Tensor | None  # (B,) its negative prompt; None when nothing is guided

    def __len__(self) -> int:
        return len(self.positive)

    def __getitem__(self, part: slice | Tensor) -> "Conditioning":
        negative = None if self.negative is None else self.negative[part]
        return replace(self, positive=self.positive[part], negative=negative)

    def of(self, index: Tensor) -> Texts:
        """The texts of these numbers."""
        return {k: text[send(index, text.device)] for k, text in self.texts.items()}

    @staticmethod
    def join(parts: "Sequence[Conditioning]") -> "Conditioning":
        counts = [len(next(iter(p.texts.values()))) for p in parts]
        moved = list(zip(parts, accumulate(counts, initial=0), strict=False))
        guided = parts[0].negative is not None
        return Conditioning(
            {name: cat_padded([p.texts[name] for p in parts]) for name in parts[0].texts},
            positive=torch.cat([p.positive + start for p, start in moved]),
            negative=torch.cat([p.negative + start for p, start in moved]) if guided else None,
        )


def cat_padded(tensors: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """Texts one after another, those with fewer tokens filled up with zeros behind."""
    if tensors[0].ndim < 3:
        return torch.cat(list(tensors))
    most = max(t.shape[1] for t in tensors)
    most += -most % multiple
    return torch.cat([F.pad(t, (0, 0, 0, most - t.shape[1])) for t in tensors])
