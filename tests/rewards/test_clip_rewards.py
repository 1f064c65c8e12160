"""PickScore and CLIPScore on a small CLIP against plain transformers, and errors from loading."""

import contextlib
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_clip import (
    IMAGES,
    METADATA,
    PROMPTS,
    SCALE,
    clip_folder,  # noqa: F401 (a fixture)
    close,
    reference_embeddings,  # noqa: F401 (a fixture)
    scores_of,
    write_processor,
)
from transformers import BertConfig, BertModel, CLIPModel
from user_errors import raises_user_error

from flow_grpo.errors import UserError
from flow_grpo.hub_access import hub_error_message
from flow_grpo.rewards import build_reward, build_scorers
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.protocol import score
from flow_grpo.rewards.scorers.clip import Aesthetic, ClipScore, HpsV2, PickScore


@pytest.mark.parametrize("kind", [PickScore, ClipScore])
def test_scores_of_pixels_match_those_of_images_and_have_a_gradient(kind, folder):
    """Torch resizes as PIL does, except for rounding to bytes."""
    scorer = kind(model=str(folder), processor=str(folder))
    for image, prompt in zip(IMAGES[:3], PROMPTS, strict=False):
        pixels = torch.tensor(np.array(image.convert("RGB"))).permute(2, 0, 1)[None] / 255
        [expected], _ = scorer([image], [prompt], [{}])
        found = scorer.score_pixels(pixels.requires_grad_(), [prompt])
        assert found.item() == pytest.approx(expected, abs=0.02)
        [gradient] = torch.autograd.grad(found.sum(), pixels)
        assert gradient.abs().max() > 1e-4


def test_pickscore_is_the_logit_over_26(folder, plain):
    scores, extra = PickScore(model=str(folder), processor=str(folder))(IMAGES, PROMPTS, METADATA)
    assert scores == close([SCALE * c / 26 for c in plain.cosine])
    assert extra == {"raw": close([SCALE * c for c in plain.cosine], 1e-4)}
    assert {type(s) for s in scores} == {float}


def test_clip_score_is_the_logit_over_30(folder, plain):
    scores, extra = ClipScore(model=str(folder))(IMAGES, PROMPTS, METADATA)
    assert scores == close([SCALE * c / 30 for c in plain.cosine])
    assert extra == {"cosine": close(plain.cosine)}


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_the_batch_size_does_not_change_the_scores(folder, plain, batch_size):
    scorer = ClipScore(model=str(folder), batch_size=batch_size)
    scores, extra = scorer(IMAGES, PROMPTS, METADATA)
    assert scores == close([SCALE * c / 30 for c in plain.cosine])
    assert extra["cosine"] == close(plain.cosine)
    assert scores_of(scorer, IMAGES[::-1], PROMPTS[::-1]) == close(scores[::-1])


def test_an_empty_batch_has_no_scores(folder):
    assert ClipScore(model=str(folder))([], [], []) == []


def test_half_precision_keeps_the_scale_and_roughly_the_scores(folder, plain):
    scorer = ClipScore(model=str(folder), dtype="bfloat16")
    assert {p.dtype for p in scorer.network.parameters()} == {torch.bfloat16}
    assert scorer.logit_scale == pytest.approx(SCALE, rel=1e-6)
    _, extra = scorer(IMAGES, PROMPTS, METADATA)
    assert extra["cosine"] == close(plain.cosine, 0.05)
    assert extra["cosine"] != close(plain.cosine)


def test_the_network_is_frozen(folder):
    scorer = ClipScore(model=str(folder))
    assert not any(p.requires_grad for p in scorer.network.parameters())
    assert not scorer.network.training


def test_an_offloaded_network_is_moved_to_the_device_only_for_scoring(folder, monkeypatch):
    moves = []
    monkeypatch.setattr(CLIPModel, "to", lambda self, target: moves.append(target) or self)
    scorer = ClipScore(model=str(folder), offload=True, device="cpu")
    assert moves == [torch.float32]
    scores_of(scorer)
    scorer.device = "the GPU"  # set after scoring, because there is none here
    scorer.release_memory()
    assert moves[1:] == ["cpu", "cpu"]
    moves.clear()
    stays = ClipScore(model=str(folder), device="cpu")
    assert moves == [torch.float32, "cpu"]
    stays.release_memory()
    assert len(moves) == 2


def test_networks_by_turns_are_on_the_device_one_at_a_time(folder, monkeypatch):
    """Each call waits for a concurrent one, which must not occur."""
    options = {"model": str(folder), "offload": "turns"}
    scorers = [ClipScore(**options), ClipScore(**options)]
    together, moves = threading.Barrier(2), []

    def slow(self, images, prompts):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.3)
            moves.append("together")
        together.reset()
        return {"score": torch.ones(len(images))}

    monkeypatch.setattr(ClipScore, "score_batch", slow)
    monkeypatch.setattr(ClipScore, "release_memory", lambda self: moves.append("released"))
    image = Image.new("RGB", (8, 8))
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(score, each, [image], ["a"], [{}]) for each in scorers]
    assert [call.result().values for call in calls] == [[1.0], [1.0]]
    assert moves == ["released"] * 2
    with raises_user_error("'turns'", field="offload", value="always"):
        ClipScore(model=str(folder), offload="always")


def test_a_network_that_overflows_fails_with_a_reason(folder):
    scorer = ClipScore(model=str(folder), dtype="bfloat16")
    scorer.network.visual_projection.weight[:] = torch.nan
    scores = scores_of(scorer)
    assert all(isinstance(s, Failed) and math.isnan(s) for s in scores)
    assert all(word in scores[0].reason for word in ("nan", "bfloat16", "float32"))


def test_build_reward_passes_the_options_on(folder, plain):
    reward = build_reward(
        {"mine": 1.0},
        custom={"mine": "flow_grpo.rewards.scorers.clip:ClipScore"},
        options={"mine": {"model": str(folder), "batch_size": 2}},
    )
    scores = np.asarray(reward(IMAGES, PROMPTS)["mine"])
    assert scores.tolist() == close([SCALE * c / 30 for c in plain.cosine])


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("dtype", "fp16", "float32, bfloat16, float16"),
        ("dtype", ["float32"], "float32, bfloat16, float16"),
        ("batch_size", 0, "integer"),
        ("batch_size", 2.5, "integer"),
        ("device", "gpu", "cuda:0"),
    ],
)
def test_invalid_options_are_rejected(folder, option, value, rule):
    with raises_user_error(rule, field=option, value=value):
        ClipScore(model=str(folder), **{option: value})


def test_a_missing_gpu_is_reported(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises_user_error("no GPU", "device=cpu", field="device", value="cuda:0"):
        ClipScore(model=str(folder), device="cuda:0")


def test_a_folder_without_a_model_is_rejected(tmp_path):
    with raises_user_error("CLIP", field="model", value=str(tmp_path)):
        ClipScore(model=str(tmp_path))
    with raises_user_error("HPS_v2.1_compressed.pt", field="model", value=str(tmp_path)):
        HpsV2(model=str(tmp_path))


def test_another_kind_of_model_is_rejected(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    BertModel(BertConfig(num_attention_heads=1, **sizes)).save_pretrained(tmp_path)
    with raises_user_error("bert", "CLIP", field="model", value=str(tmp_path)):
        ClipScore(model=str(tmp_path))


def test_a_missing_weight_is_reported_and_not_initialized(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    state = CLIPModel.from_pretrained(folder).state_dict()
    del state["visual_projection.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with raises_user_error(f"model={str(tmp_path)!r}", "visual_projection.weight"):
        ClipScore(model=str(tmp_path))


def test_a_missing_or_foreign_tokenizer_is_rejected(folder, tmp_path):
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(folder / name, tmp_path)
    with raises_user_error("tokenizer", field="processor", value=str(tmp_path)):
        PickScore(model=str(folder), processor=str(tmp_path))


def test_a_missing_image_processor_is_reported(folder, tmp_path):
    write_processor(tmp_path / "p")
    shutil.copy(folder / "config.json", tmp_path / "p")
    (tmp_path / "p/preprocessor_config.json").unlink()
    with raises_user_error("image processor", field="processor", value=str(tmp_path / "p")):
        PickScore(model=str(folder), processor=str(tmp_path / "p"))


@pytest.mark.parametrize(
    ("build", "option"),
    [
        (lambda folder: PickScore(), "model"),
        (lambda folder: PickScore(model=str(folder)), "processor"),
        (lambda folder: HpsV2(), "model"),
        (lambda folder: Aesthetic(model=str(folder)), "head"),
    ],
)
def test_without_a_network_the_hint_is_to_give_a_local_copy(folder, monkeypatch, build, option):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with raises_user_error(field=option) as caught:
        build(folder)
    assert caught.value.hint.endswith(f"pass the path of a copy as {option}")


def test_the_hint_names_the_field_of_the_config(monkeypatch):
    """Also in errors of hub access, whose rule contains the hint."""
    hint = "pass --config.reward_options=\"{{'pickscore': {{'model': '{}'}}}}\" (--options of a"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with raises_user_error(hint.format("PATH"), field="model"):
        build_scorers(["pickscore"])
    unreachable = hub_error_message(ConnectionError("no route"), "model", "a/PickScore_v1")
    monkeypatch.setattr(PickScore, "load", Mock(side_effect=UserError(unreachable)))
    with raises_user_error("a/PickScore_v1", hint.format("PickScore_v1")):
        build_scorers(["pickscore"])
