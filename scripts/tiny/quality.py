"""What a reward for legible signs does not see: their colours."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.pictures import read_picture
from tiny.pictures import CLEAN, Painter, encode_word


def colour(images: list[Image.Image], prompts: list[str], metadata: list[dict]) -> list[float]:
    """How far the channels of a pixel are apart, on average: 0 for grey."""
    pixels = (np.asarray(image, dtype=np.float64) for image in images)
    return [float(np.ptp(each, axis=-1).mean()) / 255 for each in pixels]


def ground(picture: np.ndarray) -> np.ndarray:
    """The colour (3,) around the letters of a sign (H, W, 3), in [0, 1]."""
    return np.median(np.concatenate([picture[:2], picture[-2:]]).reshape(-1, 3), axis=0)


def clean_grounds(count: int = 1024) -> np.ndarray:
    """(count, 3), of the pictures that the small model was trained on, without the spoiled ones."""
    letters = torch.tensor([encode_word("SIGN")]).expand(count, -1)
    pictures = Painter().signs(letters, CLEAN, torch.Generator().manual_seed(0)).images
    return np.stack([ground(each) for each in pictures.permute(0, 2, 3, 1).numpy()])


def colour_error(found: np.ndarray, expected: np.ndarray) -> float:
    """How far apart two sets of colours are: Wasserstein distance, mean over the channels. Grounds
    that are all dark, or all pale, have 0.3; as many of each have next to 0."""
    q = np.linspace(0, 1, 201)
    return float(np.abs(np.quantile(found, q, axis=0) - np.quantile(expected, q, axis=0)).mean())


def error_of(samples: Path, expected: np.ndarray) -> float:
    """What is measured of the pictures of one evaluation."""
    files = sorted(samples.glob("*.png"))
    if not files:
        raise UserError(f"there are no pictures in {samples}; train with log_images above 0")
    pictures = (np.asarray(read_picture(file), dtype=np.float64) / 255 for file in files)
    return colour_error(np.stack([ground(each) for each in pictures]), expected)
