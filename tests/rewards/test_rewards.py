import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model
from user_errors import raises_user_error

from flow_grpo.diffusion.algorithms.base import Setup
from flow_grpo.diffusion.algorithms.mix import Mix
from flow_grpo.rewards import build_reward, close_scorers
from flow_grpo.rewards.custom import import_path, import_scorer
from flow_grpo.rewards.frames import to_pil
from flow_grpo.rewards.protocol import OLD_HOOKS, Scorer, as_scorer
from flow_grpo.rewards.text import MathAnswer
from flow_grpo.rewards.text.reward_model import RewardModel
from flow_grpo.training.metrics import ScoredSamples

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 96, 3), dtype=np.uint8))
BLANK = Image.new("RGB", (96, 32))
JPEG = {"jpeg_compressibility": 1.0}


def build_custom_reward(tmp_path, monkeypatch, body: str):
    """Build a custom reward from a module in the working directory."""
    module = f"rewards_of_{tmp_path.name}"  # Python would not import the same name twice
    (tmp_path / f"{module}.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    return build_reward({"mine": 2.0, **JPEG}, custom={"mine": f"{module}:score"})


def test_jpeg_rewards_are_kilobytes_and_minus_kilobytes_over_500():
    reward = build_reward({"jpeg_compressibility": 1.0, "jpeg_incompressibility": 1.0})
    scores = reward([NOISE, BLANK], ["a", "b"])
    small, large = scores["jpeg_compressibility"], scores["jpeg_incompressibility"]
    assert small[1] > small[0]
    file = io.BytesIO()
    NOISE.save(file, "JPEG", quality=95)
    assert large[0] == len(file.getvalue()) / 1000
    np.testing.assert_allclose(small, -large / 500)  # so that Flow-GRPO's weights carry over
    np.testing.assert_allclose(scores["avg"], small + large)


def test_keep_source_is_ssim():
    """Compare with weighted means, variances and covariance of images of a single window."""
    x = np.random.default_rng(0).random((11, 11, 3)).round(2)
    y = (x + np.random.default_rng(1).random((11, 11, 3)).round(2)) / 2
    x, y = (255 * x).astype("u1"), (255 * y).astype("u1")
    images = [Image.fromarray(x), Image.fromarray(y)]
    weights = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    weights = (np.outer(weights, weights) / weights.sum() ** 2).ravel()
    expected = []
    for a, b in zip((x / 255).reshape(-1, 3).T, (y / 255).reshape(-1, 3).T, strict=True):
        (aa, ab), (_, bb) = np.cov([a, b], aweights=weights, ddof=0)
        ma, mb = weights @ a, weights @ b
        light = (2 * ma * mb + 1e-4) / (ma**2 + mb**2 + 1e-4)
        expected.append(light * (2 * ab + 9e-4) / (aa + bb + 9e-4))
    reward = build_reward({"keep_source": 1.0})
    larger = images[1].resize((22, 44), Image.Resampling.NEAREST)
    rows = [{"source": images[1]}, {"source": [images[0], larger]}, {"source": "a book"}, {}]
    scores = reward([images[0]] * 4, ["a"] * 4, rows)["keep_source"]
    assert scores[0] == pytest.approx(np.mean(expected))
    assert 0.3 < scores[0] < 0.95
    assert scores[1] == pytest.approx(1)
    assert np.isneginf(scores[2:]).all()  # not applicable
    assert reward([NOISE], ["a"], [{"source": larger}])["keep_source"] < 0.3  # of another shape
    reward.check(["a"], rows[:1])
    with raises_user_error("keep_source", "source", field="prompt 1", value="a"):
        reward.check(["a"], rows[3:])


def test_changes_inside_the_mask_are_ignored():
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
def test_keep_source_with_a_model_is_the_cosine_of_features(kind, tmp_path):
    """Compare with plain transformers."""
    network = small_network(kind, tmp_path)
    edited, mask = NOISE.copy(), Image.new("L", NOISE.size)
    edited.paste("red", (48, 0, 96, 32))
    mask.paste(255, (48, 0, 96, 32))
    options = {"keep_source": {"model": str(tmp_path), "batch_size": 2}}
    reward = build_reward({"keep_source": 1.0}, options=options)
    rows = [{"source": NOISE}, {}, {"source": NOISE, "mask": mask}, {"source": [edited, NOISE]}]
    scores = reward([edited] * 4, ["a"] * 4, rows)["keep_source"]
    # the center crop has 32 of 96 pixels
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
    with raises_user_error("bert", "CLIP", field="model", value=str(tmp_path)):
        build_reward({"keep_source": 1.0}, options=options)


def small_network(kind: str, folder: Path) -> torch.nn.Module:
    """Save and return a network with random weights large enough to distinguish images."""
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


def test_tensors_and_pil_images_have_the_same_scores():
    pixels = torch.from_numpy(np.asarray(NOISE).copy()).permute(2, 0, 1)[None] / 255
    assert np.array_equal(np.asarray(to_pil(pixels)[0]), np.asarray(NOISE))
    reward = build_reward(JPEG)
    assert reward(pixels, ["a"])["avg"] == reward([NOISE], ["a"])["avg"]


def test_a_custom_reward_receives_images_prompts_and_metadata(tmp_path, monkeypatch):
    reward = build_custom_reward(
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
    scores = build_custom_reward(tmp_path, monkeypatch, body)([BLANK] * 4, ["p"] * 4)
    assert np.isnan(scores["mine"]).tolist() == [True, True, True, False]
    assert np.isnan(scores["avg"]).tolist() == [True, True, True, False]


def test_a_failed_reward_of_weight_0_does_not_change_the_total(tmp_path, monkeypatch):
    """Nor the advantages, the selection of samples by total, and MixGRPO's own advantages."""
    (tmp_path / "fails.py").write_text("def score(images, prompts, metadata): return [None, 1]")
    monkeypatch.chdir(tmp_path)
    weights = {"jpeg_compressibility": 2.0, "mine": 0.0}
    reward = build_reward(weights, custom={"mine": "fails:score"})
    scores = reward([BLANK, NOISE], ["a", "b"])
    assert np.isnan(scores["mine"]).tolist() == [True, False]
    np.testing.assert_array_equal(scores["avg"], 2 * scores["jpeg_compressibility"])
    scored = ScoredSamples(scores, np.array([0, 0]), reward.weights)
    np.testing.assert_array_equal(scored.total, scores["avg"])
    mix = Mix(Mix.Settings(), Setup()).credit(scored)
    np.testing.assert_allclose(mix, [2**0.5, -(2**0.5)], rtol=1e-4)


def test_a_reward_of_weight_0_needs_no_gradient_and_cannot_be_the_only_one(tmp_path, monkeypatch):
    """Its NaN would spoil the gradient of the others, and a prompt that only it applies to has
    nothing to learn from."""
    (tmp_path / "pixels.py").write_text(
        "class Mean:\n"
        "    def __call__(self, images, prompts, metadata): return [1.0] * len(images)\n"
        "    def score_pixels(self, pixels, prompts): return pixels.mean((1, 2, 3))\n"
        "class Never(Mean):\n"
        "    def score_pixels(self, pixels, prompts): return pixels.mean((1, 2, 3)) / 0\n"
        "class Red(Mean):\n"
        "    def skip_reason(self, prompt, metadata):\n"
        "        return None if 'red' in prompt else 'not red'\n"
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
    with raises_user_error("'red'", field="prompt 2", value="a blue cat"):
        reward.check(["a red cat", "a blue cat"])


def test_a_score_whose_variance_would_overflow_fails_with_a_hint(tmp_path, monkeypatch):
    """Otherwise the loss is not finite and the user is told to lower the learning rate."""
    body = "def score(images, prompts, metadata):\n    return [1e308, 1.0]"
    reward = build_custom_reward(tmp_path, monkeypatch, body)
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
    with raises_user_error("did you mean value?", field="reward_options.constant.valu"):
        build_reward({"constant": 1.0}, custom=custom, options={"constant": {"valu": 3.0}})


@pytest.mark.parametrize(
    ("reward", "option", "value", "rule"),
    [
        ("ocr", "workers", "two", "must be an integer or None"),
        ("ocr", "workers", True, "must be an integer or None"),
        ("ocr", "timeout", float("nan"), "must be a finite number"),
        ("ocr", "timeout", None, "must be a finite number"),
        ("pickscore", "model", Path("folder"), "must be a string"),
        ("pickscore", "offload", [], "must be True or False or a string"),
        ("math_answer", "untagged", "no", "must be True or False"),
        ("editscore", "api_key_env", -1, "must be a string"),
    ],
)
def test_an_option_of_the_wrong_type_is_rejected(reward, option, value, rule):
    with raises_user_error(rule, field=f"reward_options.{reward}.{option}"):
        build_reward({reward: 1.0}, options={reward: {option: value}})


def test_an_integer_is_accepted_as_a_number_and_none_where_it_is_the_default():
    close_scorers(build_reward({"ocr": 1.0}, options={"ocr": {"timeout": 5, "workers": None}}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return undefined", "NameError: name 'undefined'"),
        ("return 1.0", "scores of shape () for 2 images"),
        ("return [1.0]", "scores of shape (1,) for 2 images"),
        ("return ['high', 1.0]", "'high'"),
        ("return [[1.0], [2.0]]", "scores of shape (2, 1) for 2 images"),
        ("return [1.0, 2.0], {'x': [1.0]}", "'x' of shape (1,) for 2 images"),
        ("return [1.0, 2.0], {'std': [1.0, 2.0]}", "'std'"),
    ],
)
def test_a_scorer_that_breaks_the_contract_fails_with_a_reason(
    tmp_path, monkeypatch, body, message
):
    body = f"def score(images, prompts, metadata): {body}"
    reward = build_custom_reward(tmp_path, monkeypatch, body)
    scores = reward([BLANK, NOISE], ["a", "b"])
    assert np.isnan(scores["mine"]).all()
    assert np.isnan(scores["avg"]).all()
    assert not np.isnan(scores["jpeg_compressibility"]).any()
    assert message in reward.last_errors["mine"]


def test_further_values_are_returned_with_the_scores(tmp_path, monkeypatch):
    body = "def score(images, prompts, metadata): return [1, 2], {'sharp': [0.5, None]}"
    scores = build_custom_reward(tmp_path, monkeypatch, body)([BLANK, NOISE], ["a", "b"])
    assert scores["mine"].tolist() == [1, 2]
    np.testing.assert_array_equal(scores["mine/sharp"], [0.5, np.nan])
    assert not np.isnan(scores["avg"]).any()


def test_a_scorer_may_be_async(tmp_path, monkeypatch):
    """It always runs on the same event loop, which HTTP clients need."""
    reward = build_custom_reward(
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


def test_rewards_run_concurrently(tmp_path, monkeypatch):
    """Each waits until the other has started, so a sequential run would time out."""
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


def test_a_class_with_variadic_options_receives_them(tmp_path, monkeypatch):
    (tmp_path / "any_options.py").write_text(
        "class Scorer:\n"
        "    def __init__(self, **options): self.options = options\n"
        "    def __call__(self, images, prompts, metadata): return [0.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    custom = {"mine": "any_options:Scorer"}
    reward = build_reward({"mine": 1.0}, custom=custom, options={"mine": {"depth": 3}})
    assert reward.scorers["mine"].options == {"depth": 3}


def test_a_class_with_a_device_parameter_receives_the_device(tmp_path, monkeypatch):
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
    ("weights", "kwargs", "shown"),
    [
        ({}, {}, ["reward_fn", "empty"]),
        ({"jpg": 1.0}, {}, ["'jpg'", "jpeg_compressibility"]),
        ({"mine": 1.0}, {"custom": {"mine": "no_such_module:f"}}, ["'no_such_module:f'"]),
        ({"mine": 1.0}, {"custom": {"mine": "math:no_such_name"}}, ["'math:no_such_name'"]),
        ({"mine": 1.0}, {"custom": {"mine": "math.sqrt"}}, ["'math.sqrt'", "module:function"]),
        (JPEG, {"options": {"jpeg_compressibility": {"q": 1}}}, ["{'q': 1}", "function"]),
        ({"mine": 1.0}, {"custom": {"mine": "math:pi"}}, ["custom_rewards.mine", "float"]),
        ({"mine": 1.0}, {"custom": {"mine": 3}}, ["custom_rewards.mine=3"]),
        ({"jpeg_compressibility": "x"}, {}, ["reward_fn.jpeg_compressibility='x'", "number"]),
        ({"jpeg_compressibility": -1e7}, {}, ["reward_fn.jpeg_compressibility=-1", "1000000"]),
        (JPEG, {"options": {"ocrr": {}}}, ["'ocrr'", "did you mean ocr?"]),
        ({"avg": 1.0}, {"custom": {"avg": "math:sqrt"}}, ["'avg'", "reserved"]),
        ({"diversity": 1.0}, {"custom": {"diversity": "math:sqrt"}}, ["'diversity'", "reserved"]),
    ],
)
def test_invalid_arguments_are_reported(weights, kwargs, shown):
    with raises_user_error(*shown):
        build_reward(weights, **kwargs)


def test_hooks_under_their_old_names_still_work():
    """In plain classes, which are wrapped, and in subclasses of `Scorer`."""

    class Wrapped:
        has_policy = True
        trouble = "no license"

        def __call__(self, images, prompts, metadata):
            return [0.0] * len(images)

        def why_not(self, prompt, metadata):
            return f"not {prompt}"

        def rest(self):
            return "released"

    class Derived(Scorer):
        has_policy, trouble = Wrapped.has_policy, Wrapped.trouble
        why_not, rest = Wrapped.why_not, Wrapped.rest

    for scorer in (as_scorer(Wrapped()), as_scorer(Derived())):
        assert scorer.skip_reason("a cat", {}) == "not a cat"
        assert scorer.release_memory() == "released"
        assert scorer.handles_retries is True
        assert scorer.unavailable_reason == "no license"
    assert all(hasattr(Scorer, hook) for hook in OLD_HOOKS)


def test_old_hooks_work_on_instances_in_super_calls_and_in_mixins():
    class Mixin:
        def rest(self):
            return "released"

    class Derived(Mixin, Scorer):
        def __init__(self):
            self.trouble, self.has_policy = "down", True

        def why_not(self, prompt, metadata):
            return super().why_not(prompt, metadata) or "never"

    scorer = Derived()
    assert (scorer.unavailable_reason, scorer.handles_retries) == ("down", True)
    assert scorer.skip_reason("a cat", {}) == "never"
    assert scorer.release_memory() == "released"
    assert (Scorer().unavailable_reason, Scorer().handles_retries) == ("", False)


def test_paths_of_renamed_modules_still_resolve():
    """A run directory from before the rename has them in its config."""

    def local_reward(images, prompts, metadata):
        return [0.0] * len(images)

    assert import_path(local_reward, "mine") == "flow_grpo.rewards.custom:mine"
    assert import_scorer("mine", "flow_grpo.rewards.given:mine") is local_reward
    assert import_scorer("math", "flow_grpo.rewards.answers:MathAnswer") is MathAnswer
    old_path = "flow_grpo.rewards.answers.reward_model:RewardModel"
    assert import_scorer("reward_model", old_path) is RewardModel


def test_different_numbers_of_images_and_prompts_are_rejected():
    with pytest.raises(ValueError, match="2 images, 1 prompts and 1 metadata"):
        build_reward(JPEG)([BLANK, NOISE], ["a"])


def test_an_image_with_a_nan_pixel_has_no_score():
    images = torch.rand(3, 3, 8, 8)
    images[1, 2, 4, 4] = torch.nan
    scores = build_reward({"jpeg_compressibility": 1.0}).submit(images, ["a"] * 3).result()
    assert np.isnan(scores["avg"]).tolist() == [False, True, False]
