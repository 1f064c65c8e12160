"""Rewards of the motion of a video that need no weights: amount, smoothness, and flicker.

Optical flow is that of Farneback (2003), as implemented in OpenCV, in pixels per frame.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import TooFewFrames
from flow_grpo.rewards.option_checks import require_opencv
from flow_grpo.rewards.protocol import MetadataRows, Scorer

FASTEST = 0.05  # share of the pixels whose speed counts, as in VBench
STILL = 0.05  # mean speed in pixels per frame below which a video does not move
PYRAMID = {"pyr_scale": 0.5, "levels": 4, "winsize": 15, "iterations": 3}
POLYNOMIAL = {"poly_n": 5, "poly_sigma": 1.1, "flags": 0}

Videos = list[list[Image.Image]]


def optical_flow(video: list[Image.Image]) -> np.ndarray:
    """Return the flow between consecutive frames, (frames - 1, height, width, 2)."""
    import cv2  # optional

    grey = [np.asarray(frame.convert("L")) for frame in video]
    flows = [
        cv2.calcOpticalFlowFarneback(before, after, None, **PYRAMID, **POLYNOMIAL)
        for before, after in itertools.pairwise(grey)
    ]
    return np.stack(flows)


def top_speed(flows: np.ndarray) -> float:
    """Return the mean speed of the fastest 5 % of the pixels of each flow."""
    speeds = np.sort(np.linalg.norm(flows, axis=-1).reshape(len(flows), -1))
    count = max(1, round(FASTEST * speeds.shape[1]))
    return float(speeds[:, -count:].mean())


def smoothness(flows: np.ndarray) -> float:
    """Return 1 - sum |f' - f| / sum (|f'| + |f|) over consecutive flows f and f', in [0, 1]."""
    if np.linalg.norm(flows, axis=-1).mean() < STILL:
        return 1.0
    speeds = np.linalg.norm(flows, axis=-1)
    change = np.linalg.norm(np.diff(flows, axis=0), axis=-1)
    return 1.0 - float(change.sum() / (speeds[1:].sum() + speeds[:-1].sum()))


@dataclass(kw_only=True, eq=False)
class VideoMotion(Scorer):
    """Speed of the fastest 5 % of the pixels, linear from 0 to 1 at `speed`.

    Also logs the speed, in shorter sides of the frame per frame. The share of pixels is that of the
    dynamic degree of VBench (Vchitect/VBench, vbench/dynamic_degree.py), with another flow.
    """

    frames = "clip"
    min_frames = 2
    speed: float = 0.02  # shorter sides of the frame per frame

    def __post_init__(self) -> None:
        """Check the option."""
        require_opencv("video_motion")
        if not isinstance(self.speed, int | float) or not 0 < self.speed < float("inf"):
            raise UserError("must be a positive number", field="speed", value=self.speed)

    def __call__(
        self, images: Videos, prompts: list[str], metadata: MetadataRows
    ) -> tuple[list[float], dict[str, list[float]]]:
        speeds = _measure(
            images,
            self.min_frames,
            lambda video: top_speed(optical_flow(video)) / min(video[0].size),
        )
        scores = [
            speed if isinstance(speed, TooFewFrames) else min(1.0, speed / self.speed)
            for speed in speeds
        ]
        return scores, {"speed": speeds}


class MotionSmoothness(Scorer):
    """How little the optical flow changes from frame to frame: 1 for a constant velocity.

    It is 0 for a motion that reverses with every frame, and 1 for a video without motion.
    """

    frames = "clip"
    min_frames = 3

    def __init__(self) -> None:
        """Check that OpenCV is installed."""
        require_opencv("motion_smoothness")

    def __call__(self, images: Videos, prompts: list[str], metadata: MetadataRows) -> list[float]:
        return _measure(images, self.min_frames, lambda video: smoothness(optical_flow(video)))


class TemporalFlicker(Scorer):
    """1 minus the mean absolute difference of consecutive frames, with pixels in [0, 1].

    This is temporal flickering of VBench (Vchitect/VBench, vbench/temporal_flickering.py), which is
    meant for static scenes: motion lowers it as well.
    """

    frames = "clip"
    min_frames = 2

    def __call__(self, images: Videos, prompts: list[str], metadata: MetadataRows) -> list[float]:
        return _measure(images, self.min_frames, lambda video: 1.0 - _mean_difference(video))


def _measure(
    videos: Videos, least: int, measure: Callable[[list[Image.Image]], float]
) -> list[float]:
    """Measure each video; those with fewer than `least` frames get a `TooFewFrames` instead."""
    return [
        measure(video) if len(video) >= least else TooFewFrames(len(video), least)
        for video in videos
    ]


def _mean_difference(video: list[Image.Image]) -> float:
    pixels = np.stack([np.asarray(frame.convert("RGB"), np.float32) for frame in video]) / 255
    return float(np.abs(np.diff(pixels, axis=0)).mean())
