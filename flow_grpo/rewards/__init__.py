"""Rewards by name. A scorer is a callable of (images, prompts, metadata).

It gets a list of PIL images, a list of prompts and a list of metadata dicts, and returns one
number per image: NaN or None where it cannot score. This module stays light: scorers are
imported when they are built.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flow_grpo.errors import RewardError, UserError

if TYPE_CHECKING:
    import torch

Scorer = Callable[[list[Image.Image], list[str], list[dict]], Sequence[float | None]]

REWARDS = {
    "jpeg_compressibility": "flow_grpo.rewards.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "flow_grpo.rewards.jpeg:jpeg_incompressibility",
    "ocr": "flow_grpo.rewards.ocr:OcrScorer",
}
TOTAL = "avg"  # Flow-GRPO's name for the weighted sum


class WeightedReward:
    """Several scorers, each reported on its own, and their weighted sum as "avg"."""

    def __init__(self, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        self.scorers = dict(scorers)
        self.weights = dict(weights)

    @property
    def names(self) -> list[str]:
        return [*self.scorers, TOTAL]

    def __call__(
        self,
        images: "torch.Tensor | list[Image.Image]",
        prompts: list[str],
        metadata: list[dict] | None = None,
    ) -> dict[str, np.ndarray]:
        """Scores (N,) float64 by name; NaN where a scorer failed, and then in "avg" too."""
        pictures = images if isinstance(images, list) else to_pil(images)
        metadata = [{} for _ in prompts] if metadata is None else metadata
        if not len(pictures) == len(prompts) == len(metadata):
            raise ValueError(
                f"{len(pictures)} images, {len(prompts)} prompts and {len(metadata)} metadata "
                "must be of one length"
            )
        scores = {
            name: _scores(name, scorer, pictures, prompts, metadata)
            for name, scorer in self.scorers.items()
        }
        total = sum(self.weights[name] * values for name, values in scores.items())
        return {**scores, TOTAL: total}

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Let each scorer refuse prompts that it could never score, before training starts."""
        for scorer in self.scorers.values():
            if hasattr(scorer, "check_prompts"):
                scorer.check_prompts(prompts)

    def close(self) -> None:
        for scorer in self.scorers.values():
            if hasattr(scorer, "close"):
                scorer.close()


def build_reward(
    weights: Mapping[str, float],
    *,
    device: str = "cpu",
    custom: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> WeightedReward:
    """Build the rewards named in `weights`.

    `custom` gives further names as "package.module:attribute", a scorer or a class of scorers.
    `options` are keyword arguments per name for rewards that are classes; a class that takes a
    `device` gets this one.
    """
    paths = {**REWARDS, **(custom or {})}
    options = options or {}
    if not weights:
        raise UserError("reward_fn is empty; name at least one reward, e.g. {'ocr': 1.0}")
    for name in (*weights, *options, *(custom or {})):
        if name not in paths or name == TOTAL:
            raise UserError(
                f"unknown reward {name!r}; known are {', '.join(sorted(paths))}; "
                "add your own with config.custom_rewards"
            )
    for name, weight in weights.items():
        if not isinstance(weight, int | float):
            raise UserError(f"reward_fn.{name}={weight!r} must be a number, its weight")
    scorers = {name: _build(name, paths[name], options.get(name, {}), device) for name in weights}
    return WeightedReward(scorers, weights)


def _build(name: str, path: str, options: Mapping[str, Any], device: str) -> Scorer:
    module_name, _, attribute = str(path).partition(":")
    if not module_name or not attribute:
        raise UserError(f"custom_rewards.{name}={path!r} must read 'package.module:function'")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a reward module beside one's own config
    try:
        scorer = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise UserError(f"reward {name!r}: cannot import {path!r} ({error})") from error
    if not callable(scorer):
        raise UserError(f"reward {name!r}: {path!r} is a {type(scorer).__name__}, not callable")
    if not isinstance(scorer, type):
        if options:
            raise UserError(f"reward {name!r} is a function; reward_options.{name} has no use")
        return scorer
    parameters = inspect.signature(scorer).parameters
    if "device" in parameters:
        options = {"device": device, **options}
    unknown = [option for option in options if option not in parameters]
    if unknown:
        raise UserError(
            f"unknown reward_options.{name}.{unknown[0]}; it takes {', '.join(parameters)}"
        )
    return scorer(**options)


def _scores(
    name: str,
    scorer: Scorer,
    pictures: list[Image.Image],
    prompts: list[str],
    metadata: list[dict],
) -> np.ndarray:
    try:
        scores = scorer(pictures, prompts, metadata)
        values = np.array([np.nan if s is None else s for s in scores], dtype=np.float64)
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RewardError(f"reward {name!r} failed with {reason} (--debug shows where)") from error
    if values.shape != (len(pictures),):
        raise RewardError(
            f"reward {name!r} returned scores of shape {values.shape} for {len(pictures)} images; "
            "it must return one number per image (NaN where it cannot score)"
        )
    values[np.isinf(values)] = np.nan  # no reward is infinite: count it as failed
    return values


def to_pil(images: "torch.Tensor") -> list[Image.Image]:
    """(N, 3, H, W) in [0, 1] -> 8-bit images, rounded as diffusers rounds them."""
    array = (images.detach().float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)
    return [Image.fromarray(picture) for picture in array.cpu().numpy()]
