"""ImageReward on a small checkpoint with the published names and layout, against the published
architecture in plain torch."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_clip import MEAN, STD, random_image
from torch import nn
from user_errors import raises_user_error

from flow_grpo.rewards.scorers.imagereward import ImageReward

SIZE, PATCH, HEAD = 32, 8, 64
VISION, TEXT = 3 * HEAD, 2 * HEAD
LENGTH = 35
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "red", "two", "on"]
VOCABULARY = len(WORDS) + 2  # with [DEC] and [ENC]
IMAGES = [
    random_image(32, 32),
    random_image(70, 40, seed=1),
    random_image(20, 50, "L", seed=2),
    Image.new("RGBA", (33, 47), "orange"),
    random_image(32, 32, seed=4),
]
PROMPTS = ["a cat", "two red dog on a cat", "A Cat", "", "cat dog " * 30]
METADATA = [{}] * len(IMAGES)


def attention(query, key, value, mask=None):
    """Multi-head attention; all arguments (N, tokens, width)."""
    query, key, value = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (query, key, value))
    weights = query @ key.transpose(-1, -2) / math.sqrt(HEAD)
    if mask is not None:
        weights = weights.masked_fill(mask[:, None, None] == 0, -10000)
    return (weights.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)


def module(**parts):
    result = nn.Module()
    for name, part in parts.items():
        result.add_module(name, part)
    return result


class ViTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(VISION, eps=1e-6), nn.LayerNorm(VISION, eps=1e-6)
        self.attn = module(qkv=nn.Linear(VISION, 3 * VISION), proj=nn.Linear(VISION, VISION))
        self.mlp = module(fc1=nn.Linear(VISION, 2 * VISION), fc2=nn.Linear(2 * VISION, VISION))

    def forward(self, x):
        x = x + self.attn.proj(attention(*self.attn.qkv(self.norm1(x)).chunk(3, dim=-1)))
        return x + self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x))))


class ViT(nn.Module):
    """timm's ViT as used in BLIP."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, VISION))
        self.pos_embed = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2 + 1, VISION))
        self.patch_embed = module(proj=nn.Conv2d(3, VISION, PATCH, PATCH))
        self.blocks = nn.ModuleList(ViTBlock() for _ in range(2))
        self.norm = nn.LayerNorm(VISION, eps=1e-6)

    def forward(self, pixels):
        patches = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(pixels), -1, -1), patches], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class BertAttention(nn.Module):
    def __init__(self, source):
        super().__init__()
        key, value = nn.Linear(source, TEXT), nn.Linear(source, TEXT)
        self.add_module("self", module(query=nn.Linear(TEXT, TEXT), key=key, value=value))
        self.output = module(dense=nn.Linear(TEXT, TEXT), LayerNorm=nn.LayerNorm(TEXT, eps=1e-12))

    def forward(self, x, source, mask=None):
        part = self.self
        y = attention(part.query(x), part.key(source), part.value(source), mask)
        return self.output.LayerNorm(self.output.dense(y) + x)


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.crossattention = BertAttention(TEXT), BertAttention(VISION)
        self.intermediate = module(dense=nn.Linear(TEXT, 2 * TEXT))
        self.output = module(
            dense=nn.Linear(2 * TEXT, TEXT), LayerNorm=nn.LayerNorm(TEXT, eps=1e-12)
        )

    def forward(self, x, mask, image):
        x = self.crossattention(self.attention(x, x, mask), image)
        y = self.output.dense(nn.functional.gelu(self.intermediate.dense(x)))
        return self.output.LayerNorm(y + x)


class Bert(nn.Module):
    """BLIP's text encoder: BERT with cross-attention to the image in each layer."""

    def __init__(self):
        super().__init__()
        self.embeddings = module(
            word_embeddings=nn.Embedding(VOCABULARY, TEXT),
            position_embeddings=nn.Embedding(LENGTH + 5, TEXT),
            LayerNorm=nn.LayerNorm(TEXT, eps=1e-12),
        )
        self.embeddings.register_buffer("position_ids", torch.arange(LENGTH + 5)[None])
        self.encoder = module(layer=nn.ModuleList(BertLayer() for _ in range(2)))

    def forward(self, tokens, mask, image):
        x = self.embeddings.word_embeddings(tokens)
        x = x + self.embeddings.position_embeddings.weight[: tokens.shape[1]]
        x = self.embeddings.LayerNorm(x)
        for layer in self.encoder.layer:
            x = layer(x, mask, image)
        return x


class Original(nn.Module):
    def __init__(self):
        super().__init__()
        # The projections belong to BLIP and are unused, but are in the published file too.
        self.blip = module(
            visual_encoder=ViT(),
            text_encoder=Bert(),
            vision_proj=nn.Linear(VISION, 4),
            text_proj=nn.Linear(TEXT, 4),
        )
        widths = [TEXT, 24, 16, 8, 4, 1]
        linear = [nn.Linear(i, o) for i, o in pairwise(widths)]
        drop = nn.Dropout(0.2)
        self.mlp = module(
            layers=nn.Sequential(
                linear[0], drop, linear[1], drop, linear[2], drop, linear[3], linear[4]
            )
        )

    def forward(self, pixels, tokens, mask):
        image = self.blip.visual_encoder(pixels)
        rewards = self.mlp.layers(self.blip.text_encoder(tokens, mask, image)[:, 0])
        return (rewards[:, 0] - 0.16717362830052426) / 1.0333394966054072


def reference_preprocess(image):
    image = image.convert("RGB")
    short = min(image.size)
    image = image.resize([int(SIZE * side / short) for side in image.size], Image.BICUBIC)
    left, top = (image.width - SIZE) // 2, (image.height - SIZE) // 2
    image = image.crop((left, top, left + SIZE, top + SIZE))
    array = (np.asarray(image) / 255 - MEAN) / STD
    return torch.tensor(array, dtype=torch.float32).permute(2, 0, 1)[None]


def tokens_by_hand(prompt):
    """Return token ids and mask: lower-case words between [CLS] and [SEP], padded to 35."""
    words = [WORDS.index(word) for word in prompt.lower().split()][: LENGTH - 2]
    tokens = [WORDS.index("[CLS]"), *words, WORDS.index("[SEP]")]
    padding = LENGTH - len(tokens)
    mask = [1] * len(tokens) + [0] * padding
    return torch.tensor([tokens + [0] * padding]), torch.tensor([mask])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the folder of the checkpoint, that of the tokenizer, and the expected scores."""
    folder = tmp_path_factory.mktemp("imagereward")
    torch.manual_seed(0)
    model = Original().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        model.mlp.layers[-1].weight *= 20  # otherwise the scores would differ little
    torch.save(model.state_dict(), folder / "ImageReward.pt")
    save_file(model.state_dict(), folder / "other-name.safetensors")
    bert = folder / "bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (bert / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true}'
    )
    (bert / "config.json").write_text('{"model_type": "bert"}')
    with torch.no_grad():
        scores = [
            model(reference_preprocess(image), *tokens_by_hand(prompt)).item()
            for image, prompt in zip(IMAGES, PROMPTS, strict=True)
        ]
    assert np.std(scores) > 0.2
    return folder, bert, scores


def close(values, tolerance=1e-5):
    return pytest.approx(values, abs=tolerance)


@pytest.mark.parametrize("source", ["", "ImageReward.pt", "other-name.safetensors"])
def test_the_published_checkpoint_gives_the_published_reward(published, source):
    folder, bert, expected = published
    scorer = ImageReward(model=str(folder / source), processor=str(bert))
    scores = scorer(IMAGES, PROMPTS, METADATA)
    assert scores == close(expected)
    assert {type(s) for s in scores} == {float}


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_batch_size_does_not_change_the_rewards(published, batch_size):
    folder, bert, expected = published
    scorer = ImageReward(model=str(folder), processor=str(bert), batch_size=batch_size)
    assert scorer(IMAGES, PROMPTS, METADATA) == close(expected)
    assert scorer(IMAGES[::-1], PROMPTS[::-1], METADATA) == close(expected[::-1])


def test_the_score_depends_on_image_and_prompt(published):
    folder, bert, expected = published
    scorer = ImageReward(model=str(folder), processor=str(bert))
    other_prompt = scorer(IMAGES[:1], ["red dog"], [{}])
    other_image = scorer(IMAGES[1:2], PROMPTS[:1], [{}])
    assert other_prompt != close(expected[:1], 1e-3)
    assert other_image != close(expected[:1], 1e-3)


def test_the_head_stays_in_float32(published):
    folder, bert, expected = published
    scorer = ImageReward(model=str(folder), processor=str(bert), dtype="bfloat16")
    assert {p.dtype for p in scorer.network.vision.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in scorer.network.text.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in scorer.network.head.parameters()} == {torch.float32}
    assert scorer(IMAGES, PROMPTS, METADATA) == close(expected, 0.2)


def test_a_folder_without_the_checkpoint_is_rejected(tmp_path):
    names = ("ImageReward.pt", "ImageReward.safetensors")
    with raises_user_error(*names, field="model", value=str(tmp_path)):
        ImageReward(model=str(tmp_path))


@pytest.mark.parametrize(
    "missing",
    [
        "blip.visual_encoder.pos_embed",
        "blip.visual_encoder.blocks.1.norm1.weight",
        "blip.text_encoder.encoder.layer.1.crossattention.self.key.weight",
        "mlp.layers.7.bias",
        "mlp.layers.7.weight",
    ],
)
def test_an_incomplete_checkpoint_is_rejected(published, tmp_path, missing):
    folder, bert, _ = published
    weights = torch.load(folder / "ImageReward.pt", weights_only=True)
    del weights[missing]
    torch.save(weights, tmp_path / "ImageReward.pt")
    with raises_user_error(f"model={str(tmp_path)!r}", "an ImageReward checkpoint"):
        ImageReward(model=str(tmp_path), processor=str(bert))


def test_a_tokenizer_of_another_size_is_rejected(published, tmp_path):
    folder, bert, _ = published
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS[:-1]) + "\n")
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text((bert / name).read_text())
    with raises_user_error("12", "13", field="processor", value=str(tmp_path)):
        ImageReward(model=str(folder), processor=str(tmp_path))
