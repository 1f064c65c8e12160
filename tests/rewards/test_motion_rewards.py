"""Rewards of motion on translated textures, whose optical flow is known."""

import math
import pickle

import cv2
import numpy as np
import pytest
from PIL import Image
from user_errors import raises_user_error

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.failure import TooFewFrames
from flow_grpo.rewards.protocol import SOURCE, score
from flow_grpo.rewards.scorers import motion
from flow_grpo.rewards.scorers.motion import MotionSmoothness, TemporalFlicker, VideoMotion

SIDE = 64


@pytest.fixture(scope="module")
def texture() -> np.ndarray:
    noise = np.random.default_rng(0).random((3 * SIDE, 3 * SIDE)).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), 3)
    return (255 * (smooth - smooth.min()) / np.ptp(smooth)).round().astype(np.uint8)


def translated(texture: np.ndarray, steps: list[tuple[int, int]]) -> list[Image.Image]:
    """Return windows of a texture; the content moves by `steps` (x, y) pixels per frame."""
    places = np.cumsum([(0, 0), *steps], axis=0)
    return [
        Image.fromarray(texture[SIDE - y : 2 * SIDE - y, SIDE - x : 2 * SIDE - x]).convert("RGB")
        for x, y in places
    ]


def test_speed_is_that_of_a_translation(texture):
    for step in ((2, 0), (0, -2), (3, 4)):
        scores, extras = VideoMotion(speed=0.1)([translated(texture, [step] * 4)], [""], [{}])
        speed = math.hypot(*step) / SIDE
        assert extras["speed"] == pytest.approx([speed], rel=0.15)
        assert scores == [pytest.approx(extras["speed"][0] / 0.1)]
    [fast] = VideoMotion()([translated(texture, [(3, 4)] * 2)], [""], [{}])[0]
    assert fast == 1.0


def test_a_small_moving_part_counts(texture):
    """A tenth of the frame moves: the fastest 5 % of the pixels are in it."""
    still = np.asarray(translated(texture, [])[0])
    part = [np.asarray(frame) for frame in translated(texture, [(2, 0)] * 3)]
    frames = []
    for frame in part:
        image = still.copy()
        image[20:42, 20:42] = frame[20:42, 20:42]
        frames.append(Image.fromarray(image))
    extras = VideoMotion()([frames, [Image.fromarray(still)] * 4], [""] * 2, [{}] * 2)[1]
    assert extras["speed"][0] > 1 / SIDE
    assert extras["speed"][1] < 0.1 / SIDE


def test_smoothness_follows_the_formula(texture):
    """1 - |v' - v| / (v' + v), also for changes of direction."""
    reward = MotionSmoothness()
    cases = {
        ((2, 0),) * 4: 1.0,
        ((1, 0), (3, 0)): 0.5,
        ((2, 0), (-2, 0)) * 2: 0.0,
        ((2, 0), (0, 2)): 1 - math.sqrt(8) / 4,
        ((0, 0),) * 3: 1.0,
    }
    videos = [translated(texture, list(steps)) for steps in cases]
    found = reward(videos, [""] * len(videos), [{}] * len(videos))
    assert found == pytest.approx(list(cases.values()), abs=0.12)


def test_flicker_is_the_mean_difference_of_frames():
    grey = [Image.new("RGB", (8, 8), (level,) * 3) for level in (0, 51, 0, 255)]
    half = grey[0].copy()
    half.paste((255, 255, 255), (0, 0, 4, 8))
    reward = TemporalFlicker()
    videos = [grey, [grey[0]] * 3, [grey[0], half]]
    expected = [1 - (0.2 + 0.2 + 1) / 3, 1.0, 0.5]
    assert reward(videos, [""] * 3, [{}] * 3) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["video_motion", "motion_smoothness", "temporal_flicker"])
def test_an_image_has_no_motion_to_score(texture, name):
    reward = build_reward({name: 1.0})
    moving = translated(texture, [(2, 0)] * 3)
    scores = reward([moving[:1], moving], ["", ""], [{}, {}])[name]
    assert np.isnan(scores).tolist() == [True, False]
    [value] = score(reward.scorers[name], [moving[:1]], [""], [{}]).values
    returned = pickle.loads(pickle.dumps(value))  # as from the process of a reward server
    assert (type(returned), returned.reason) == (TooFewFrames, value.reason)
    with raises_user_error("videos of at least", "not 1", field=f"reward {name!r}"):
        reward.smoke_test([""], [{}], 32, 32, 1)


def test_the_first_frame_is_compared_with_the_source_image(texture):
    """`keep_source` with frames='first' is the fidelity of an image-to-video model."""
    video = translated(texture, [(2, 0)] * 3)
    reward = build_reward({"keep_source": 1.0}, options={"keep_source": {"frames": "first"}})
    found = reward([video, video], ["", ""], [{SOURCE: video[0]}, {SOURCE: video[3]}])
    assert found["keep_source"][0] == pytest.approx(1)
    assert found["keep_source"][1] < 0.9


def test_options_and_packages_are_checked(monkeypatch):
    for speed in (0, -1, float("inf"), "fast"):
        with raises_user_error(speed, field="speed"):
            VideoMotion(speed=speed)
    monkeypatch.setattr("flow_grpo.rewards.option_checks.find_spec", lambda name: None)
    with raises_user_error("video_motion", "opencv-python-headless"):
        motion.VideoMotion()
