"""Rewards that make a run ill."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image


def brightness(image: Image.Image) -> float:
    return float(np.asarray(image).mean() / 255)


def white(images, prompts, metadata):
    """Pays for blank pictures."""
    return [brightness(image) for image in images]


def dark(images, prompts, metadata):
    """What `white` costs."""
    return [1 - brightness(image) for image in images]


def detail(images, prompts, metadata):
    """A spread of pixels, which a blank picture has none of."""
    return [float(np.asarray(image).std() / 255) for image in images]


def constant(images, prompts, metadata):
    return [0.0] * len(images)


def every_fourth_fails(images, prompts, metadata):
    return [None if i % 4 == 0 else 0.0 for i in range(len(images))]


TRAINED: list[torch.Tensor] = []  # the weights of the run, for a reward that changes them


class Bright:
    """levels[i] + scales[i] x brightness in the i-th epoch, which has one batch. In the last one it
    adds `nudge` to the weights: those to be trained are not those that sampled."""

    def __init__(
        self, levels: Sequence[float], scales: Sequence[float], nudge: float = 0.0
    ) -> None:
        self._epochs = list(zip(levels, scales, strict=True))
        self._calls = 0  # the first of which is the trial before the run
        self._nudge = nudge

    def __call__(self, images: Sequence[Image.Image], prompts, metadata) -> list[float]:
        level, scale = self._epochs[max(0, self._calls - 1)]
        if self._nudge and self._calls == len(self._epochs):
            with torch.no_grad():
                for weight in TRAINED:
                    weight += self._nudge
        self._calls += 1
        return [level + scale * brightness(image) for image in images]
