"""MPS on a small checkpoint with the authors' names, computed here one image at a time."""

import math

import numpy as np
import pytest
import torch
from runner import run_script
from safetensors.torch import load_file, save_file
from small_clip import (
    DIM,
    IMAGES,
    LENGTH,
    PROMPTS,
    SCALE,
    clip_folder,  # noqa: F401 (a fixture)
    close,
    reference_preprocess,
    scores_of,
)
from torch import nn
from transformers import AutoTokenizer, CLIPModel
from user_errors import raises_user_error

from flow_grpo.rewards.scorers import mps
from flow_grpo.rewards.scorers.mps import CONDITION, Mps

LAYERS, HEADS, WIDTH, HIDDEN = 2, 2, 64, 20
CHECKPOINT = "MPS_overall_checkpoint"


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.5 / math.sqrt(inputs))
    return layer


class Part(nn.Module):
    """A module with these children and buffers, as a class that is pickled with it."""

    def __init__(self, buffers: dict | None = None, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value, persistent=name != "pos_emb")


def make_layer() -> nn.ModuleList:
    inner = HEADS * WIDTH
    norms = [Part({"bias": torch.zeros(DIM)}) for _ in range(2)]
    for norm in norms:
        norm.weight = nn.Parameter(torch.rand(DIM) + 0.5)
    up, down = linear(DIM, 2 * HIDDEN), linear(HIDDEN, DIM)
    cross = Part(norm=norms[0], to_q=linear(DIM, inner), to_kv=linear(DIM, 2 * WIDTH))
    cross.to_out, cross.ff = linear(inner, DIM), nn.Sequential(up, nn.SiLU(), down)
    own = Part({"pos_emb": torch.ones(3)}, norm=norms[1], attn_out=linear(inner, DIM))
    own.rotary_emb = Part({"inv_freq": torch.ones(WIDTH // 2)})
    own.fused_attn_ff_proj = linear(DIM, inner + 2 * WIDTH + 2 * HIDDEN)
    own.ff_out = nn.Sequential(nn.SiLU(), linear(HIDDEN, DIM))
    return nn.ModuleList([Part(fn=cross), Part(fn=own)])


@pytest.fixture(scope="module")
@torch.no_grad()
def model(folder) -> nn.Module:
    """Build a model whose text tokens differ: their mean direction is projected out."""
    torch.manual_seed(3)
    layers = nn.ModuleList(make_layer() for _ in range(LAYERS))
    clip, tokenizer = CLIPModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    mean = torch.cat([encode(clip, tokenizer, text)[0] for text in [*PROMPTS, CONDITION]]).mean(0)
    projection = clip.text_projection.weight
    projection -= torch.outer(mean, mean @ projection) / mean.square().sum()
    return Part(model=clip, cross_model=Part(layers=layers))


@pytest.fixture(scope="module")
def checkpoint(model, folder, tmp_path_factory) -> str:
    """Convert the pickled module with the command and return the new file."""
    root = tmp_path_factory.mktemp("mps")
    clip = CLIPModel.from_pretrained(folder)  # that of `model` has hooks, which cannot be pickled
    clip.load_state_dict(model.model.state_dict())
    torch.save(Part(model=clip, cross_model=model.cross_model), root / f"{CHECKPOINT}.pth")
    arguments = [root / f"{CHECKPOINT}.pth", root / f"{CHECKPOINT}.safetensors"]
    refused = run_script("scripts/rewards.py", "convert", *arguments)
    assert refused.returncode == 2
    done = run_script("scripts/rewards.py", "convert", *arguments, "--modules")
    assert done.returncode == 0, done.stderr
    return str(arguments[1])


def swiglu(x):
    half = x.shape[-1] // 2
    return x[:, :half] * x[:, half:] / (1 + torch.exp(-x[:, half:]))


def norm(part, x):
    centred = x - x.mean(-1, keepdim=True)
    return part.weight * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def turn(x, frequencies):
    """Rotate each pair (i, i + WIDTH / 2) of (T, WIDTH) as complex numbers."""
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    angles = torch.arange(len(x))[:, None] * frequencies
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1).float()


def attention(queries, keys, values, allowed):
    logits = queries @ keys.T / math.sqrt(WIDTH)
    return logits.masked_fill(~allowed, -math.inf).softmax(-1) @ values


def encode(model, tokenizer, text):
    """Return the projected tokens of a padded text and the projected end token."""
    options = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
    ids = torch.tensor([tokenizer(text, **options)["input_ids"]])
    hidden = model.text_model(ids, output_hidden_states=True).hidden_states[-1]
    states = model.text_projection(model.text_model.final_layer_norm(hidden))[0]
    return states, states[ids[0].tolist().index(tokenizer.eos_token_id)]


@torch.no_grad()
def reference(model, folder, image, prompt, base=10_000, threshold=0.3):
    """Return the score of an image and which tokens of the prompt count."""
    tokenizer, clip = AutoTokenizer.from_pretrained(folder), model.model
    tokens, end = encode(clip, tokenizer, prompt)
    condition, _ = encode(clip, tokenizer, CONDITION)
    similar = torch.stack([max(token @ other for other in condition) for token in tokens])
    counts = similar / similar.max() > threshold
    pixels = reference_preprocess(image)
    x = clip.vision_model(pixel_values=pixels, output_hidden_states=True).hidden_states[-1]
    x = clip.visual_projection(x)[0]
    everywhere = torch.ones(len(x), dtype=torch.bool)
    frequencies = base ** -(torch.arange(0, WIDTH, 2).double() / WIDTH)
    for cross, own in ((layer[0].fn, layer[1].fn) for layer in model.cross_model.layers):
        y = norm(cross.norm, x)
        keys, values = cross.to_kv(tokens).split(WIDTH, dim=-1)
        heads = cross.to_q(y).split(WIDTH, dim=-1)
        mixed = torch.cat([attention(q, keys, values, counts) for q in heads], dim=-1)
        x = x + cross.to_out(mixed) + cross.ff[2](swiglu(cross.ff[0](y)))
        projected = own.fused_attn_ff_proj(norm(own.norm, x))
        *heads, keys, values, hidden = projected.split([WIDTH] * (HEADS + 2) + [2 * HIDDEN], dim=-1)
        keys = turn(keys, frequencies)
        mixed = [attention(turn(q, frequencies), keys, values, everywhere) for q in heads]
        x = x + own.attn_out(torch.cat(mixed, dim=-1)) + own.ff_out[1](swiglu(hidden))
    return (SCALE * torch.cosine_similarity(x[0], end, dim=0)).item(), counts


@pytest.fixture(scope="module")
def expected(model, folder) -> list[float]:
    pairs = [reference(model, folder, *pair) for pair in zip(IMAGES, PROMPTS, strict=True)]
    scores, counts = zip(*pairs, strict=True)
    assert np.std(scores) > 1
    assert any(0 < each.float().mean() < 1 for each in counts)  # the condition has an effect
    return list(scores)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_the_score_is_the_logit_under_the_condition(folder, checkpoint, expected, batch_size):
    scorer = Mps(model=checkpoint, processor=str(folder), batch_size=batch_size)
    assert scores_of(scorer) == close(expected, 1e-3 * np.std(expected))
    assert scores_of(scorer) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "value"), [("THRESHOLD", 0.01), ("ROTARY_BASE", 100), ("CONDITION", "dogs")]
)
def test_another_constant_changes_the_score(folder, checkpoint, expected, monkeypatch, name, value):
    options = {"condition": value} if name == "CONDITION" else {}
    if not options:
        monkeypatch.setattr(mps, name, value)
    scorer = Mps(model=checkpoint, processor=str(folder), **options)
    found = scores_of(scorer)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) > 1e-2


def test_other_image_statistics_change_the_score(folder, checkpoint, expected):
    scorer = Mps(model=checkpoint, processor=str(folder))
    scorer.image_processor.image_mean = [0.5] * 3
    assert scores_of(scorer) != close(expected, 1e-2)


def test_gradients_reach_the_pixels(folder, checkpoint, expected):
    scorer = Mps(model=checkpoint, processor=str(folder))
    pixels = torch.tensor(np.asarray(IMAGES[0])).permute(2, 0, 1)[None] / 255
    pixels.requires_grad_()
    score = scorer.score_pixels(pixels, PROMPTS[:1])
    assert score.item() == pytest.approx(expected[0], abs=1e-3)
    score.sum().backward()
    assert pixels.grad.abs().sum() > 0


def test_invalid_checkpoints_are_rejected(folder, checkpoint, tmp_path):
    with raises_user_error("convert --modules", field="model", value=""):
        Mps(processor=str(folder))
    weights = load_file(checkpoint)
    weights.pop("cross_model.layers.1.0.fn.to_q.weight")
    for name, content in {"cut": weights, "other": {"a": torch.zeros(1)}}.items():
        save_file(content, tmp_path / f"{name}.safetensors")
        with raises_user_error("MPS", field="model", value=str(tmp_path / f"{name}.safetensors")):
            Mps(model=str(tmp_path / f"{name}.safetensors"), processor=str(folder))
