"""JPEG file size as a reward: it needs no model, so it shows quickly whether a setup learns."""

import io

from PIL import Image


def _jpeg_kilobytes(image: Image.Image) -> float:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=95)
    return buffer.tell() / 1000


def jpeg_incompressibility(
    images: list[Image.Image], prompts: list[str], metadata: list[dict]
) -> list[float]:
    """Return the JPEG size in kilobytes at quality 95, as in DDPO."""
    return [_jpeg_kilobytes(image) for image in images]


def jpeg_compressibility(
    images: list[Image.Image], prompts: list[str], metadata: list[dict]
) -> list[float]:
    """Return minus the JPEG size in kilobytes / 500, as in Flow-GRPO."""
    return [-_jpeg_kilobytes(image) / 500 for image in images]
