"""HPSv2 on a small checkpoint with open_clip's names and layout, implemented here in torch."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_clip import (
    DIM,
    IMAGES,
    LENGTH,
    PROMPTS,
    SCALE,
    SIZE,
    clip_folder,  # noqa: F401 (a fixture)
    close,
    randomize_weights,
    reference_embeddings,  # noqa: F401 (a fixture)
    reference_preprocess,
    scores_of,
)
from torch import nn
from transformers import AutoTokenizer
from user_errors import raises_user_error

from flow_grpo.rewards.scorers.clip import HpsV2


class OpenClipBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 2 * width))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(2 * width, width))

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.resblocks = nn.ModuleList(OpenClipBlock(width, heads=2) for _ in range(2))

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class OpenClipVision(nn.Module):
    def __init__(self, width=32, patch=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(torch.randn((SIZE // patch) ** 2 + 1, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Tower(width)
        self.proj = nn.Parameter(torch.randn(width, DIM))

    def forward(self, pixels):
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        start = self.class_embedding.expand(len(pixels), 1, -1)
        x = torch.cat([start, patches], dim=1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """A CLIP with open_clip's layout and names, like the published HPSv2."""

    def __init__(self, vocabulary, width=24):
        super().__init__()
        self.visual = OpenClipVision()
        self.transformer = Tower(width)
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.positional_embedding = nn.Parameter(torch.randn(LENGTH, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, DIM))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(SCALE)))

    def encode_text(self, tokens):
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)
        x = self.ln_final(self.transformer(x, mask))
        return x[range(len(x)), tokens.argmax(dim=-1)] @ self.text_projection


@pytest.fixture(scope="module")
def hps(folder, tmp_path_factory):
    """Write small checkpoints of both versions; return their folder and the scores of the first."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = tmp_path_factory.mktemp("hps")
    torch.manual_seed(1)
    model = OpenClip(len(tokenizer)).eval()
    randomize_weights(model)
    torch.save({"state_dict": model.state_dict()}, target / "HPS_v2.1_compressed.pt")
    other = {
        name: value.flip(0).contiguous() for name, value in model.state_dict().items() if value.ndim
    }
    other["logit_scale"] = model.logit_scale.data
    save_file(other, target / "HPS_v2_compressed.safetensors")
    cosines = []
    with torch.no_grad():
        for image, prompt in zip(IMAGES, PROMPTS, strict=True):
            ids = tokenizer([prompt], truncation=True, max_length=LENGTH)["input_ids"]
            text = model.encode_text(torch.tensor(ids))
            embedded = model.visual(reference_preprocess(image))
            cosines.append(torch.cosine_similarity(embedded, text).item())
    assert np.std(cosines) > 0.05
    return target, cosines


def test_hps_is_the_cosine(folder, plain):
    assert scores_of(HpsV2(model=str(folder), processor=str(folder))) == close(plain.cosine)


def test_the_hps_checkpoint_scores_like_open_clip(folder, hps):
    checkpoints, cosines = hps
    from_folder = HpsV2(model=str(checkpoints), processor=str(folder))
    assert scores_of(from_folder) == close(cosines)
    file = checkpoints / "HPS_v2.1_compressed.pt"
    assert scores_of(HpsV2(model=str(file), processor=str(folder))) == close(cosines)


def test_the_hps_version_selects_the_checkpoint(folder, hps):
    checkpoints, cosines = hps
    scores = scores_of(HpsV2(model=str(checkpoints), processor=str(folder), version="v2.0"))
    assert scores != close(cosines, 0.01)


def test_a_checkpoint_with_pickled_code_is_rejected(folder, tmp_path):
    trace = tmp_path / "ran"
    checkpoint = str(tmp_path / "evil.pt")
    torch.save({"state_dict": Opener(trace)}, checkpoint)
    with raises_user_error("io.open", field="model", value=checkpoint):
        HpsV2(model=checkpoint, processor=str(folder))
    assert not trace.exists()


class Opener:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_an_unknown_hps_version_is_rejected(folder):
    with raises_user_error("v2.1", "v2.0", field="version", value="v3"):
        HpsV2(model=str(folder), processor=str(folder), version="v3")


def test_an_hps_checkpoint_needs_a_processor(hps):
    with raises_user_error("processor=", field="model", value=str(hps[0])):
        HpsV2(model=str(hps[0]), processor=None)


def test_a_checkpoint_of_another_model_is_rejected(folder, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    for name, expected in (("other.safetensors", "HPSv2"), ("text.pt", "damaged pickle")):
        with raises_user_error(expected, field="model", value=str(tmp_path / name)):
            HpsV2(model=str(tmp_path / name), processor=str(folder))
