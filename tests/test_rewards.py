import io

import numpy as np
import pytest
import torch
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward
from flow_grpo.rewards.frames import to_pil

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 96, 3), dtype=np.uint8))
BLANK = Image.new("RGB", (96, 32))
JPEG = {"jpeg_compressibility": 1.0}


def reward_of(tmp_path, monkeypatch, body: str):
    """A reward module of a user's, in the folder where the run is started."""
    module = f"rewards_of_{tmp_path.name}"  # python would not import one name twice
    (tmp_path / f"{module}.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    return build_reward({"mine": 2.0, **JPEG}, custom={"mine": f"{module}:score"})


def test_jpeg_rewards_are_kilobytes_and_minus_a_500th_of_them():
    reward = build_reward({"jpeg_compressibility": 1.0, "jpeg_incompressibility": 1.0})
    scores = reward([NOISE, BLANK], ["a", "b"])
    small, large = scores["jpeg_compressibility"], scores["jpeg_incompressibility"]
    assert small[1] > small[0]
    file = io.BytesIO()
    NOISE.save(file, "JPEG", quality=95)
    assert large[0] == len(file.getvalue()) / 1000
    np.testing.assert_allclose(small, -large / 500)  # so that Flow-GRPO's weights carry over
    np.testing.assert_allclose(scores["avg"], small + large)


def test_tensors_and_pictures_score_alike():
    pixels = torch.from_numpy(np.asarray(NOISE).copy()).permute(2, 0, 1)[None] / 255
    assert np.array_equal(np.asarray(to_pil(pixels)[0]), np.asarray(NOISE))
    reward = build_reward(JPEG)
    assert reward(pixels, ["a"])["avg"] == reward([NOISE], ["a"])["avg"]


def test_a_reward_of_ones_own_gets_images_prompts_and_metadata(tmp_path, monkeypatch):
    reward = reward_of(
        tmp_path,
        monkeypatch,
        "def score(images, prompts, metadata):\n"
        "    return [i.width + len(p) + m['bonus'] for i, p, m in"
        " zip(images, prompts, metadata)]\n",
    )
    scores = reward([BLANK, NOISE], ["ab", "abc"], [{"bonus": 0.5}, {"bonus": 0}])
    np.testing.assert_allclose(scores["mine"], [98.5, 99])
    np.testing.assert_allclose(scores["avg"], 2 * scores["mine"] + scores["jpeg_compressibility"])


def test_none_nan_and_infinity_are_failures_not_numbers(tmp_path, monkeypatch):
    body = "def score(images, prompts, metadata):\n    return [None, float('nan'), float('inf'), 1]"
    scores = reward_of(tmp_path, monkeypatch, body)([BLANK] * 4, ["p"] * 4)
    assert np.isnan(scores["mine"]).tolist() == [True, True, True, False]
    assert np.isnan(scores["avg"]).tolist() == [True, True, True, False]


def test_a_class_is_built_with_its_options(tmp_path, monkeypatch):
    (tmp_path / "my_class.py").write_text(
        "class Constant:\n"
        "    def __init__(self, value=0.0): self.value = value\n"
        "    def __call__(self, images, prompts, metadata): return [self.value] * len(images)\n"
        "    def check_prompts(self, prompts):\n"
        "        if 'bad' in prompts: raise ValueError('bad prompt')\n"
    )
    monkeypatch.chdir(tmp_path)
    custom = {"constant": "my_class:Constant"}
    reward = build_reward({"constant": 1.0}, custom=custom, options={"constant": {"value": 3.0}})
    assert reward([BLANK], ["a"])["avg"].tolist() == [3.0]
    reward.check(["good"])
    with pytest.raises(ValueError, match="bad prompt"):
        reward.check(["good", "bad"])
    with pytest.raises(UserError, match=r"unknown reward_options\.constant\.valu; it takes value"):
        build_reward({"constant": 1.0}, custom=custom, options={"constant": {"valu": 3.0}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return undefined", "NameError: name 'undefined' is not defined"),
        ("return 1.0", "it returned scores of shape () for 2 images"),
        ("return [1.0]", "it returned scores of shape (1,) for 2 images"),
        ("return ['high', 1.0]", "it returned 'high' among its scores, not a number"),
        ("return [[1.0], [2.0]]", "it returned scores of shape (2, 1) for 2 images"),
        ("return [1.0, 2.0], {'x': [1.0]}", "it returned 'x' of shape (1,) for 2 images"),
        ("return [1.0, 2.0], {'std': [1.0, 2.0]}", "'std' cannot be the name"),
    ],
)
def test_a_scorer_that_breaks_the_contract_gives_no_score_and_says_why(
    tmp_path, monkeypatch, body, message
):
    reward = reward_of(tmp_path, monkeypatch, f"def score(images, prompts, metadata): {body}")
    scores = reward([BLANK, NOISE], ["a", "b"])
    assert np.isnan(scores["mine"]).all()
    assert np.isnan(scores["avg"]).all()
    assert not np.isnan(scores["jpeg_compressibility"]).any()
    assert message in reward.last_errors["mine"]


def test_further_values_stand_beside_the_scores(tmp_path, monkeypatch):
    body = "def score(images, prompts, metadata): return [1, 2], {'sharp': [0.5, None]}"
    scores = reward_of(tmp_path, monkeypatch, body)([BLANK, NOISE], ["a", "b"])
    assert scores["mine"].tolist() == [1, 2]
    np.testing.assert_array_equal(scores["mine/sharp"], [0.5, np.nan])
    assert not np.isnan(scores["avg"]).any()


def test_a_scorer_may_be_async(tmp_path, monkeypatch):
    """And always runs on one event loop, which HTTP clients need."""
    reward = reward_of(
        tmp_path,
        monkeypatch,
        "import asyncio\n"
        "lock = asyncio.Event()\n"
        "async def score(images, prompts, metadata):\n"
        "    asyncio.get_running_loop().call_later(0.01, lock.set)\n"
        "    await lock.wait()\n"
        "    return [float(len(p)) for p in prompts]\n",
    )
    for _ in range(2):
        assert reward([BLANK, NOISE], ["a", "bc"])["mine"].tolist() == [1, 2]


def test_rewards_run_at_the_same_time(tmp_path, monkeypatch):
    """Each waits until the other has started: one after the other would never end."""
    (tmp_path / "meeting.py").write_text(
        "import threading\n"
        "barrier = threading.Barrier(2, timeout=20)\n"
        "def first(images, prompts, metadata): return [barrier.wait() * 0.0]\n"
        "def second(images, prompts, metadata): return [barrier.wait() * 0.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    custom = {name: f"meeting:{name}" for name in ("first", "second")}
    reward = build_reward({"first": 1.0, "second": 1.0}, custom=custom)
    assert reward([BLANK], ["a"])["avg"].tolist() == [0.0]


def test_a_class_of_any_options_gets_them(tmp_path, monkeypatch):
    (tmp_path / "any_options.py").write_text(
        "class Scorer:\n"
        "    def __init__(self, **options): self.options = options\n"
        "    def __call__(self, images, prompts, metadata): return [0.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    custom = {"mine": "any_options:Scorer"}
    reward = build_reward({"mine": 1.0}, custom=custom, options={"mine": {"depth": 3}})
    assert reward.scorers["mine"].options == {"depth": 3}


def test_a_class_that_takes_a_device_gets_it(tmp_path, monkeypatch):
    (tmp_path / "on_device.py").write_text(
        "class Scorer:\n"
        "    def __init__(self, device): self.device = device\n"
        "    def __call__(self, images, prompts, metadata): return [0.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    custom = {"mine": "on_device:Scorer"}
    reward = build_reward({"mine": 1.0}, device="meta", custom=custom)
    assert reward.scorers["mine"].device == "meta"


@pytest.mark.parametrize(
    ("weights", "kwargs", "message"),
    [
        ({}, {}, "reward_fn is empty"),
        ({"jpg": 1.0}, {}, "unknown reward 'jpg'; known are .*jpeg_compressibility"),
        (
            {"mine": 1.0},
            {"custom": {"mine": "no_such_module:f"}},
            "cannot import 'no_such_module:f'",
        ),
        ({"mine": 1.0}, {"custom": {"mine": "math:no_such_name"}}, "cannot import"),
        ({"mine": 1.0}, {"custom": {"mine": "math.sqrt"}}, "must read 'package.module:function'"),
        (JPEG, {"options": {"jpeg_compressibility": {"q": 1}}}, "is a function"),
        ({"mine": 1.0}, {"custom": {"mine": "math:pi"}}, "is a float, not callable"),
        ({"mine": 1.0}, {"custom": {"mine": 3}}, "must read 'package.module:function'"),
        ({"jpeg_compressibility": "x"}, {}, "must be a number, its weight"),
        (JPEG, {"options": {"ocrr": {}}}, "unknown reward 'ocrr'"),
        ({"avg": 1.0}, {"custom": {"avg": "math:sqrt"}}, "'avg' has the name of a metric"),
        ({"diversity": 1.0}, {"custom": {"diversity": "math:sqrt"}}, "the name of a metric"),
    ],
)
def test_mistakes_are_named(weights, kwargs, message):
    with pytest.raises(UserError, match=message):
        build_reward(weights, **kwargs)


def test_counts_that_differ_are_named():
    with pytest.raises(ValueError, match="2 images, 1 prompts and 1 metadata"):
        build_reward(JPEG)([BLANK, NOISE], ["a"])


def test_a_picture_that_is_not_a_number_gets_no_score():
    images = torch.rand(3, 3, 8, 8)
    images[1, 2, 4, 4] = torch.nan
    scores = build_reward({"jpeg_compressibility": 1.0}).submit(images, ["a"] * 3).result()
    assert np.isnan(scores["avg"]).tolist() == [False, True, False]
