"""The aesthetic reward on a small CLIP, with small heads under published and other names."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_clip import (
    DIM,
    IMAGES,
    clip_folder,  # noqa: F401 (a fixture)
    close,
    reference_embeddings,  # noqa: F401 (a fixture)
    scores_of,
)
from torch import nn
from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel
from user_errors import raises_user_error

from flow_grpo.rewards.scorers.aesthetic_siglip import AestheticV25
from flow_grpo.rewards.scorers.clip import Aesthetic

HEAD_WIDTHS = [DIM, 12, 8, 6, 4, 1]
# Published names, in which dropout layers are counted, and names whose order is not alphabetic.
HEAD_NUMBERS = {"head.pth": [0, 2, 4, 6, 7], "head.safetensors": [0, 3, 6, 9, 12]}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    target = tmp_path_factory.mktemp("heads")
    torch.manual_seed(2)
    layers = [(torch.randn(o, i), torch.randn(o)) for i, o in pairwise(HEAD_WIDTHS)]
    for name, numbers in HEAD_NUMBERS.items():
        state = {}
        # Reversed, because the order in the file should not matter.
        for number, (weight, bias) in reversed(list(zip(numbers, layers, strict=True))):
            state |= {f"layers.{number}.weight": weight, f"layers.{number}.bias": bias}
        (torch.save if name.endswith("pth") else save_file)(state, target / name)
    single = nn.Linear(DIM, 1)
    torch.save(single.state_dict(), target / "single.pth")
    torch.save(nn.Linear(DIM + 1, 1).state_dict(), target / "wide.pth")
    torch.save(nn.Linear(DIM, 2).state_dict(), target / "two.pth")
    torch.save({}, target / "empty.pth")
    return SimpleNamespace(folder=target, layers=layers, single=single)


@pytest.mark.parametrize("name", HEAD_NUMBERS)
def test_aesthetic_is_the_head_on_the_normalised_embedding(folder, plain, heads, name):
    value = plain.images / plain.images.norm(dim=-1, keepdim=True)
    for weight, bias in heads.layers:
        value = value @ weight.T + bias
    scorer = Aesthetic(model=str(folder), head=str(heads.folder / name), batch_size=2)
    assert scores_of(scorer) == close(value[:, 0].tolist(), 1e-3)
    assert value.std() > 0.5


def test_aesthetic_accepts_a_single_layer_and_ignores_the_prompt(folder, plain, heads):
    scorer = Aesthetic(model=str(folder), head=str(heads.folder / "single.pth"))
    expected = heads.single(plain.images)[:, 0].tolist()
    assert scores_of(scorer) == close(expected)
    assert scores_of(scorer, prompts=["other"] * len(IMAGES)) == close(expected)


def test_the_aesthetic_head_stays_in_float32(folder, plain, heads):
    scorer = Aesthetic(model=str(folder), head=str(heads.folder / "single.pth"), dtype="bfloat16")
    assert {p.dtype for p in scorer.network.clip.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in scorer.network.head.parameters()} == {torch.float32}
    assert scores_of(scorer) == close(heads.single(plain.images)[:, 0].tolist(), 0.05)


@pytest.mark.parametrize(
    ("name", "reason"), [("wide.pth", "17"), ("two.pth", "output"), ("empty.pth", "output")]
)
def test_a_head_of_the_wrong_shape_is_rejected(folder, heads, name, reason):
    head = str(heads.folder / name)
    with raises_user_error("aesthetic head", reason, field="head", value=head):
        Aesthetic(model=str(folder), head=head)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    """Return the options of a small Aesthetic Predictor V2.5, and the scores of its formula."""
    target = tmp_path_factory.mktemp("siglip")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    config = SiglipConfig(
        text_config={**sizes, "vocab_size": 20},
        vision_config={**sizes, "image_size": 28, "patch_size": 14},
    )
    torch.manual_seed(0)
    model = SiglipModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(target)
    SiglipImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(target)
    widths = [32, 12, 8, 6, 4, 1]
    layers = [(torch.randn(o, i), torch.randn(o)) for i, o in pairwise(widths)]
    state = {}
    for number, (weight, bias) in zip((0, 2, 4, 6, 8), layers, strict=True):
        state |= {f"scoring_head.{number}.weight": weight, f"scoring_head.{number}.bias": bias}
    torch.save(state, target / "aesthetic_predictor_v2_5.pth")
    scores = []
    for image in IMAGES:
        resized = image.convert("RGB").resize((28, 28), Image.BICUBIC)
        pixels = torch.tensor((np.asarray(resized) / 255 - 0.5) / 0.5).float().permute(2, 0, 1)
        value = model.vision_model(pixel_values=pixels[None]).pooler_output[0]
        value = value / value.norm()
        for weight, bias in layers:
            value = weight @ value + bias
        scores.append(value.item())
    assert np.std(scores) > 0.5
    return {"model": str(target), "head": str(target)}, scores


@pytest.mark.parametrize("batch_size", [1, 16])
def test_aesthetic_v25_is_the_head_on_the_normalised_siglip_embedding(siglip, batch_size):
    options, expected = siglip
    scorer = AestheticV25(**options, batch_size=batch_size)
    assert scores_of(scorer) == close(expected, 1e-4)
    assert scores_of(scorer, prompts=["other"] * len(IMAGES)) == close(expected, 1e-4)


def test_aesthetic_v25_rejects_a_missing_or_other_head_or_model(siglip, heads, folder):
    options, _ = siglip
    with raises_user_error("aesthetic_predictor_v2_5.pth", "head=PATH", field="head", value=""):
        AestheticV25(model=options["model"])
    with raises_user_error(field="head"):
        AestheticV25(model=options["model"], head=str(heads.folder / "head.pth"))
    with raises_user_error("clip", "SigLIP", field="model"):
        AestheticV25(**{**options, "model": str(folder)})
