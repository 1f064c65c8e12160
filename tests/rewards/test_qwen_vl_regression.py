"""HPSv3, VideoAlign and EditReward follow the authors' formulas on small checkpoints."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from malicious_files import write_malicious_pickle
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import save_file
from small_clip import random_image
from small_qwen_rewards import (
    WIDTH,
    build_head,
    build_model,
    hidden_states,
    image_patches,
    message,
    mlp,
    old_layout,
    prefixed,
    save_weights,
    template,
    token_ids,
    video_patches,
    write_processor,
)
from user_errors import raises_user_error

from flow_grpo.errors import UserError
from flow_grpo.rewards import qwen_vl_visuals
from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.frames import Video
from flow_grpo.rewards.qwen_vl_regression import TEMPLATES
from flow_grpo.rewards.qwen_vl_visuals import Patcher
from flow_grpo.rewards.scorers import hpsv3, videoalign
from flow_grpo.rewards.scorers.editreward import EditReward
from flow_grpo.rewards.scorers.hpsv3 import HpsV3
from flow_grpo.rewards.scorers.videoalign import VideoAlign, sampled_frames

REWARD = ("<|Reward|>",)
DIMENSIONS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
PROMPTS = ["a cat", "two red dogs on {a} cat", ""]
IMAGES = [
    random_image(70, 40),
    Image.new("RGBA", (33, 47), "orange"),
    random_image(600, 800, seed=2),
]
SIZES = [(616, 364), (392, 560), (364, 504)]  # about 200,704 pixels, in multiples of 28
SOURCES = [random_image(50, 50, seed=3), random_image(64, 32, seed=4), random_image(9, 9, seed=5)]
SOURCE_SIZES = [(448, 448), (644, 336), (448, 448)]
ROWS = [{"source": source} for source in SOURCES]
# SHA-256 of the authors' templates, with trailing spaces
TEMPLATE_HASHES = {
    "hpsv3": "f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c",
    "videoalign": "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700",
    "editreward_following": "b8c53a0a3b67db1cf63ad891679be423fbe01a06fa63cefe4851f747f8d82da2",
    "editreward_quality": "4583db70a7aba6038d80220b94bafc33755ece3389f3c1d3c24dd3ed847d9289",
}


def close(values, tolerance=1e-5):
    return pytest.approx(values, abs=tolerance)


def video(frames, fps, seed, size=(90, 60)):
    """Return a video whose frames differ."""
    still = np.asarray(random_image(*size, seed=seed))
    return Video([Image.fromarray(np.roll(still, 5 * i, axis=1)) for i in range(frames)], fps=fps)


VIDEOS = [video(9, 16.0, 1), video(4, 8.0, 2), video(33, 8.0, 3)]
CHOSEN = [[0, 3, 5, 8], [0, 1, 2, 3], [0, 5, 9, 14, 18, 23, 27, 32]]  # 2 per second, 4 at least
FRAME_SIZE = (392, 280)  # of 90 x 60: at least 128 tokens


@pytest.fixture(scope="module")
def hps(tmp_path_factory):
    """Return the options of a small HPSv3, and its scores and deviations."""
    folder = tmp_path_factory.mktemp("hpsv3")
    model, head = build_model("qwen2_vl", 1), build_head()
    weights = {**model.state_dict(), **prefixed("rm_head", head)}
    options = {
        "model": save_weights(folder / "model", "HPSv3.safetensors", weights),
        "processor": write_processor(folder / "base", "qwen2_vl"),
        "dtype": "float32",
    }
    outputs = []
    for image, size, prompt in zip(IMAGES, SIZES, PROMPTS, strict=True):
        visual = image_patches(image, size)
        text = message("image", [size[0] * size[1] // 784], template("hpsv3", prompt))
        ids = token_ids(text, REWARD)
        state = hidden_states(model, ids, [visual])[ids[0] == ids.max()]
        outputs.append(mlp(head, state[0]).tolist())
    scores, logs = map(list, zip(*outputs, strict=True))
    assert np.std(scores) > 0.01
    return options, scores, np.exp(logs).tolist()


@pytest.fixture(scope="module")
def edit(tmp_path_factory):
    """Return the options of a small EditReward, and its scores by criterion."""
    folder = tmp_path_factory.mktemp("editreward")
    model, heads = build_model("qwen2_5_vl", 1), [build_head(seed=1), build_head(seed=2)]
    weights = {**old_layout(model.state_dict())}
    for i, head in enumerate(heads):
        weights |= prefixed(f"rm_heads.head_{i}", head)
    options = {
        "model": save_weights(folder / "model", "model.safetensors", weights),
        "processor": write_processor(folder / "base", "qwen2_5_vl"),
        "dtype": "float32",
    }
    scores = {"following": [], "quality": []}
    for i, prompt in enumerate(PROMPTS):
        sizes = SOURCE_SIZES[i], SIZES[i]
        images = zip((SOURCES[i], IMAGES[i]), sizes, strict=True)
        visuals = [image_patches(image, size) for image, size in images]
        counts = [size[0] * size[1] // 784 for size in sizes]
        for (name, values), head in zip(scores.items(), heads, strict=True):
            ids = token_ids(
                message("image", counts, template(f"editreward_{name}", prompt)), REWARD
            )
            state = hidden_states(model, ids, visuals)[ids[0] == ids.max()]
            values.append(mlp(head, state[0])[0].item())
    return options, scores


@pytest.fixture(scope="module", params=[3, 1])
def align(tmp_path_factory, request):
    """Return the options of a small VideoReward with an unmerged LoRA, and its scores."""
    folder = tmp_path_factory.mktemp("videoalign")
    model = build_model("qwen2_vl", 3)
    targets = r".*language_model.*(q_proj|v_proj|o_proj|down_proj)"
    tuned = get_peft_model(model, LoraConfig(r=8, lora_alpha=128, target_modules=targets)).eval()
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    head = 0.5 * torch.randn(request.param, WIDTH)
    weights = old_layout(tuned.state_dict())
    weights["base_model.model.rm_head.weight"] = head
    checkpoint = folder / "checkpoint-11352"
    checkpoint.mkdir()
    torch.save(weights, checkpoint / "model.pth")
    options = {
        "model": str(folder),
        "processor": write_processor(folder / "base", "qwen2_vl"),
        "dtype": "float32",
    }
    scores = []
    for sample, chosen, prompt in zip(VIDEOS, CHOSEN, PROMPTS, strict=True):
        visual = video_patches([sample[i] for i in chosen], FRAME_SIZE)
        count = len(chosen) // 2 * (FRAME_SIZE[0] * FRAME_SIZE[1] // 784)
        ids = token_ids(message("video", [count], template("videoalign", prompt)), DIMENSIONS)
        states = hidden_states(tuned.base_model.model, ids, [visual])
        vq, mq, ta = (states[(ids[0] == ids.max() - i).nonzero().item()] for i in (2, 1, 0))
        scores.append(
            [
                ((head[0] @ vq).item() - 3.6757) / 2.2476,
                ((head[-2 % len(head)] @ mq).item() - 1.1646) / 1.3811,
                ((head[-1] @ ta).item() - 2.8105) / 2.5121,
            ]
        )
    return options, np.array(scores)


@pytest.mark.parametrize("name", TEMPLATE_HASHES)
def test_the_templates_are_those_of_the_authors(name):
    content = (TEMPLATES / f"{name}.txt").read_bytes()
    assert hashlib.sha256(content).hexdigest() == TEMPLATE_HASHES[name]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_hpsv3_is_the_mean_of_the_published_head(hps, batch_size):
    options, expected, sigmas = hps
    scores, extra = HpsV3(**options, batch_size=batch_size)(IMAGES, PROMPTS, [{}] * 3)
    assert scores == close(expected)
    assert extra == {"sigma": close(sigmas)}


@pytest.mark.parametrize("batch_size", [1, 16])
def test_editreward_is_the_mean_of_two_heads(edit, batch_size):
    options, expected = edit
    scores, extra = EditReward(**options, batch_size=batch_size)(IMAGES, PROMPTS, ROWS)
    assert extra == {name: close(values) for name, values in expected.items()}
    assert scores == close(np.mean([*expected.values()], axis=0))
    assert np.ptp(extra["following"]) > 1e-3


@pytest.mark.parametrize("batch_size", [1, 16])
def test_videoalign_is_the_sum_of_three_z_scores(align, batch_size):
    options, expected = align
    scores, extra = VideoAlign(**options, batch_size=batch_size)(VIDEOS, PROMPTS, [{}] * 3)
    assert [*extra] == ["vq", "mq", "ta"]
    for column, values in zip(expected.T, extra.values(), strict=True):
        assert values == close(column)
    assert scores == close(expected.sum(axis=1), 3e-5)


def test_videoalign_scores_one_dimension(align):
    options, expected = align
    scores, _ = VideoAlign(**options, score="mq")(VIDEOS[:1], PROMPTS[:1], [{}])
    assert scores == close(expected[:1, 1])
    with raises_user_error("overall, vq, mq, ta", field="score", value="quality"):
        VideoAlign(**options, score="quality")


def test_the_frame_rate_of_a_video_without_one_is_an_option(align):
    options, expected = align
    plain = [list(VIDEOS[2])]
    assert VideoAlign(**options, fps=8)(plain, PROMPTS[2:], [{}])[0] == close(
        [expected[2].sum()], 3e-5
    )
    assert VideoAlign(**options)(plain, PROMPTS[2:], [{}])[0] != close([expected[2].sum()], 1e-4)
    for value in (0, -1, "8", float("nan")):
        with raises_user_error("positive", field="fps"):
            VideoAlign(**options, fps=value)


def test_visual_and_motion_quality_do_not_depend_on_the_prompt(align):
    options, _ = align
    videos = [VIDEOS[0]] * 2
    _, extra = VideoAlign(**options)(videos, ["a cat", "two dogs that run"], [{}] * 2)
    for name in ("vq", "mq"):
        assert extra[name][0] == close(extra[name][1], 1e-6)
    assert extra["ta"][0] != close(extra["ta"][1], 1e-3)


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (hpsv3, "TOKENS", 240),
        (qwen_vl_visuals, "IMAGE_MEAN", (0.5, 0.5, 0.5)),
        (qwen_vl_visuals, "IMAGE_STD", (0.27, 0.26, 0.27)),
    ],
)
def test_a_wrong_image_constant_changes_the_scores(hps, monkeypatch, module, name, wrong):
    options, expected, _ = hps
    monkeypatch.setattr(module, name, wrong)
    scores, _ = HpsV3(**options)(IMAGES[:1], PROMPTS[:1], [{}])
    assert scores != close(expected[:1], 5e-5)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("FPS", 3.0), ("MIN_FRAMES", 6), ("MIN_TOKENS", 100), ("LORA_ALPHA", 64)],
)
def test_a_wrong_video_constant_changes_the_scores(align, monkeypatch, name, wrong):
    options, expected = align
    monkeypatch.setattr(videoalign, name, wrong)
    which = 2 if name == "FPS" else 0
    scores, _ = VideoAlign(**options)([VIDEOS[which]], [PROMPTS[which]], [{}])
    assert scores != close([expected[which].sum()], 1e-4)


def test_an_edit_depends_on_its_source_and_instruction(edit):
    options, expected = edit
    scorer = EditReward(**options)
    mean = np.mean([*expected.values()], axis=0)[:1]
    assert scorer(IMAGES[:1], ["a dog"], ROWS[:1])[0] != close(mean, 1e-4)
    assert scorer(IMAGES[:1], PROMPTS[:1], ROWS[1:2])[0] != close(mean, 1e-4)
    assert scorer(IMAGES[:1], PROMPTS[:1], [{"source": SOURCES[:1]}])[0] == close(mean)


def test_frames_are_resized_to_the_published_numbers_of_pixels():
    patcher = Patcher()
    assert [patcher.resized(*image.size, 256, 256) for image in IMAGES] == SIZES
    assert patcher.resized(832, 480, 128, 256) == (588, 336)
    assert patcher.resized(400, 400, 128, 256) == (392, 392)  # neither limit applies
    assert patcher.resized(90, 60, 128, 256) == FRAME_SIZE
    assert patcher.resized(10**4, 10, 1, 4) == (1764, 28)


@pytest.mark.parametrize(
    ("count", "fps", "number"),
    [(2, 16, 2), (3, 16, 2), (81, 16, 10), (17, 8, 4), (49, 8, 12), (10**4, 8, 768)],
)
def test_an_even_number_of_frames_is_sampled_evenly(count, fps, number):
    chosen = sampled_frames(count, fps)
    assert len(chosen) == number
    assert chosen[0] == 0
    assert chosen[-1] == count - 1


def test_only_the_backbone_has_the_dtype(hps):
    options, expected, _ = hps
    scorer = HpsV3(**{**options, "dtype": "bfloat16"})
    assert {p.dtype for p in scorer.network.backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in scorer.network.head.parameters()} == {torch.float32}
    assert scorer(IMAGES, PROMPTS, [{}] * 3)[0] == close(expected, 0.3)


def test_only_the_language_model_is_quantized(hps):
    options, expected, _ = hps
    scorer = HpsV3(**options, quantize="fp8")
    layer = scorer.network.backbone.language_model.layers[0].self_attn.q_proj
    assert layer.low.element_size() == 1
    assert not hasattr(scorer.network.head[0], "low")
    assert scorer(IMAGES, PROMPTS, [{}] * 3)[0] == close(expected, 1.0)


def test_samples_without_a_score_do_not_affect_the_others(align, edit):
    scorer = VideoAlign(**align[0])
    samples = [VIDEOS[0][:1], VIDEOS[0]]
    scores, extra = scorer(samples, [PROMPTS[0]] * 2, [{}] * 2)
    assert isinstance(scores[0], Failed)
    assert "2 frames" in scores[0].reason
    assert scores[1] == close(align[1][0].sum(), 3e-5)
    assert np.isnan(extra["vq"][0])

    scorer = EditReward(**edit[0])
    scores = scorer(IMAGES[:1], PROMPTS[:1], [{}])
    assert isinstance(scores[0], NotApplicable)
    assert scorer.skip_reason("", {})
    assert not scorer.skip_reason("", ROWS[0])
    assert scorer([], [], []) == []


@pytest.mark.parametrize("token", ["<|Reward|>", "<|image_pad|>"])
def test_special_tokens_in_a_prompt_are_rejected(hps, token):
    options, _, _ = hps
    scorer = HpsV3(**options)
    assert token in scorer.invalid_row(f"a {token}", {})
    assert token in scorer(IMAGES[:1], [f"a {token}"], [{}])[0].reason


def test_invalid_checkpoints_are_rejected(hps, edit, tmp_path):
    options, other = hps[0], edit[0]

    def load(content=None, name="HPSv3.safetensors", **changed):
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        return HpsV3(**{**options, "model": str(file), **changed})

    published = Path(options["model"], "HPSv3.safetensors").read_bytes()
    with raises_user_error(field="model"):  # truncated
        load(published[:-1000])
    save_file({"weight": torch.zeros(3)}, tmp_path / "HPSv3.safetensors")
    with raises_user_error("language_model.embed_tokens.weight", field="model"):
        load()
    with raises_user_error("layer of its head", field="model"):
        HpsV3(**{**options, "model": f"{other['model']}/model.safetensors"})
    with raises_user_error("visual", field="model"):  # a Qwen2-VL in the config of Qwen2.5-VL
        HpsV3(**{**options, "processor": other["processor"]})
    write_malicious_pickle(tmp_path / "model.pth", tmp_path / "ran", zipped=True)
    with raises_user_error(field="model"):
        load(name="model.pth")
    assert not (tmp_path / "ran").exists()
    failing = shutil.copytree(options["processor"], tmp_path / "failing")
    (failing / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    with raises_user_error("ZeroDivisionError", field="processor", value=str(failing)):
        HpsV3(**{**options, "processor": str(failing)})
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with raises_user_error("clip", "Qwen2-VL", field="processor", value=str(tmp_path)):
        HpsV3(**{**options, "processor": str(tmp_path)})


def test_a_lora_without_its_base_weights_is_rejected(align, tmp_path):
    file = f"{align[0]['model']}/checkpoint-11352/model.pth"
    weights = torch.load(file, weights_only=True)
    torch.save({k: v for k, v in weights.items() if "base_layer" not in k}, tmp_path / "model.pth")
    with pytest.raises(UserError, match="missing") as caught:
        VideoAlign(**{**align[0], "model": str(tmp_path)})
    assert caught.value.field == "model"
