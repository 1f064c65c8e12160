"""Pictures as scorers take them, and as they travel to a server."""

import base64
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    import torch


def to_pil(images: "torch.Tensor") -> list[Image.Image]:
    """(N, 3, H, W) in [0, 1] -> 8-bit images, rounded as diffusers rounds them."""
    return [Image.fromarray(picture) for picture in _bytes(images).cpu().numpy()]


def _bytes(images: "torch.Tensor") -> "torch.Tensor":
    return (images.detach().float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)


def fetch_pictures(
    images: "torch.Tensor | list[Image.Image]",
) -> Callable[[], list[Image.Image | None]]:
    """A function that gives the pictures, to be called in another thread.

    None where pixels are not numbers: as a black picture it might score well. From a GPU they are
    on their way when this returns, ahead of what the GPU is asked to do next.
    """
    if isinstance(images, list):
        return lambda: images
    from flow_grpo.speed.transfer import fetch

    pixels, whole = fetch(_bytes(images)), fetch(_whole(images))
    return lambda: _pictures(pixels(), whole())


def _whole(images: "torch.Tensor") -> "torch.Tensor":
    return images.isfinite().flatten(1).all(1)


def _pictures(pixels: "torch.Tensor", whole: "torch.Tensor") -> list[Image.Image | None]:
    pairs = zip(pixels.numpy(), whole.tolist(), strict=True)
    return [Image.fromarray(picture) if ok else None for picture, ok in pairs]


def png_base64(image: Image.Image) -> str:
    """As it travels: lossless, and quick rather than small."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()
