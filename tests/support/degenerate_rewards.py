"""Rewards that provoke the health checks of a run."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image


def brightness(image: Image.Image) -> float:
    return float(np.asarray(image).mean() / 255)


def white(images, prompts, metadata):
    """Return the mean brightness, which is highest for blank white images."""
    return [brightness(image) for image in images]


def dark(images, prompts, metadata):
    """Return the complement of `white`."""
    return [1 - brightness(image) for image in images]


def detail(images, prompts, metadata):
    """Return the standard deviation of the pixels, which is 0 for a blank image."""
    return [float(np.asarray(image).std() / 255) for image in images]


def constant(images, prompts, metadata):
    return [0.0] * len(images)


def every_fourth_fails(images, prompts, metadata):
    return [None if i % 4 == 0 else 0.0 for i in range(len(images))]


TRAINED: list[torch.Tensor] = []  # the run's trainable weights, which `Bright` modifies


class Bright:
    """Reward levels[i] + scales[i] * brightness in epoch i, which has one batch.

    In the last epoch `nudge` is added to the weights, so that the trained policy is not the
    behaviour policy.
    """

    def __init__(
        self, levels: Sequence[float], scales: Sequence[float], nudge: float = 0.0
    ) -> None:
        self._epochs = list(zip(levels, scales, strict=True))
        self._calls = 0  # the first is the check before training
        self._nudge = nudge

    def __call__(self, images: Sequence[Image.Image], prompts, metadata) -> list[float]:
        level, scale = self._epochs[max(0, self._calls - 1)]
        if self._nudge and self._calls == len(self._epochs):
            with torch.no_grad():
                for weight in TRAINED:
                    weight += self._nudge
        self._calls += 1
        return [level + scale * brightness(image) for image in images]
