"""The frames of a video that a reward scores, and how their scores are combined."""

import math
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sign_images import prompt, sign
from user_errors import raises_user_error

from flow_grpo.rewards import build_reward, build_scorers
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.frames import (
    average_over_frames,
    frame_indices,
    resolve_frame_rule,
    select_frames,
    to_pil,
)
from flow_grpo.rewards.protocol import as_scorer

JPEG = "jpeg_compressibility"
RULES = st.sampled_from(["first", "middle", "clip"]) | st.integers(1, 40).map("mean of {}".format)

REWARDS = """
    from dataclasses import dataclass
    import numpy as np

    def whole(images, prompts, metadata):
        assert all(isinstance(video, list) for video in images)
        return [len(video) + np.asarray(video[-1]).mean() / 255 for video in images]
    whole.frames = "clip"

    def unsaid(images, prompts, metadata):
        return [float(len(video)) for video in images]

    def bright(images, prompts, metadata):
        means = [np.asarray(image).mean() for image in images]
        return [m if m else None for m in means], {"kind": [x["kind"] for x in metadata]}

    @dataclass(frozen=True)
    class Shade:
        add: float = 0.0
        def __call__(self, images, prompts, metadata):
            return [self.add + np.asarray(image).mean() for image in images]

    class Late:
        def __init__(self):
            self.frames = "clip"
        def __call__(self, images, prompts, metadata):
            return [float(len(video)) for video in images]

    class Odd:
        frames = 3
        def __call__(self, images, prompts, metadata): ...

    class Costly:
        def __init__(self):
            raise AssertionError("built before the error was reported")
"""


@pytest.fixture
def build_custom(tmp_path, monkeypatch):
    """Return a function that builds custom rewards of the module above by their names."""
    module = f"videos_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.syspath_prepend(tmp_path)

    def build(*names: str, **options: dict):
        custom = {name: f"{module}:{name}" for name in names}
        weights = {name: 1.0 for name in names}
        return build_reward(weights, custom=custom, options=options)

    return build


def grey_frames(*levels: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (level,) * 3) for level in levels]


def noise_videos(count: int, frames: int) -> torch.Tensor:
    return torch.rand(count, frames, 3, 16, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("count", "rule", "indices"),
    [
        (33, "first", [0]),
        (33, "middle", [16]),
        (4, "middle", [2]),
        (33, "mean of 1", [16]),
        (33, "mean of 2", [0, 32]),
        (33, "mean of 4", [0, 11, 21, 32]),
        (5, "mean of 4", [0, 1, 3, 4]),
        (3, "mean of 4", [0, 1, 2]),
        (1, "mean of 4", [0]),
        (3, "clip", [0, 1, 2]),
    ],
)
def test_frames_are_spaced_evenly_from_the_first_to_the_last(count, rule, indices):
    assert frame_indices(count, rule) == indices


@given(count=st.integers(1, 100), rule=RULES)
def test_selecting_frames_twice_changes_nothing(count, rule):
    """The trainer fetches the selected frames, and the scorer applies its rule to them again."""
    indices = frame_indices(count, rule)
    assert indices == sorted(set(indices))
    assert 0 <= indices[0] <= indices[-1] < count
    if rule.startswith("mean"):
        assert len(indices) == min(count, int(rule.split()[-1]))
    assert select_frames(select_frames([list(range(count))], rule), rule) == [indices]
    videos = torch.arange(count).reshape(1, count, 1, 1, 1)
    assert select_frames(videos, rule).flatten().tolist() == indices


def test_images_are_unchanged():
    images, tensor = grey_frames(1, 2), torch.zeros(2, 3, 8, 8)
    assert select_frames(images, "first") is images
    assert select_frames(tensor, "mean of 4") is tensor
    assert select_frames(images, "clip") == [[images[0]], [images[1]]]


def test_the_score_is_the_mean_over_the_frames_that_have_one():
    scores = [1.0, 2.0, 6.0, Failed("a"), 5.0, Failed("b"), Failed("c"), 7.0]
    three, two, none, one = average_over_frames(scores, [3, 2, 2, 1])
    assert (three, two, one) == (3.0, 5.0, 7.0)
    assert none.reason == "c"


@pytest.mark.parametrize("rule", [None, "first", "middle", "mean of 3", "mean of 9"])
def test_an_image_reward_scores_the_frames_of_a_video(rule):
    videos = noise_videos(3, 5)
    options = {JPEG: {"frames": rule}} if rule else {}
    indices = frame_indices(5, rule or "mean of 4")
    by_frame = [build_reward({JPEG: 1.0})(videos[:, i], ["p"] * 3)[JPEG] for i in indices]
    with_rule = build_reward({JPEG: 1.0}, options=options)
    expected = np.mean(by_frame, axis=0)
    np.testing.assert_allclose(with_rule(videos, ["p"] * 3)[JPEG], expected, rtol=1e-12)
    np.testing.assert_allclose(with_rule(to_pil(videos), ["p"] * 3)[JPEG], expected, rtol=1e-12)


@given(rule=RULES.filter(lambda rule: rule != "clip"), count=st.integers(1, 3))
def test_a_video_of_one_frame_scores_like_its_image(rule, count):
    videos = noise_videos(count, 1)
    reward = build_reward({JPEG: 1.0}, options={JPEG: {"frames": rule}})
    expected = build_reward({JPEG: 1.0})(videos[:, 0], ["p"] * count)
    assert reward(videos, ["p"] * count)["avg"].tolist() == expected["avg"].tolist()


def test_ocr_reads_each_frame():
    video = [sign("BREAD"), sign("MILK"), sign("BREAD")]
    reward = build_reward({"ocr": 1.0}, options={"ocr": {"frames": "mean of 3", "workers": 1}})
    try:
        by_frame = reward(video, [prompt("BREAD")] * 3)["ocr"]
        assert by_frame[0] == 1.0 > by_frame[1]
        assert reward([video], [prompt("BREAD")])["ocr"] == pytest.approx([by_frame.mean()])
    finally:
        reward.scorers["ocr"].close()


def test_each_reward_sees_the_frames_of_its_rule(build_custom):
    options = {"bright": {"frames": "first"}, "Shade": {"frames": "middle"}}
    reward = build_custom("whole", "bright", "Shade", **options)
    levels = torch.tensor([[0.2, 0.4, 0.6], [0.0, 0.4, 1.0]])
    videos = levels[:, :, None, None, None].expand(2, 3, 3, 8, 8)
    scores = reward(videos, ["a", "b"], [{"kind": 1}, {"kind": 2}])
    np.testing.assert_allclose(scores["whole"], [3.6, 4.0])
    np.testing.assert_allclose(scores["Shade"], [102, 102])
    assert scores["bright"][0] == 51
    assert math.isnan(scores["bright"][1])  # its first frame is black
    assert scores["bright/kind"].tolist() == [1, 2]


def test_frames_without_a_score_are_left_out_of_the_mean(build_custom):
    reward = build_custom("bright")
    scores = reward([grey_frames(0, 30, 60)], ["p"], [{"kind": 4}])
    assert scores["bright"] == [45]
    assert scores["bright/kind"] == [4]
    assert math.isnan(reward([grey_frames(0, 0)], ["p"], [{"kind": 4}])["bright"][0])
    assert "None" in reward.last_errors["bright"]


def test_a_video_with_a_non_finite_frame_has_no_score():
    videos = noise_videos(2, 3)
    videos[1, 2, 0, 4, 4] = torch.nan
    reward = build_reward({JPEG: 1.0}, options={JPEG: {"frames": "first"}})
    assert np.isnan(reward(videos, ["p"] * 2)["avg"]).tolist() == [False, True]


def test_a_reward_may_score_whole_videos(build_custom):
    reward = build_custom("whole", "unsaid", "Late", unsaid={"frames": "clip"})
    scores = reward([grey_frames(0, 0, 255), grey_frames(0)], ["a", "b"])
    assert scores["whole"].tolist() == [4.0, 1.0]
    assert scores["unsaid"].tolist() == scores["Late"].tolist() == [3.0, 1.0]
    # an image is a video of one frame
    assert reward(grey_frames(255), ["a"])["whole"].tolist() == [2.0]
    assert reward(torch.ones(1, 3, 8, 8), ["a"])["whole"].tolist() == [2.0]


@pytest.mark.parametrize("rule", ["lst", "mean of", "mean of 0", "mean of 2.5", "Middle", 4, None])
def test_an_unknown_rule_is_rejected(rule):
    with raises_user_error("'first'", field="reward_options.ocr.frames", value=rule):
        build_reward({"ocr": 1.0}, options={"ocr": {"frames": rule}})


def test_rules_are_checked_before_any_reward_is_built(build_custom):
    with raises_user_error(JPEG, "images", field=f"reward_options.{JPEG}.frames", value="clip"):
        build_reward({JPEG: 1.0}, options={JPEG: {"frames": "clip"}})
    with raises_user_error("videos", field="reward_options.whole.frames", value="middle"):
        build_custom("Costly", "whole", whole={"frames": "middle"})
    with raises_user_error("'Odd'", "frames", value=3):
        build_custom("Costly", "Odd")
    with raises_user_error("dict", field="reward_options.ocr", value=5):
        build_reward({"ocr": 1.0}, options={"ocr": 5})


def test_one_function_may_have_two_rules():
    path = "flow_grpo.rewards.scorers.jpeg:jpeg_compressibility"
    scorers = build_scorers(
        ["a", "b"], custom={"a": path, "b": path}, options={"a": {"frames": "first"}}
    )
    assert scorers["a"].frames == "first"
    assert scorers["b"].frames == "mean of 4"


def test_a_judge_compares_one_frame_of_each_sample():
    class Judge:
        compares_groups = True

    assert resolve_frame_rule("judge", as_scorer(Judge), None, custom=True) == "middle"
    assert resolve_frame_rule("judge", as_scorer(Judge), "first", custom=True) == "first"
    with raises_user_error("'first'", field="reward_options.judge.frames", value="mean of 2"):
        resolve_frame_rule("judge", as_scorer(Judge), "mean of 2", custom=True)
