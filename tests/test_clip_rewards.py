"""PickScore and CLIPScore on a small CLIP against plain transformers, and what loading refuses."""

import math
import shutil
from unittest.mock import Mock

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_clip import (
    IMAGES,
    METADATA,
    PROMPTS,
    SCALE,
    clip_folder,  # noqa: F401 (a fixture)
    close,
    plain_embeddings,  # noqa: F401 (a fixture)
    refusal,
    scores_of,
    write_processor,
)
from transformers import BertConfig, BertModel, CLIPModel

from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward, build_scorers
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.scorers.clip import Aesthetic, ClipScore, HpsV2, PickScore


@pytest.mark.parametrize("kind", [PickScore, ClipScore])
def test_scores_of_pixels_are_those_of_pictures_and_have_a_gradient(kind, folder):
    """Torch resizes as PIL does, but for rounding to bytes."""
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


def test_no_images_have_no_scores(folder):
    assert ClipScore(model=str(folder))([], [], []) == []


def test_half_precision_keeps_the_scale_and_nearly_the_scores(folder, plain):
    scorer = ClipScore(model=str(folder), dtype="bfloat16")
    assert {p.dtype for p in scorer.network.parameters()} == {torch.bfloat16}
    assert scorer.logit_scale == pytest.approx(SCALE, rel=1e-6)
    _, extra = scorer(IMAGES, PROMPTS, METADATA)
    assert extra["cosine"] == close(plain.cosine, 0.05)
    assert extra["cosine"] != close(plain.cosine)


def test_no_gradients_are_kept(folder):
    scorer = ClipScore(model=str(folder))
    assert not any(p.requires_grad for p in scorer.network.parameters())
    assert not scorer.network.training


def test_an_offloaded_network_comes_for_the_scores_and_leaves_after(folder, monkeypatch):
    moves = []
    monkeypatch.setattr(CLIPModel, "to", lambda self, place: moves.append(place) or self)
    scorer = ClipScore(model=str(folder), offload=True, device="cpu")
    assert moves == [torch.float32]  # to its precision only
    scores_of(scorer)
    scorer.device = "the card"  # after the scores: there is none here
    scorer.rest()
    assert moves[1:] == ["cpu", "cpu"]
    moves.clear()
    stays = ClipScore(model=str(folder), device="cpu")
    assert moves == [torch.float32, "cpu"]
    stays.rest()
    assert len(moves) == 2


def test_a_network_that_overflows_has_failed_with_a_reason(folder):
    scorer = ClipScore(model=str(folder), dtype="bfloat16")
    scorer.network.visual_projection.weight[:] = torch.nan
    scores = scores_of(scorer)
    assert all(isinstance(s, Failed) and math.isnan(s) for s in scores)
    assert (
        scores[0].reason == "the network gave nan; bfloat16 may be too narrow for it, try float32"
    )


def test_the_options_reach_it_through_build_reward(folder, plain):
    reward = build_reward(
        {"mine": 1.0},
        custom={"mine": "flow_grpo.rewards.scorers.clip:ClipScore"},
        options={"mine": {"model": str(folder), "batch_size": 2}},
    )
    scores = np.asarray(reward(IMAGES, PROMPTS)["mine"])
    assert scores.tolist() == close([SCALE * c / 30 for c in plain.cosine])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "fp16"}, "dtype='fp16' must be one of float32, bfloat16, float16"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number, 1 or more"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number, 1 or more"),
        ({"device": "gpu"}, "device='gpu' must read like cpu, cuda or cuda:0"),
    ],
)
def test_bad_options_are_named(folder, option, message):
    assert refusal(ClipScore, model=str(folder), **option) == message


def test_a_gpu_that_is_not_there_is_named(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU here" in refusal(ClipScore, model=str(folder), device="cuda:0")


def test_a_folder_without_a_model_is_named(tmp_path):
    message = refusal(ClipScore, model=str(tmp_path))
    assert message.startswith(f"model={str(tmp_path)!r} cannot be loaded as a CLIP model (")
    assert "no HPS_v2.1_compressed.pt or" in refusal(HpsV2, model=str(tmp_path))


def test_another_kind_of_model_is_named(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    BertModel(BertConfig(num_attention_heads=1, **sizes)).save_pretrained(tmp_path)
    message = refusal(ClipScore, model=str(tmp_path))
    assert message == f"model={str(tmp_path)!r} is a bert model, and must be a CLIP model"


def test_a_missing_weight_is_named_and_not_made_up(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    state = CLIPModel.from_pretrained(folder).state_dict()
    del state["visual_projection.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    message = refusal(ClipScore, model=str(tmp_path))
    assert "1 missing tensors (such as visual_projection.weight)" in message


def test_a_missing_or_foreign_tokenizer_is_named(folder, tmp_path):
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(folder / name, tmp_path)
    message = refusal(PickScore, model=str(folder), processor=str(tmp_path))
    assert message.startswith(f"processor={str(tmp_path)!r} ")
    assert "tokenizer" in message


def test_a_missing_image_processor_is_named(folder, tmp_path):
    write_processor(tmp_path / "p")
    shutil.copy(folder / "config.json", tmp_path / "p")
    (tmp_path / "p/preprocessor_config.json").unlink()
    message = refusal(PickScore, model=str(folder), processor=str(tmp_path / "p"))
    assert "cannot be loaded as an image processor (" in message


@pytest.mark.parametrize(
    ("build", "option"),
    [
        (lambda folder: PickScore(), "model"),
        (lambda folder: PickScore(model=str(folder)), "processor"),
        (lambda folder: HpsV2(), "model"),
        (lambda folder: Aesthetic(model=str(folder)), "head"),
    ],
)
def test_without_a_network_the_way_out_is_a_local_copy(folder, monkeypatch, build, option):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refusal(build, folder)
    assert message.startswith(f"{option}='")
    assert message.endswith(f"; without a network, give the path of a copy as {option}")


def test_the_way_out_is_a_field_of_the_config(monkeypatch):
    way_out = "give --config.reward_options=\"{{'pickscore': {{'model': '{}'}}}}\" (--options of a"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as told:
        build_scorers(["pickscore"])
    assert way_out.format("PATH") in str(told.value)
    unreachable = "model='a/b' is not in the cache; fetch it and give model=PickScore_v1"
    monkeypatch.setattr(PickScore, "load", Mock(side_effect=UserError(unreachable)))
    with pytest.raises(UserError) as told:
        build_scorers(["pickscore"])
    assert way_out.format("PickScore_v1") in str(told.value)
