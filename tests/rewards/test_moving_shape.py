"""The reward of the small video model, on drawn videos and composed sounds."""

import math

import numpy as np
import pytest
from PIL import Image, ImageDraw
from user_errors import raises_user_error

from flow_grpo.audio import Audio
from flow_grpo.rewards.protocol import AUDIO
from flow_grpo.rewards.scorers.geneval.rules import RGB
from flow_grpo.rewards.scorers.moving_shape import MovingShape, count_beeps, moves

RATE, SIZE, FRAMES = 8000, 48, 9
ROW = {"shape": "circle", "color": "red", "direction": "left", "beeps": 2}


def video(start=(32, 24), end=(16, 24), shape="circle", colour="red", radius=7) -> list:
    """Draw a shape that moves steadily from `start` to `end`, in pixels."""
    frames = []
    ink = tuple(round(255 * level) for level in RGB[colour])
    for time in np.linspace(0, 1, FRAMES):
        x, y = (4 * ((1 - time) * a + time * b) for a, b in zip(start, end, strict=True))
        frame = Image.new("RGB", (4 * SIZE, 4 * SIZE), (240, 240, 240))
        box = (x - 4 * radius, y - 4 * radius, x + 4 * radius, y + 4 * radius)
        pen = ImageDraw.Draw(frame)
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, ink)
        frames.append(frame.resize((SIZE, SIZE), Image.Resampling.BOX))
    return frames


def beeps(*seconds: float, pause: float = 0.1, amplitude: float = 0.5) -> Audio:
    """Compose beeps of these durations with pauses before, between and after them."""
    parts = [np.zeros(round(pause * RATE))]
    for duration in seconds:
        time = np.arange(round(duration * RATE)) / RATE
        parts += [amplitude * np.sin(2 * math.pi * 1000 * time), np.zeros(round(pause * RATE))]
    return Audio(np.tile(np.concatenate(parts), (2, 1)).astype(np.float32), RATE)


TWICE = beeps(0.1, 0.1)


def parts_of(frames: list, sound: Audio = TWICE, **changed) -> dict[str, float]:
    scores, parts = MovingShape()([frames], [""], [{**ROW, AUDIO: sound, **changed}])
    assert scores == [float(all(values == [1.0] for values in parts.values()))]
    return {name: value for name, [value] in parts.items()}


def test_a_correct_video_scores_1():
    assert set(parts_of(video()).values()) == {1.0}


@pytest.mark.parametrize(
    ("frames", "wrong"),
    [
        (video(shape="square"), "shape"),
        (video(colour="blue"), "color"),
        (video((16, 24), (32, 24)), "direction"),
        (video((24, 32), (24, 16)), "direction"),
        (video((24, 24), (24, 24)), "direction"),  # stands still
        (video((28, 24), (20, 24)), "direction"),  # hardly moves
        (video((32, 18), (16, 30)), "direction"),  # diagonally
        (video()[:5] + video()[3::-1], "direction"),  # and back
        (video()[:4] + video(colour="blue")[4:], "color"),  # changes its color
        (video()[:4] + video(shape="square")[4:], "shape"),
    ],
)
def test_a_video_with_one_mistake_fails_in_that_part_only(frames, wrong):
    assert [name for name, value in parts_of(frames).items() if not value] == [wrong]


def test_a_second_or_missing_shape_fails_in_all_visible_parts():
    twice = [
        Image.fromarray(np.minimum(a, b))
        for a, b in zip(video(), video((9, 9), (9, 9)), strict=True)
    ]
    vanishing = [*video()[:-1], Image.new("RGB", (SIZE, SIZE), (240, 240, 240))]
    for frames in (twice, vanishing):
        assert parts_of(frames) == {"shape": 0, "color": 0, "direction": 0, "beeps": 1}


@pytest.mark.parametrize("direction", ["left", "right", "up", "down"])
def test_directions_are_as_seen_in_the_image(direction):
    x, y = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}[direction]
    path = 0.5 + np.linspace(-0.2, 0.2, 5)[:, None] * np.array([x, y])
    assert [other for other in ("left", "right", "up", "down") if moves(path, other)] == [direction]


def test_a_step_back_is_no_steady_motion():
    steady, back = ([0.7, 0.6, 0.5, 0.4, 0.2], [0.7, 0.5, 0.55, 0.4, 0.2])
    found = [moves(np.array([(x, 0.5) for x in path]), "left") for path in (steady, back)]
    assert found == [True, False]


@pytest.mark.parametrize(
    ("sound", "count"),
    [
        (beeps(), 0),
        (beeps(0.1), 1),
        (beeps(0.05, 0.1, 0.3), 3),
        (beeps(0.1, 0.02, 0.1), 2),  # a click is no beep
        (beeps(0.1, 0.1, amplitude=0.05), 0),  # too quiet
        (beeps(0.1, 0.1, pause=0.0), 1),  # without a pause
        (Audio(beeps(0.1, 0.1).waveform[:, 800:-800], RATE), 2),  # up to the ends
    ],
)
def test_beeps_are_counted(sound, count):
    assert count_beeps(sound) == count
    assert parts_of(video(), sound)["beeps"] == (count == 2)


def test_a_pause_must_be_quieter_than_a_beep():
    """A sound that falls by 6 dB and rises again is one beep; one that falls by 20 dB is two."""
    for level, count in ((0.06, 1), (0.005, 2)):
        filler = beeps(0.1, pause=0, amplitude=level).waveform
        tone = beeps(0.1, pause=0).waveform
        assert count_beeps(Audio(np.concatenate([tone, filler, tone], 1), RATE)) == count


def test_invalid_metadata_is_rejected_and_missing_metadata_skipped():
    reward = MovingShape()
    assert reward.skip_reason("a", ROW) is None
    assert "shape" in reward.skip_reason("a", {})
    for name, value in (
        ("shape", "star"),
        ("color", "pink"),
        ("direction", ["up"]),
        ("beeps", "2"),
        ("beeps", -1),
        ("beeps", True),
    ):
        with raises_user_error(name, value):
            reward.skip_reason("a", {**ROW, name: value})
