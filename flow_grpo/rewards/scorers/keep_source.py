"""Score how well an edited image preserves its source, outside an optional mask.

The score is SSIM (Wang et al., 2004), which needs no model, or the similarity of CLIP or DINOv2
features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, CLIPModel, Dinov2Model, Dinov2WithRegistersModel

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.rewards.frozen_model import FrozenModel
from flow_grpo.rewards.loading import (
    explain_load_errors,
    load_image_processor,
    load_network,
)
from flow_grpo.rewards.protocol import MASK, MetadataRows, Scorer, images_in_metadata
from flow_grpo.rewards.scorers.clip import embed_images

WINDOW, SIGMA = 11, 1.5  # side and standard deviation of the Gaussian window, in pixels
K1, K2 = 0.01, 0.03  # as in the paper; for pixels in [0, 1] its C1 and C2 are their squares
KIND = "a CLIP or DINOv2 model"
NETWORKS = {
    "clip": CLIPModel,
    "dinov2": Dinov2Model,
    "dinov2_with_registers": Dinov2WithRegistersModel,
}


@dataclass(kw_only=True, eq=False)
class KeepSource(FrozenModel, Scorer):
    """Similarity of an edited image to its first source, outside the white areas of the row's mask.

    Without a `model` it is their SSIM, with one the cosine similarity of their features.
    """

    model: str = ""

    def load(self) -> nn.Module:
        """Load the feature extractor, or return an identity for SSIM."""
        if not self.model:
            return nn.Identity()
        with explain_load_errors("model", self.model, KIND):
            kind = AutoConfig.from_pretrained(self.model, trust_remote_code=False).model_type
        if kind not in NETWORKS:
            raise UserError(
                f"is a {kind} model, but must be {KIND}", field="model", value=self.model
            )
        self.image_processor = load_image_processor(self.model, option="model")
        return load_network(NETWORKS[kind], self.model, dtype=self.torch_dtype, kind=KIND)

    def __call__(
        self, images: list[Image.Image], prompts: list[str], metadata: MetadataRows
    ) -> list[float]:
        """Return the similarities, (N,); `NotApplicable` for rows without a source."""
        rows = [i for i, row in enumerate(metadata) if not self.skip_reason("", row)]
        pairs = [_align_pair(images[i], metadata[i]) for i in rows]
        found = self._cosine_similarities(pairs) if self.model else (ssim(*pair) for pair in pairs)
        scores = dict(zip(rows, found, strict=True))
        return [scores.get(i, NotApplicable()) for i in range(len(images))]

    def skip_reason(self, prompt: str, metadata: dict) -> str | None:
        return None if images_in_metadata(metadata) else "it has no source image"

    @torch.inference_mode()
    def _cosine_similarities(self, pairs: list["Pair"]) -> Iterator[float]:
        """Yield the cosine similarity of each pair's features, in batches."""
        self.network.to(self.device)
        for part in self.batch_slices(len(pairs)):
            images, sources, _ = zip(*pairs[part], strict=True)
            products = self._features(list(images)) * self._features(list(sources))
            yield from products.sum(dim=-1).tolist()

    def _features(self, images: list[Image.Image]) -> Tensor:
        """Return unit features (N, width), float32."""
        pixels = self.preprocess(images)
        if isinstance(self.network, CLIPModel):
            return embed_images(self.network, pixels)
        return F.normalize(self.network(pixel_values=pixels).pooler_output.float(), dim=-1)


Pair = tuple[Image.Image, Image.Image, Image.Image | None]  # edited, source, mask; of equal size


def _align_pair(image: Image.Image, row: dict) -> Pair:
    """Return the image, and its first source and mask in its size.

    The image gets the source's pixels inside the mask, so that changes there affect neither an SSIM
    window that overlaps the mask nor global features.
    """
    image = image.convert("RGB")
    source = ImageOps.fit(images_in_metadata(row)[0], image.size, Image.Resampling.LANCZOS)
    source = source.convert("RGB")
    masks = images_in_metadata(row, MASK)
    if not masks:
        return image, source, None
    mask = ImageOps.fit(masks[0], image.size, Image.Resampling.LANCZOS).convert("L")
    return Image.composite(source, image, mask), source, mask


def ssim(image: Image.Image, source: Image.Image, mask: Image.Image | None = None) -> float:
    """Return the mean SSIM over channels and pixels outside the mask: 1 for identical images."""
    x, y = _pixels(image), _pixels(source)
    window = _gaussian_window(min(WINDOW, *image.size))

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(values, window)

    mean_x, mean_y = mean(x), mean(y)
    variances = mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    numerator = (2 * mean_x * mean_y + K1**2) * (2 * covariance + K2**2)
    index = numerator / ((mean_x**2 + mean_y**2 + K1**2) * (variances + K2**2))  # (3, 1, h, w)
    if mask is None:
        return float(index.mean())
    border = (window.shape[-1] - 1) // 2
    height, width = index.shape[-2:]
    outside = 1 - _pixels(mask)[0, 0, border : border + height, border : border + width]
    total = float(outside.sum())
    return float((index.mean(dim=(0, 1)) * outside).sum()) / total if total else 1.0


def _pixels(image: Image.Image) -> Tensor:
    """Return (3, 1, H, W) in [0, 1]; float64, as variances are differences of close numbers."""
    return torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, 0)[:, None].double() / 255


def _gaussian_window(side: int) -> Tensor:
    """Return a Gaussian window (1, 1, side, side) that sums to 1."""
    offset = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    weight = torch.exp(-((offset / SIGMA) ** 2) / 2)
    return (torch.outer(weight, weight) / weight.sum() ** 2)[None, None]
