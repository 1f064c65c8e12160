"""How much of its source an edited picture keeps: by SSIM (Wang et al., 2004), which needs no
model, or by features of CLIP or DINOv2. Inside a mask, whatever happens counts as kept."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, CLIPModel, Dinov2Model, Dinov2WithRegistersModel

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import NotAsked
from flow_grpo.rewards.loading import FrozenModel, explained, load_image_processor, load_network
from flow_grpo.rewards.protocol import MASK, Rows, Scorer, pictures_in
from flow_grpo.rewards.scorers.clip import embed_images

WINDOW, SIGMA = 11, 1.5  # pixels, of the Gaussian that weighs the neighbours
K1, K2 = 0.01, 0.03  # the paper's; with values from 0 to 1 their squares are its C1 and C2
KIND = "a CLIP or DINOv2 model"
NETWORKS = {
    "clip": CLIPModel,
    "dinov2": Dinov2Model,
    "dinov2_with_registers": Dinov2WithRegistersModel,
}


@dataclass(kw_only=True, eq=False)
class KeepSource(FrozenModel, Scorer):
    """The first of several sources counts. White in the row's `mask` is what may change.

    With a `model` it is the cosine of the features of both pictures, without one it is SSIM.
    """

    model: str = ""

    def load(self) -> nn.Module:
        if not self.model:
            return nn.Identity()
        with explained("model", self.model, KIND):
            kind = AutoConfig.from_pretrained(self.model, trust_remote_code=False).model_type
        if kind not in NETWORKS:
            raise UserError(f"model={self.model!r} is a {kind} model, and must be {KIND}")
        self.image_processor = load_image_processor(self.model, option="model")
        return load_network(NETWORKS[kind], self.model, dtype=self.torch_dtype, kind=KIND)

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: Rows
    ) -> list[float]:
        asked = [i for i, row in enumerate(metadata) if not self.why_not("", row)]
        pairs = [_pair(images[i], metadata[i]) for i in asked]
        found = self._cosines(pairs) if self.model else (ssim(*pair) for pair in pairs)
        scores = dict(zip(asked, found, strict=True))
        return [scores.get(i, NotAsked()) for i in range(len(images))]

    def why_not(self, prompt: str, metadata: dict) -> str | None:
        return None if pictures_in(metadata) else "it has no picture to keep to"

    @torch.inference_mode()
    def _cosines(self, pairs: list["Pair"]) -> Iterator[float]:
        self.network.to(self.device)
        for part in self.parts(len(pairs)):
            images, sources, _ = zip(*pairs[part], strict=True)
            alike = self._features(list(images)) * self._features(list(sources))
            yield from alike.sum(dim=-1).tolist()

    def _features(self, images: list[Image.Image]) -> Tensor:
        """(N, width) float32, of length 1."""
        pixels = self.pixels(images)
        if isinstance(self.network, CLIPModel):
            return embed_images(self.network, pixels)
        return F.normalize(self.network(pixel_values=pixels).pooler_output.float(), dim=-1)


Pair = tuple[Image.Image, Image.Image, Image.Image | None]  # edited, source and mask, of one size


def _pair(image: Image.Image, row: dict) -> Pair:
    """The edited picture has the source's pixels inside the mask, so that what is there shows
    nowhere else: neither in a window that reaches in, nor in a feature of the whole."""
    image, (source, *_), masks = image.convert("RGB"), pictures_in(row), pictures_in(row, MASK)
    source, *masks = (
        ImageOps.fit(each, image.size, Image.Resampling.LANCZOS) for each in (source, *masks)
    )
    source = source.convert("RGB")
    if not masks:
        return image, source, None
    mask = masks[0].convert("L")
    return Image.composite(source, image, mask), source, mask


def ssim(image: Image.Image, source: Image.Image, mask: Image.Image | None = None) -> float:
    """The mean over all places outside the mask, and colours: 1 for the same picture, about 0 for
    another."""
    x, y = _pixels(image), _pixels(source)
    window = _window(min(WINDOW, *image.size))

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(values, window)

    at_x, at_y = mean(x), mean(y)
    spread = mean(x * x) - at_x**2 + mean(y * y) - at_y**2
    together = mean(x * y) - at_x * at_y
    alike = (2 * at_x * at_y + K1**2) * (2 * together + K2**2)
    alike = alike / ((at_x**2 + at_y**2 + K1**2) * (spread + K2**2))  # (3, 1, places, places)
    if mask is None:
        return float(alike.mean())
    border, (height, width) = (window.shape[-1] - 1) // 2, alike.shape[-2:]
    outside = 1 - _pixels(mask)[0, 0, border : border + height, border : border + width]
    total = float(outside.sum())
    return float((alike.mean(dim=(0, 1)) * outside).sum()) / total if total else 1.0


def _pixels(image: Image.Image) -> Tensor:
    """(3, 1, H, W) from 0 to 1; in float64, as variances are differences of near numbers."""
    return torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, 0)[:, None].double() / 255


def _window(side: int) -> Tensor:
    """(1, 1, side, side), with a sum of 1."""
    place = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    weight = torch.exp(-((place / SIGMA) ** 2) / 2)
    return (torch.outer(weight, weight) / weight.sum() ** 2)[None, None]
