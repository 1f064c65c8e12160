"""Pictures as scorers take them, and as they travel to a server."""

import base64
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from PIL import Image

from flow_grpo.rewards.frames import DEFAULT, Sample, choose_frames

if TYPE_CHECKING:
    import numpy as np
    import torch


def to_pil(images: "torch.Tensor") -> list[Sample]:
    """Pictures (N, 3, H, W) or clips (N, F, 3, H, W), in [0, 1] -> 8-bit images, or lists of them,
    rounded as diffusers rounds them."""
    return from_bytes(to_bytes(images))


def to_bytes(images: "torch.Tensor") -> "torch.Tensor":
    """(..., 3, H, W) in [0, 1] -> (..., H, W, 3), 8 bits."""
    return (images.detach().float().clamp(0, 1) * 255).round().byte().movedim(-3, -1)


def from_bytes(pixels: "torch.Tensor") -> list[Sample]:
    return [_sample(each) for each in pixels.cpu().numpy()]


def _sample(pixels: "np.ndarray") -> Sample:
    if pixels.ndim == 3:
        return Image.fromarray(pixels)
    return [Image.fromarray(frame) for frame in pixels]


def fetch_pictures(
    images: "torch.Tensor | list[Sample]", rule: str = DEFAULT
) -> Callable[[], list[Sample | None]]:
    """A function that gives the pictures, or of clips the frames that the rule chooses, to be
    called in another thread.

    None where pixels are not numbers, in any frame: as a black picture it might score well. From a
    GPU they are on their way when this returns, ahead of what the GPU is asked to do next.
    """
    if isinstance(images, list):
        return lambda: images
    from flow_grpo.speed.transfer import fetch

    pixels, whole = fetch(to_bytes(choose_frames(images, rule))), fetch(_whole(images))
    return lambda: _pictures(pixels(), whole())


def _whole(images: "torch.Tensor") -> "torch.Tensor":
    return images.isfinite().flatten(1).all(1)


def _pictures(pixels: "torch.Tensor", whole: "torch.Tensor") -> list[Sample | None]:
    pairs = zip(pixels.numpy(), whole.tolist(), strict=True)
    return [_sample(each) if ok else None for each, ok in pairs]


def png_base64(image: Image.Image) -> str:
    """As it travels: lossless, and quick rather than small."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()
