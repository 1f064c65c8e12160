"""Base classes of rewards with a frozen network."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from flow_grpo.errors import UserError
from flow_grpo.perf.quantization import FP8, NF4, check_precision, quantize_linears
from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput
from flow_grpo.rewards.turns import TURNS

UNQUANTIZED = "none"
QUANTIZATIONS = (UNQUANTIZED, FP8, NF4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCORE = "score"

Values = dict[str, torch.Tensor]  # (N,) each, by the names under which they are logged


@dataclass(kw_only=True, eq=False)
class FrozenModel(ABC):
    """Base of rewards with a frozen network, applied to batches of at most `batch_size` inputs.

    The fields are the reward's options.
    """

    model: str  # hub id, or a local folder or file
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int = 16
    offload: bool | str = (
        False  # move the network to the CPU between epochs; TURNS: after each call
    )
    quantize: str = UNQUANTIZED  # "fp8" or "nf4": the linear layers of `quantized_part`

    def __post_init__(self) -> None:
        """Check the options and load the network, in evaluation mode and without gradients."""
        self._check_options()
        self.network = self.load().eval().requires_grad_(False)
        if self.quantize != UNQUANTIZED:
            device = torch.device(self.device)
            quantize_linears([self.quantized_part()], self.quantize, device)
            self.release_memory()
        if not self.offload:
            self.network.to(self.device)

    def quantized_part(self) -> nn.Module:
        """Return the part of the network whose linear layers `quantize` applies to."""
        return self.network

    @abstractmethod
    def load(self) -> nn.Module:
        """Load the network on the CPU, in `torch_dtype`."""

    def release_memory(self) -> None:
        """Move the network to the CPU, if `offload` is set."""
        if self.offload:
            self.network.to("cpu")

    def batch_slices(self, count: int) -> Iterator[slice]:
        """Split `count` images into batches."""
        return (slice(i, i + self.batch_size) for i in range(0, count, self.batch_size))

    def preprocess(self, images: list[Image.Image]) -> torch.Tensor:
        """Return the network's input, (N, 3, H, W) on its device."""
        pixels = self.image_processor(images=images, return_tensors="pt")["pixel_values"]
        return pixels.to(self.device, self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def _check_options(self) -> None:
        """Raise a UserError for an invalid dtype, batch size or device, or a missing GPU."""
        check_choice("dtype", self.dtype, DTYPES)
        if self.offload not in (False, True, TURNS):
            rule = f"must be True, False or {TURNS!r}"
            raise UserError(rule, field="offload", value=self.offload)
        check_choice("quantize", self.quantize, QUANTIZATIONS)
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UserError("must be an integer >= 1", field="batch_size", value=self.batch_size)
        try:
            kind = torch.device(self.device).type
        except (RuntimeError, TypeError) as error:
            raise UserError(
                "must be a device such as cpu, cuda or cuda:0", field="device", value=self.device
            ) from error
        if kind == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "is unavailable: torch finds no GPU",
                field="device",
                value=self.device,
                hint="use device=cpu",
            )
        if self.quantize != UNQUANTIZED:
            check_precision("quantize", self.quantize, torch.device(self.device))


@dataclass(kw_only=True, eq=False)
class ModelScorer(FrozenModel, Scorer):
    """A network that scores images by their prompts, without metadata."""

    @abstractmethod
    def score_batch(self, images: list[Image.Image], prompts: list[str]) -> Values:
        """Score N RGB images.

        Returns:
            Tensors (N,) by name: the reward as `SCORE`, extra values to log as any other.
        """

    def preprocess_tensor(self, pixels: torch.Tensor) -> torch.Tensor:
        """Apply `preprocess` (resize the shorter side, center crop, normalize) differentiably.

        Args:
            pixels: (N, 3, H, W) in [0, 1].

        Returns:
            (N, 3, crop height, crop width).
        """
        processor, (height, width) = self.image_processor, pixels.shape[-2:]
        scale = processor.size["shortest_edge"] / min(height, width)
        size = int(height * scale), int(width * scale)
        resized = F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 1)
        crop = processor.crop_size["height"], processor.crop_size["width"]
        top = (size[0] - crop[0]) // 2
        left = (size[1] - crop[1]) // 2
        center = resized[..., top : top + crop[0], left : left + crop[1]]
        mean = center.new_tensor(processor.image_mean)[:, None, None]
        std = center.new_tensor(processor.image_std)[:, None, None]
        return ((center - mean) / std).to(self.device, self.torch_dtype)

    def tokenize(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Return the inputs of the text encoder: token ids and attention mask, (N, max_length)."""
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        tokens = self.tokenizer(texts, max_length=self.max_length, **options).to(self.device)
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Score N images in batches; see `Scorer.__call__`. Metadata are not used."""
        if not images:
            return []
        self.network.to(self.device)
        with torch.inference_mode():
            batches = [
                self.score_batch([image.convert("RGB") for image in images[part]], prompts[part])
                for part in self.batch_slices(len(images))
            ]
        values = {
            name: torch.cat([batch[name].float().cpu() for batch in batches]).tolist()
            for name in batches[0]
        }
        scores = [finite_or_failed(score, self.dtype) for score in values.pop(SCORE)]
        return (scores, values) if values else scores


def finite_or_failed(score: float, dtype: str) -> float:
    """Return a network's score; `Failed` with an explanation if it is not finite."""
    if math.isfinite(score) or isinstance(score, Failed | NotApplicable):
        return score
    hint = "" if dtype == "float32" else f"; {dtype} may overflow, try float32"
    return Failed(f"the network returned {score}{hint}")
