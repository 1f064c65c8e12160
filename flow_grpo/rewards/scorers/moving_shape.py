"""Reward of the small video model: a colored shape moves as asked and beeps as often as asked.

Frames are read by the shape detector of GenEval, the sound by its level; no network is needed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from flow_grpo.audio import Audio
from flow_grpo.errors import UserError
from flow_grpo.rewards.frames import frame_indices
from flow_grpo.rewards.option_checks import check_choice, require_opencv
from flow_grpo.rewards.protocol import AUDIO, MetadataRows, Scorer
from flow_grpo.rewards.scorers.audio import level_db
from flow_grpo.rewards.scorers.geneval.rules import RGB, SHAPES, Detection

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # x, y
CHOICES = {"shape": SHAPES, "color": RGB, "direction": DIRECTIONS}  # values of the metadata
FRAMES_READ = "mean of 5"  # five evenly spaced frames, including the first and the last
MIN_TRAVEL = 0.2  # of the frame's side, in the requested direction
MAX_DRIFT = 0.35  # of the distance in the requested direction, across it

WINDOW_SECONDS = 0.01
BEEP_DB, PAUSE_DB = -20.0, -30.0  # a beep starts above and ends below these levels
MIN_BEEP_SECONDS = 0.04  # shorter ones do not count


def shape_in_motion(frames: list[Image.Image]) -> list[Detection | None]:
    """Return the only shape of each of five evenly spaced frames, None if there is not just one."""
    from flow_grpo.rewards.scorers.geneval.shapes import detect  # OpenCV is optional

    found = [detect(frames[i]) for i in frame_indices(len(frames), FRAMES_READ)]
    return [shapes[0] if len(shapes) == 1 else None for shapes in found]


def moves(path: np.ndarray, direction: str) -> bool:
    """Return whether a path goes in a direction, always forward and hardly across.

    Args:
        path: Positions (n, 2), x and y as fractions of the frame.
        direction: A key of `DIRECTIONS`.
    """
    along = np.array(DIRECTIONS[direction])
    forward = np.diff(path @ along)
    travel = forward.sum()
    drift = np.ptp(path @ along[::-1])
    return bool(travel >= MIN_TRAVEL and (forward > 0).all() and drift <= MAX_DRIFT * travel)


def count_beeps(audio: Audio) -> int:
    """Count the intervals above -20 dBFS that are separated by levels below -30 dBFS.

    The level is measured in windows of 10 ms; an interval shorter than 40 ms does not count.
    """
    window = max(1, round(WINDOW_SECONDS * audio.sample_rate))
    starts = range(0, audio.waveform.shape[1], window)
    levels = [level_db(audio.waveform[:, i : i + window]) for i in starts]
    beeps, length = 0, 0  # length: windows of the current beep
    for level in [*levels, -np.inf]:
        if level > (PAUSE_DB if length else BEEP_DB):
            length += 1
            continue
        beeps += length * WINDOW_SECONDS >= MIN_BEEP_SECONDS
        length = 0
    return beeps


class MovingShape(Scorer):
    """1 if shape, color, direction and number of beeps are those of the metadata, else 0.

    The metadata has `shape`, `color`, `direction` and `beeps`. Five frames must each show one
    shape, of this kind and color, which moves a fifth of the frame or more. Also logs the four
    parts, each 0 or 1.
    """

    frames = "clip"
    reads_audio = True

    def __init__(self) -> None:
        """Check that OpenCV is installed."""
        require_opencv("moving_shape")

    def __call__(
        self, images: list[list[Image.Image]], prompts: list[str], metadata: MetadataRows
    ) -> tuple[list[float], dict[str, list[float]]]:
        rows = [score_parts(video, row) for video, row in zip(images, metadata, strict=True)]
        parts = {name: [row[name] for row in rows] for name in rows[0]}
        return [float(all(row.values())) for row in rows], parts

    def skip_reason(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        """Return None for prompts with the metadata; raise `UserError` if it is invalid."""
        missing = [name for name in (*CHOICES, "beeps") if name not in metadata]
        if missing:
            return f"its metadata has no {missing[0]!r}"
        for name, choices in CHOICES.items():
            check_choice(name, metadata[name], choices)
        beeps = metadata["beeps"]
        if type(beeps) is not int or beeps < 0:  # a bool is an int
            raise UserError("must be an integer of at least 0", field="beeps", value=beeps)
        return None


def score_parts(video: list[Image.Image], row: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 or 0 for each of shape, color, direction and number of beeps."""
    shapes = shape_in_motion(video)
    seen = [shape for shape in shapes if shape is not None]
    parts = {"shape": 0.0, "color": 0.0, "direction": 0.0}
    if len(seen) == len(shapes):
        boxes = np.array([shape.box for shape in seen])
        path = (boxes[:, :2] + boxes[:, 2:]) / 2 / np.array(video[0].size)
        parts = {
            "shape": float(all(shape.name == row["shape"] for shape in seen)),
            "color": float(all(shape.colour == row["color"] for shape in seen)),
            "direction": float(moves(path, row["direction"])),
        }
    return {**parts, "beeps": float(count_beeps(row[AUDIO]) == row["beeps"])}
