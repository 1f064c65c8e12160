"""What the rewards with a network in them share: their options, batches and place on a device."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from PIL import Image
from torch import nn

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCORE = "score"

Scores = list[float]


@dataclass(kw_only=True, eq=False)
class FrozenModel(ABC):
    """A network for images in batches. The fields are the reward's options."""

    model: str  # hub id, or a local folder or file
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int = 16
    offload: bool = False  # between epochs the network waits in the memory of the CPU

    def __post_init__(self) -> None:
        self._check_options()
        self.network = self.load().eval().requires_grad_(False)
        if not self.offload:
            self.network.to(self.device)

    @abstractmethod
    def load(self) -> nn.Module:
        """The network, on the CPU, in the precision asked for."""

    def rest(self) -> None:
        """Called when the scores of an epoch are in: the trainer needs the memory now."""
        if self.offload:
            self.network.to("cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def _check_options(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size!r} must be a whole number, 1 or more")
        try:
            kind = torch.device(self.device).type
        except (RuntimeError, TypeError) as error:
            raise UserError(f"device={self.device!r} must read like cpu, cuda or cuda:0") from error
        if kind == "cuda" and not torch.cuda.is_available():
            raise UserError(f"device={self.device!r}, but torch sees no GPU here; use device=cpu")


@dataclass(kw_only=True, eq=False)
class ModelScorer(FrozenModel):
    """Scores images by their prompts alone."""

    @abstractmethod
    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> dict[str, torch.Tensor]:
        """Values (N,) by name for RGB images: the reward under `SCORE`, others to be logged."""

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: list[dict]
    ) -> Scores | tuple[Scores, dict[str, Scores]]:
        if not images:
            return []
        self.network.to(self.device)
        starts = range(0, len(images), self.batch_size)
        with torch.inference_mode():
            batches = [self._score(images, prompts, start) for start in starts]
        values = {
            name: torch.cat([batch[name].float().cpu() for batch in batches]).tolist()
            for name in batches[0]
        }
        scores = [s if math.isfinite(s) else _failed(s, self.dtype) for s in values.pop(SCORE)]
        return (scores, values) if values else scores

    def _score(
        self, images: list[Image.Image], prompts: list[str], start: int
    ) -> dict[str, torch.Tensor]:
        batch = slice(start, start + self.batch_size)
        return self.score_batch([image.convert("RGB") for image in images[batch]], prompts[batch])


def _failed(score: float, dtype: str) -> Failed:
    hint = "" if dtype == "float32" else f"; {dtype} may be too narrow for it, try float32"
    return Failed(f"the network gave {score}{hint}")
