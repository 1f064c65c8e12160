"""What a reward sees of a video, and the score that comes of it."""

import math
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from signs import prompt, sign

from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward, build_scorers
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.frames import choose_frames, frame_places, mean_of_frames, rule_of, to_pil
from flow_grpo.rewards.protocol import as_scorer

JPEG = "jpeg_compressibility"
RULES = st.sampled_from(["first", "middle", "clip"]) | st.integers(1, 40).map("mean of {}".format)

REWARDS = """
    from dataclasses import dataclass
    import numpy as np

    def whole(images, prompts, metadata):
        assert all(isinstance(clip, list) for clip in images)
        return [len(clip) + np.asarray(clip[-1]).mean() / 255 for clip in images]
    whole.frames = "clip"

    def unsaid(images, prompts, metadata):
        return [float(len(clip)) for clip in images]

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
            return [float(len(clip)) for clip in images]

    class Odd:
        frames = 3
        def __call__(self, images, prompts, metadata): ...

    class Costly:
        def __init__(self):
            raise AssertionError("built before the mistake was told")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Build rewards of a user's module, each under the name it has there."""
    module = f"clips_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.syspath_prepend(tmp_path)

    def build(*names: str, **options: dict):
        custom = {name: f"{module}:{name}" for name in names}
        weights = {name: 1.0 for name in names}
        return build_reward(weights, custom=custom, options=options)

    return build


def grey_clip(*levels: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (level,) * 3) for level in levels]


def noise_clips(count: int, frames: int) -> torch.Tensor:
    return torch.rand(count, frames, 3, 16, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("count", "rule", "places"),
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
def test_frames_are_spread_evenly_from_the_first_to_the_last(count, rule, places):
    assert frame_places(count, rule) == places


@given(count=st.integers(1, 100), rule=RULES)
def test_what_was_chosen_is_chosen_again(count, rule):
    """The trainer fetches the chosen frames alone, and then the scorer is called by its rule."""
    places = frame_places(count, rule)
    assert places == sorted(set(places))
    assert 0 <= places[0] <= places[-1] < count
    if rule.startswith("mean"):
        assert len(places) == min(count, int(rule.split()[-1]))
    assert choose_frames(choose_frames([list(range(count))], rule), rule) == [places]
    clips = torch.arange(count).reshape(1, count, 1, 1, 1)
    assert choose_frames(clips, rule).flatten().tolist() == places


def test_pictures_are_not_touched():
    pictures, tensor = grey_clip(1, 2), torch.zeros(2, 3, 8, 8)
    assert choose_frames(pictures, "first") is pictures
    assert choose_frames(tensor, "mean of 4") is tensor
    assert choose_frames(pictures, "clip") == [[pictures[0]], [pictures[1]]]


def test_the_score_is_the_mean_over_the_frames_that_have_one():
    scores = [1.0, 2.0, 6.0, Failed("a"), 5.0, Failed("b"), Failed("c"), 7.0]
    three, two, none, picture = mean_of_frames(scores, [3, 2, 2, 1])
    assert (three, two, picture) == (3.0, 5.0, 7.0)
    assert none.reason == "c"


@pytest.mark.parametrize("rule", [None, "first", "middle", "mean of 3", "mean of 9"])
def test_a_picture_reward_scores_a_clip_by_its_frames(rule):
    clips = noise_clips(3, 5)
    options = {JPEG: {"frames": rule}} if rule else {}
    places = frame_places(5, rule or "mean of 4")
    by_frame = [build_reward({JPEG: 1.0})(clips[:, place], ["p"] * 3)[JPEG] for place in places]
    with_rule = build_reward({JPEG: 1.0}, options=options)
    expected = np.mean(by_frame, axis=0)
    np.testing.assert_allclose(with_rule(clips, ["p"] * 3)[JPEG], expected, rtol=1e-12)
    np.testing.assert_allclose(with_rule(to_pil(clips), ["p"] * 3)[JPEG], expected, rtol=1e-12)


@given(rule=RULES.filter(lambda rule: rule != "clip"), count=st.integers(1, 3))
def test_a_clip_of_one_frame_scores_as_its_picture(rule, count):
    clips = noise_clips(count, 1)
    reward = build_reward({JPEG: 1.0}, options={JPEG: {"frames": rule}})
    expected = build_reward({JPEG: 1.0})(clips[:, 0], ["p"] * count)
    assert reward(clips, ["p"] * count)["avg"].tolist() == expected["avg"].tolist()


def test_words_are_read_in_each_frame():
    clip = [sign("BREAD"), sign("MILK"), sign("BREAD")]
    reward = build_reward({"ocr": 1.0}, options={"ocr": {"frames": "mean of 3", "workers": 1}})
    try:
        alone = reward(clip, [prompt("BREAD")] * 3)["ocr"]
        assert alone[0] == 1.0 > alone[1]
        assert reward([clip], [prompt("BREAD")])["ocr"] == pytest.approx([alone.mean()])
    finally:
        reward.scorers["ocr"].close()


def test_rewards_of_one_run_see_what_each_asked_for(own):
    reward = own("whole", "bright", "Shade", bright={"frames": "first"}, Shade={"frames": "middle"})
    levels = torch.tensor([[0.2, 0.4, 0.6], [0.0, 0.4, 1.0]])
    clips = levels[:, :, None, None, None].expand(2, 3, 3, 8, 8)
    scores = reward(clips, ["a", "b"], [{"kind": 1}, {"kind": 2}])
    np.testing.assert_allclose(scores["whole"], [3.6, 4.0])
    np.testing.assert_allclose(scores["Shade"], [102, 102])
    assert scores["bright"][0] == 51  # of the other, the first frame got none
    assert math.isnan(scores["bright"][1])
    assert scores["bright/kind"].tolist() == [1, 2]


def test_frames_without_a_score_leave_the_mean(own):
    reward = own("bright")
    scores = reward([grey_clip(0, 30, 60)], ["p"], [{"kind": 4}])
    assert scores["bright"] == [45]
    assert scores["bright/kind"] == [4]
    assert math.isnan(reward([grey_clip(0, 0)], ["p"], [{"kind": 4}])["bright"][0])
    assert reward.last_errors == {"bright": "it returned None"}


def test_a_clip_with_a_frame_that_is_not_a_number_gets_no_score():
    clips = noise_clips(2, 3)
    clips[1, 2, 0, 4, 4] = torch.nan
    reward = build_reward({JPEG: 1.0}, options={JPEG: {"frames": "first"}})
    assert np.isnan(reward(clips, ["p"] * 2)["avg"]).tolist() == [False, True]


def test_a_reward_may_take_whole_clips(own):
    reward = own("whole", "unsaid", "Late", unsaid={"frames": "clip"})
    scores = reward([grey_clip(0, 0, 255), grey_clip(0)], ["a", "b"])
    assert scores["whole"].tolist() == [4.0, 1.0]
    assert scores["unsaid"].tolist() == scores["Late"].tolist() == [3.0, 1.0]
    # a picture is a clip of one frame
    assert reward(grey_clip(255), ["a"])["whole"].tolist() == [2.0]
    assert reward(torch.ones(1, 3, 8, 8), ["a"])["whole"].tolist() == [2.0]


@pytest.mark.parametrize("rule", ["lst", "mean of", "mean of 0", "mean of 2.5", "Middle", 4, None])
def test_a_rule_that_there_is_not_is_named(rule):
    with pytest.raises(UserError, match=rf"^reward_options\.ocr\.frames={rule!r} must be 'first',"):
        build_reward({"ocr": 1.0}, options={"ocr": {"frames": rule}})


def test_a_rule_that_the_reward_cannot_keep_is_refused_before_any_is_built(own):
    with pytest.raises(UserError, match=f"frames='clip', but '{JPEG}' scores pictures"):
        build_reward({JPEG: 1.0}, options={JPEG: {"frames": "clip"}})
    with pytest.raises(UserError, match="frames='middle' has no use: 'whole' takes whole clips"):
        own("Costly", "whole", whole={"frames": "middle"})
    with pytest.raises(UserError, match="reward 'Odd': its attribute frames=3 must be"):
        own("Costly", "Odd")
    with pytest.raises(UserError, match=r"reward_options\.ocr=5 must be a dict"):
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

    assert rule_of("judge", as_scorer(Judge), None, custom=True) == "middle"
    assert rule_of("judge", as_scorer(Judge), "first", custom=True) == "first"
    with pytest.raises(UserError, match="compares samples with each other"):
        rule_of("judge", as_scorer(Judge), "mean of 2", custom=True)
