"""Colour statistics of signs, which the OCR reward does not measure."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.images import read_image
from tiny.images import CLEAN, Painter, encode_word


def colour(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """Return the mean channel range of the pixels of each image: 0 for grey."""
    pixels = (np.asarray(image, dtype=np.float64) for image in images)
    return [float(np.ptp(each, axis=-1).mean()) / 255 for each in pixels]


def background_colour(image: np.ndarray) -> np.ndarray:
    """Return the colour (3,) around the letters of a sign (H, W, 3), in [0, 1]."""
    return np.median(np.concatenate([image[:2], image[-2:]]).reshape(-1, 3), axis=0)


def clean_background_colours(count: int = 1024) -> np.ndarray:
    """Return the background colours (count, 3) of clean training images."""
    letters = torch.tensor([encode_word("SIGN")]).expand(count, -1)
    images = Painter().signs(letters, CLEAN, torch.Generator().manual_seed(0)).images
    return np.stack([background_colour(each) for each in images.permute(0, 2, 3, 1).numpy()])


def colour_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the Wasserstein distance between two sets of colours, averaged over the channels.

    It is 0.3 if all backgrounds are dark, or all are pale, and near 0 if there are equally many.
    """
    q = np.linspace(0, 1, 201)
    return float(np.abs(np.quantile(found, q, axis=0) - np.quantile(expected, q, axis=0)).mean())


def evaluation_colour_error(samples: Path, expected: np.ndarray) -> float:
    """Return the colour error of the images of one evaluation."""
    files = sorted(samples.glob("*.png"))
    if not files:
        raise UserError("has no images", field=samples, hint="train with log_images above 0")
    images = (np.asarray(read_image(file), dtype=np.float64) / 255 for file in files)
    return colour_error(np.stack([background_colour(each) for each in images]), expected)
