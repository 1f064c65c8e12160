"""Prepare images and videos for the vision tower of a Qwen-VL model.

Frames are resized to a whole number of tokens, normalized, and cut into patches. A token covers
`merge` x `merge` patches of `temporal` frames; an image is a video of identical frames. The layout
is that of transformers' Qwen2VLImageProcessor, whose class for videos needs torchvision.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

# Mean and standard deviation of Qwen-VL's image processor, the same as CLIP's.
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Visual:
    """An image or a video for the vision tower."""

    patches: Tensor  # (t * h * w, 3 * temporal * patch * patch), float32
    grid: tuple[int, int, int]  # patches in time, height and width: t, h, w


@dataclass(frozen=True)
class Patcher:
    """Sizes of the patches of a vision tower."""

    patch: int = 14  # pixels
    merge: int = 2  # patches per side of a token
    temporal: int = 2  # frames

    def resized(self, width: int, height: int, least: int, most: int) -> tuple[int, int]:
        """Return the width and height to which a frame is resized, as in qwen-vl-utils.

        Args:
            width: Original width.
            height: Original height.
            least: Minimum number of tokens of a frame.
            most: Maximum number of tokens.
        """
        side = self.patch * self.merge
        sides = [max(side, round(length / side) * side) for length in (width, height)]
        if math.prod(sides) > most * side**2:
            scale = math.sqrt(width * height / (most * side**2))
            sides = [max(side, math.floor(s / scale / side) * side) for s in (width, height)]
        elif math.prod(sides) < least * side**2:
            scale = math.sqrt(least * side**2 / (width * height))
            sides = [math.ceil(s * scale / side) * side for s in (width, height)]
        return sides[0], sides[1]

    def tokens(self, visual: Visual) -> int:
        """Return the number of tokens of an image or video."""
        return math.prod(visual.grid) // self.merge**2

    def image(self, image: Image.Image, tokens: int) -> Visual:
        """Return an image resized with PIL to about `tokens` tokens."""
        size = self.resized(*image.size, tokens, tokens)
        pixels = to_tensor(image.convert("RGB").resize(size, Image.Resampling.BICUBIC))
        return self.cut(pixels[None].expand(self.temporal, -1, -1, -1))

    def video(self, frames: list[Image.Image], least: int, most: int) -> Visual:
        """Return a video resized with torch to `least` to `most` tokens per frame.

        As in torchvision, values are rounded to integers after resizing.

        Args:
            frames: Frames of equal size; their number must be a multiple of `temporal`.
            least: Minimum number of tokens of a frame.
            most: Maximum number of tokens.
        """
        width, height = self.resized(*frames[0].size, least, most)
        pixels = torch.stack([to_tensor(frame.convert("RGB")) for frame in frames])
        resized = F.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        return self.cut(resized.clamp(0, 255).round())

    def cut(self, frames: Tensor) -> Visual:
        """Normalize frames (F, 3, H, W) in [0, 255] and cut them into patches.

        The patches of a token are consecutive.
        """
        mean, std = (frames.new_tensor(each)[:, None, None] for each in (IMAGE_MEAN, IMAGE_STD))
        normalized = (frames / 255 - mean) / std
        count, channels, height, width = normalized.shape
        t, h, w = count // self.temporal, height // self.patch, width // self.patch
        parts = normalized.reshape(
            *(t, self.temporal, channels),
            *(h // self.merge, self.merge, self.patch),
            *(w // self.merge, self.merge, self.patch),
        )
        # (t, token row, token column, row in token, column in token, channel, frame, y, x)
        return Visual(parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1), (t, h, w))


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image as (3, H, W), float32 in [0, 255]."""
    return torch.from_numpy(np.array(image)).movedim(-1, 0).float()
