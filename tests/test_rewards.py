import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model

from flow_grpo.draw.algorithms.base import Setup
from flow_grpo.draw.algorithms.mix import Mix
from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward
from flow_grpo.rewards.frames import to_pil
from flow_grpo.run.metrics import Scored

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


def test_what_keeps_its_source_is_ssim():
    """In a picture of one window, by hand: weighted means, variances and covariance."""
    x, y = (np.random.default_rng(i).random((11, 11, 3)).round(2) for i in (0, 1))
    y = (x + y) / 2
    x, y = ((255 * each).astype("u1") for each in (x, y))
    pictures = [Image.fromarray(each) for each in (x, y)]
    weights = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    weights = (np.outer(weights, weights) / weights.sum() ** 2).ravel()
    expected = []
    for a, b in zip((x / 255).reshape(-1, 3).T, (y / 255).reshape(-1, 3).T, strict=True):
        (aa, ab), (_, bb) = np.cov([a, b], aweights=weights, ddof=0)
        ma, mb = weights @ a, weights @ b
        light = (2 * ma * mb + 1e-4) / (ma**2 + mb**2 + 1e-4)
        expected.append(light * (2 * ab + 9e-4) / (aa + bb + 9e-4))
    reward = build_reward({"keep_source": 1.0})
    larger = pictures[1].resize((22, 44), Image.Resampling.NEAREST)
    rows = [{"source": pictures[1]}, {"source": [pictures[0], larger]}, {"source": "a book"}, {}]
    scores = reward([pictures[0]] * 4, ["a"] * 4, rows)["keep_source"]
    assert scores[0] == pytest.approx(np.mean(expected))
    assert 0.3 < scores[0] < 0.95
    assert scores[1] == pytest.approx(1)
    assert np.isneginf(scores[2:]).all()  # not asked
    assert reward([NOISE], ["a"], [{"source": larger}])["keep_source"] < 0.3  # of another shape
    reward.check(["a"], rows[:1])
    with pytest.raises(UserError, match="cannot be scored by 'keep_source': it has no picture to"):
        reward.check(["a"], rows[3:])


def test_what_is_inside_the_mask_may_change():
    edited, mask = NOISE.copy(), Image.new("L", NOISE.size)
    edited.paste("red", (40, 8, 60, 24))
    mask.paste(255, (40, 8, 60, 24))
    beyond = edited.copy()
    beyond.paste("red", (0, 0, 20, 32))
    larger, outside = mask.resize((192, 64), Image.Resampling.NEAREST), ImageOps.invert(mask)
    masks = [mask, None, mask, larger, Image.new("L", NOISE.size, 255), outside]
    rows = [{"source": NOISE, **({"mask": each} if each else {})} for each in masks]
    samples = [edited, edited, beyond, edited, beyond, edited]
    scores = build_reward({"keep_source": 1.0})(samples, ["a"] * 6, rows)["keep_source"]
    assert scores[[0, 4]] == pytest.approx(1)
    assert 0.75 < scores[1] < 0.95
    assert 0.6 < scores[2] < 0.85
    assert scores[3] > 0.95  # scaled as the source is
    assert scores[5] < 0.1


@pytest.mark.parametrize("kind", ["clip", "dinov2"])
def test_features_of_a_model_say_what_is_kept(kind, tmp_path):
    """The cosine, by plain transformers."""
    network = small_network(kind, tmp_path)
    edited, mask = NOISE.copy(), Image.new("L", NOISE.size)
    edited.paste("red", (48, 0, 96, 32))
    mask.paste(255, (48, 0, 96, 32))
    options = {"keep_source": {"model": str(tmp_path), "batch_size": 2}}
    reward = build_reward({"keep_source": 1.0}, options=options)
    rows = [{"source": NOISE}, {}, {"source": NOISE, "mask": mask}, {"source": [edited, NOISE]}]
    scores = reward([edited] * 4, ["a"] * 4, rows)["keep_source"]
    # 32 of 96 pixels are cut from the middle
    pixels = [np.asarray(each.crop((32, 0, 64, 32))) / 255 for each in (edited, NOISE)]
    pixels = (torch.tensor(np.stack(pixels)).float() - 0.5).movedim(-1, 1) / 0.25
    if kind == "clip":
        seen = network.visual_projection(network.vision_model(pixels).pooler_output)
    else:
        seen = network(pixels).last_hidden_state[:, 0]
    cosine = torch.nn.functional.cosine_similarity(*seen, dim=0).item()
    assert scores[[0, 2, 3]] == pytest.approx([cosine, 1, 1], abs=1e-5)
    assert abs(cosine) < 0.999
    assert np.isneginf(scores[1])
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="is a bert model, and must be a CLIP or DINOv2 model"):
        build_reward({"keep_source": 1.0}, options=options)


def small_network(kind: str, folder: Path) -> torch.nn.Module:
    """Random, with weights large enough to tell pictures apart."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"image_size": 32, "patch_size": 8}
    if kind == "clip":
        text = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
        text["num_attention_heads"] = 2
        network = CLIPModel(CLIPConfig(text_config=text, vision_config=sizes, projection_dim=8))
    else:
        network = Dinov2Model(Dinov2Config(**sizes))
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    network.eval().requires_grad_(False).save_pretrained(folder)
    square = {"height": 32, "width": 32}
    processor = {"size": {"shortest_edge": 32}, "crop_size": square}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return network


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


def test_a_reward_of_weight_0_that_fails_leaves_the_total_alone(tmp_path, monkeypatch):
    """The total, and with it credit, the choice of samples (`Scored.total`) and MixGRPO's own
    advantages."""
    (tmp_path / "fails.py").write_text("def score(images, prompts, metadata): return [None, 1]")
    monkeypatch.chdir(tmp_path)
    weights = {"jpeg_compressibility": 2.0, "mine": 0.0}
    reward = build_reward(weights, custom={"mine": "fails:score"})
    scores = reward([BLANK, NOISE], ["a", "b"])
    assert np.isnan(scores["mine"]).tolist() == [True, False]
    np.testing.assert_array_equal(scores["avg"], 2 * scores["jpeg_compressibility"])
    scored = Scored(scores, np.array([0, 0]), reward.weights)
    np.testing.assert_array_equal(scored.total, scores["avg"])
    mix = Mix(Mix.Settings(), Setup()).credit(scored)
    np.testing.assert_allclose(mix, [2**0.5, -(2**0.5)], rtol=1e-4)


def test_a_reward_of_weight_0_needs_no_gradient_and_scores_no_prompt_alone(tmp_path, monkeypatch):
    """Its NaN would be in the gradient of all others; and a prompt that only it asks for has no
    reward to learn from."""
    (tmp_path / "pixels.py").write_text(
        "class Mean:\n"
        "    def __call__(self, images, prompts, metadata): return [1.0] * len(images)\n"
        "    def score_pixels(self, pixels, prompts): return pixels.mean((1, 2, 3))\n"
        "class Never(Mean):\n"
        "    def score_pixels(self, pixels, prompts): return pixels.mean((1, 2, 3)) / 0\n"
        "class Red(Mean):\n"
        "    def why_not(self, prompt, metadata): return None if 'red' in prompt else 'not red'\n"
    )
    monkeypatch.chdir(tmp_path)
    custom = {name.lower(): f"pixels:{name}" for name in ("Mean", "Never", "Red")}
    weights = {"mean": 3.0, "never": 0.0, "jpeg_compressibility": 0.0}
    reward = build_reward(weights, custom=custom)
    reward.check_differentiable("leap")
    pixels = torch.rand(2, 3, 4, 4, requires_grad=True)
    [gradient] = torch.autograd.grad(reward.score_pixels(pixels, ["a", "b"]).sum(), pixels)
    assert torch.allclose(gradient, torch.full_like(gradient, 3 / 48))
    reward = build_reward({"red": 1.0, "mean": 0.0}, custom=custom)
    reward.check(["a red cat"])
    with pytest.raises(UserError, match=r"'red'.*a blue cat"):
        reward.check(["a red cat", "a blue cat"])


def test_a_score_whose_variance_would_overflow_is_a_failure_that_says_what_to_do(
    tmp_path, monkeypatch
):
    """Not a loss that is not finite, with the advice to lower the learning rate."""
    body = "def score(images, prompts, metadata):\n    return [1e308, 1.0]"
    reward = reward_of(tmp_path, monkeypatch, body)
    assert np.isnan(reward([BLANK] * 2, ["p"] * 2)["mine"]).tolist() == [True, False]
    assert "1e+308" in reward.last_errors["mine"]
    assert "scale" in reward.last_errors["mine"]


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
