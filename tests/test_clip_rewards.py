"""Every scorer here is the real one, on a small random CLIP with transformers' own classes; what
it should give is computed with plain transformers and torch."""

import json
import math
import shutil
import string
from itertools import pairwise
from types import SimpleNamespace

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer, BertConfig, BertModel, CLIPConfig, CLIPModel

from flow_grpo.errors import UserError
from flow_grpo.rewards import build_reward
from flow_grpo.rewards.aesthetic import Aesthetic
from flow_grpo.rewards.clip import ClipScore, HpsV2, PickScore
from flow_grpo.rewards.failure import Failed

SIZE, LENGTH, DIM = 32, 12, 16
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])
SCALE = 60.0


def blotches(width, height, mode="RGB", seed=0):
    coarse = np.random.default_rng(seed).integers(0, 255, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height)).convert(mode)


IMAGES = [
    blotches(32, 32),
    blotches(70, 40, seed=1),
    blotches(20, 50, "L", seed=2),
    blotches(64, 64, "RGBA", seed=3),
    Image.new("RGB", (33, 47), "orange"),
]
PROMPTS = ["a cat", "two dogs", "a cat", "words beyond the limit of the model", ""]
METADATA = [{}] * len(IMAGES)


def write_processor(folder):
    characters = [*string.ascii_lowercase, *(c + "</w>" for c in string.ascii_lowercase)]
    tokens = [*characters, "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    sizes = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    preprocessor = {"image_processor_type": "CLIPImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return len(tokens)


def shake(module):
    """Fresh weights are so small that all images would look alike."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    vocabulary = write_processor(folder)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "gelu"}
    text = {"vocab_size": vocabulary, "max_position_embeddings": LENGTH}
    ends = {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1}
    config = CLIPConfig(
        text_config={"hidden_size": 24, "intermediate_size": 48, **sizes, **text, **ends},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "image_size": SIZE,
            "patch_size": 8,
            **sizes,
        },
        projection_dim=DIM,
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    shake(model)
    model.logit_scale.data.fill_(math.log(SCALE))
    model.save_pretrained(folder)
    return folder


def pixels_by_hand(image, size=SIZE):
    """The shorter side to `size`, bicubic, the middle square of it, CLIP's mean and deviation."""
    image = image.convert("RGB")
    short = min(image.size)
    image = image.resize([int(size * side / short) for side in image.size], Image.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    array = (np.asarray(image) / 255 - MEAN) / STD
    return torch.tensor(array, dtype=torch.float32).permute(2, 0, 1)[None]


@pytest.fixture(scope="module")
def plain(folder):
    """Embeddings of each image and prompt by itself, without batches or padding."""
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images, texts = [], []
    with torch.no_grad():
        for image, prompt in zip(IMAGES, PROMPTS, strict=True):
            tokens = tokenizer([prompt], truncation=True, max_length=LENGTH, return_tensors="pt")
            output = model(pixel_values=pixels_by_hand(image), **tokens)
            images.append(output.image_embeds[0])
            texts.append(output.text_embeds[0])
    images, texts = torch.stack(images), torch.stack(texts)
    cosine = (images * texts).sum(-1) / (images.norm(dim=-1) * texts.norm(dim=-1))
    assert cosine.std() > 0.05  # or a scorer that ignores something could pass
    return SimpleNamespace(images=images, cosine=cosine.tolist())


def close(values, tolerance=1e-5):
    return pytest.approx(values, abs=tolerance)


def scores_of(scorer, images=IMAGES, prompts=PROMPTS):
    result = scorer(images, prompts, [{}] * len(images))
    return result[0] if isinstance(result, tuple) else result


def test_pickscore_is_the_logit_over_26(folder, plain):
    scores, extra = PickScore(model=str(folder), processor=str(folder))(IMAGES, PROMPTS, METADATA)
    assert scores == close([SCALE * c / 26 for c in plain.cosine])
    assert extra == {"raw": close([SCALE * c for c in plain.cosine], 1e-4)}
    assert {type(s) for s in scores} == {float}


def test_clip_score_is_the_logit_over_30(folder, plain):
    scores, extra = ClipScore(model=str(folder))(IMAGES, PROMPTS, METADATA)
    assert scores == close([SCALE * c / 30 for c in plain.cosine])
    assert extra == {"cosine": close(plain.cosine)}


def test_hps_is_the_cosine(folder, plain):
    assert scores_of(HpsV2(model=str(folder), processor=str(folder))) == close(plain.cosine)


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
        custom={"mine": "flow_grpo.rewards.clip:ClipScore"},
        options={"mine": {"model": str(folder), "batch_size": 2}},
    )
    scores = np.asarray(reward(IMAGES, PROMPTS)["mine"])
    assert scores.tolist() == close([SCALE * c / 30 for c in plain.cosine])


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
    """As open_clip lays it out and names it, which is what HPSv2 was saved from."""

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
    """HPSv2's checkpoint in small, its two versions, and the scores of the first."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = tmp_path_factory.mktemp("hps")
    torch.manual_seed(1)
    model = OpenClip(len(tokenizer)).eval()
    shake(model)
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
            picture = model.visual(pixels_by_hand(image))
            cosines.append(torch.cosine_similarity(picture, text).item())
    assert np.std(cosines) > 0.05
    return target, cosines


def test_the_hps_checkpoint_gives_what_open_clip_would(folder, hps):
    checkpoints, cosines = hps
    from_folder = HpsV2(model=str(checkpoints), processor=str(folder))
    assert scores_of(from_folder) == close(cosines)
    file = checkpoints / "HPS_v2.1_compressed.pt"
    assert scores_of(HpsV2(model=str(file), processor=str(folder))) == close(cosines)


def test_the_hps_version_chooses_the_checkpoint(folder, hps):
    checkpoints, cosines = hps
    scores = scores_of(HpsV2(model=str(checkpoints), processor=str(folder), version="v2.0"))
    assert scores != close(cosines, 0.01)


def test_a_checkpoint_with_code_in_it_is_refused(folder, tmp_path):
    trace = tmp_path / "ran"
    torch.save({"state_dict": Opener(trace)}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"cannot be loaded as an HPSv2 checkpoint"):
        HpsV2(model=str(tmp_path / "evil.pt"), processor=str(folder))
    assert not trace.exists()


class Opener:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


HEAD_WIDTHS = [DIM, 12, 8, 6, 4, 1]
# The published names, where dropouts are counted too, and others whose order is not alphabetic.
HEAD_NUMBERS = {"head.pth": [0, 2, 4, 6, 7], "head.safetensors": [0, 3, 6, 9, 12]}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    target = tmp_path_factory.mktemp("heads")
    torch.manual_seed(2)
    layers = [(torch.randn(o, i), torch.randn(o)) for i, o in pairwise(HEAD_WIDTHS)]
    for name, numbers in HEAD_NUMBERS.items():
        state = {}
        # Backwards: their order in the file should not matter.
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


def test_aesthetic_takes_a_single_layer_and_no_notice_of_the_prompt(folder, plain, heads):
    scorer = Aesthetic(model=str(folder), head=str(heads.folder / "single.pth"))
    expected = heads.single(plain.images)[:, 0].tolist()
    assert scores_of(scorer) == close(expected)
    assert scores_of(scorer, prompts=["other"] * len(IMAGES)) == close(expected)


def test_the_aesthetic_head_stays_in_float32(folder, plain, heads):
    scorer = Aesthetic(model=str(folder), head=str(heads.folder / "single.pth"), dtype="bfloat16")
    assert {p.dtype for p in scorer.network.clip.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in scorer.network.head.parameters()} == {torch.float32}
    assert scores_of(scorer) == close(heads.single(plain.images)[:, 0].tolist(), 0.05)


def refusal(build, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        build(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def test_an_unknown_hps_version_is_named(folder):
    message = refusal(HpsV2, model=str(folder), processor=str(folder), version="v3")
    assert message == "version='v3' must be one of v2.1, v2.0"


def test_an_hps_checkpoint_without_sizes_is_told(hps):
    assert "needs a processor=" in refusal(HpsV2, model=str(hps[0]), processor=None)


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
    assert "lacks 1 weights of a CLIP model, visual_projection.weight for one" in message


def test_a_checkpoint_of_something_else_is_named(folder, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    for name in ("other.safetensors", "text.pt"):
        message = refusal(HpsV2, model=str(tmp_path / name), processor=str(folder))
        assert "cannot be loaded as an HPSv2 checkpoint (" in message


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
    ("name", "reason"),
    [("wide.pth", "takes 17 values and gets 16"), ("two.pth", "end in one"), ("empty.pth", "end")],
)
def test_a_head_that_does_not_fit_is_named(folder, heads, name, reason):
    message = refusal(Aesthetic, model=str(folder), head=str(heads.folder / name))
    assert message.startswith(f"head={str(heads.folder / name)!r} cannot be loaded as an aesthetic")
    assert reason in message


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
