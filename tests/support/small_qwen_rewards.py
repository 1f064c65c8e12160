"""Small checkpoints of HPSv3, VideoAlign and EditReward, and the authors' formulas.

The formulas are computed one sample at a time, from hand-written token ids and positions, with
transformers' image processor or loops over the pixels.
"""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from small_vlm import CHARACTERS, FAMILIES, PAD, SPECIAL, build_tokenizer, config_fields
from torch import nn
from torch.nn import functional as F
from transformers import Qwen2VLImageProcessorPil

from flow_grpo.rewards.qwen_vl_regression import TEMPLATES

WIDTH = 32
VISION = {"patch_size": 14}  # as published
WINDOWS = {"window_size": 56}
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


def build_model(family: str, tokens: int) -> nn.Module:
    """Build a model with `tokens` additional tokens in its vocabulary."""
    fields = config_fields(family)
    fields["vision_config"] |= VISION | (WINDOWS if family == "qwen2_5_vl" else {})
    fields["text_config"] |= {"vocab_size": len(SPECIAL) + len(CHARACTERS) + tokens}
    config, kind = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config(**fields)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return model


def write_processor(folder: Path, family: str) -> str:
    """Write the config and the tokenizer of the base model, which lacks the additional tokens."""
    folder.mkdir()
    fields = config_fields(family)
    fields["vision_config"] |= VISION | (WINDOWS if family == "qwen2_5_vl" else {})
    config = {"model_type": family, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer(family).save_pretrained(folder)
    return str(folder)


def build_head(widths: tuple[int, ...] = (WIDTH, 24, 16, 2), seed: int = 0) -> nn.Sequential:
    """Build HPSv3's head, with its dropout, so that the layers have the published numbers."""
    torch.manual_seed(seed)
    first, second, third = (nn.Linear(*pair) for pair in itertools.pairwise(widths))
    head = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.05), second, nn.ReLU(), third)
    for parameter in head.requires_grad_(False).parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return head.eval()


def prefixed(prefix: str, module: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": value for name, value in module.state_dict().items()}


def old_layout(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename weights to the layout of transformers before 4.52."""
    older = {name.replace("model.language_model.", "model."): v for name, v in weights.items()}
    return {name.replace("model.visual.", "visual."): v.clone() for name, v in older.items()}


def save_weights(folder: Path, name: str, weights: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / name)
    return str(folder)


def token_ids(text: str, added: tuple[str, ...]) -> torch.Tensor:
    """Return the ids of special tokens and characters, (1, L)."""
    names = [*SPECIAL, *CHARACTERS, *added]
    parts = re.findall(r"<\|\w+\|>|[\s\S]", text)
    return torch.tensor([[names.index(part) for part in parts]])


def message(kind: str, counts: list[int], text: str) -> str:
    """Render the chat template of `small_vlm`."""
    pads = "".join(f"<|vision_start|>{f'<|{kind}_pad|>' * count}<|vision_end|>" for count in counts)
    return f"<|im_start|>{pads}{text}<|im_end|><|im_start|>"


def template(name: str, prompt: str) -> str:
    return (TEMPLATES / f"{name}.txt").read_text("utf-8").format(text_prompt=prompt)


def image_patches(image: Image.Image, size: tuple[int, int]) -> SimpleNamespace:
    """Resize an image, and process it with transformers' class."""
    resized = image.convert("RGB").resize(size, Image.BICUBIC)
    processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=10**8)
    found = processor(images=[resized], return_tensors="pt")
    return SimpleNamespace(patches=found["pixel_values"], grid=found["image_grid_thw"])


def video_patches(frames: list[Image.Image], size: tuple[int, int]) -> SimpleNamespace:
    """Resize frames as torchvision does with bytes, and cut them patch by patch."""
    pixels = torch.stack([torch.tensor(np.array(f.convert("RGB"))) for f in frames])
    pixels = pixels.permute(0, 3, 1, 2).float()
    resized = F.interpolate(pixels, size[::-1], mode="bicubic", antialias=True)
    resized = resized.clamp(0, 255).round().permute(0, 2, 3, 1).numpy()
    array = (resized / 255 - MEAN) / STD  # (F, H, W, 3)
    count, (height, width) = len(frames), (size[1] // 14, size[0] // 14)
    patches = [
        array[t : t + 2, y * 14 : y * 14 + 14, x * 14 : x * 14 + 14].transpose(3, 0, 1, 2).ravel()
        for t in range(0, count, 2)
        for row in range(0, height, 2)
        for column in range(0, width, 2)
        for y in (row, row + 1)
        for x in (column, column + 1)
    ]
    grid = torch.tensor([[count // 2, height, width]])
    return SimpleNamespace(patches=torch.tensor(np.array(patches)).float(), grid=grid)


@torch.no_grad()
def hidden_states(model: nn.Module, ids: torch.Tensor, visuals: list) -> torch.Tensor:
    """Return the last hidden states of a row, (L, width), with positions 0, 1, 2, ..."""
    base = model.model
    embeddings = base.language_model.embed_tokens(ids)
    features = [base.visual(v.patches, grid_thw=v.grid).pooler_output for v in visuals]
    pads = torch.isin(
        ids, torch.tensor([SPECIAL.index(f"<|{k}_pad|>") for k in ("image", "video")])
    )
    embeddings[pads] = torch.cat(features)
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    mask = torch.ones_like(ids)
    assert not (ids == PAD).any()
    return base.language_model(
        inputs_embeds=embeddings, position_ids=positions, attention_mask=mask
    ).last_hidden_state[0]


def mlp(head: nn.Sequential, state: torch.Tensor) -> torch.Tensor:
    """Compute linear, ReLU, linear, ReLU, linear with explicit matrices."""
    a, b, c = head[0], head[3], head[5]
    hidden = (a.weight @ state + a.bias).clamp(min=0)
    hidden = (b.weight @ hidden + b.bias).clamp(min=0)
    return c.weight @ hidden + c.bias
