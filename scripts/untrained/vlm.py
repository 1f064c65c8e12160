"""VLMs of published sizes with random weights, for benchmarks without downloads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

TOKEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
ROPE_2_5 = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
ROPE_3 = {
    "rope_type": "default",
    "rope_theta": 5e6,
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}


def _qwen2_5(width: int, inner: int, layers: int, heads: int, kv: int, tied: bool) -> dict:
    """Return the config of a Qwen2.5-VL with these sizes of its language model."""
    text = {
        "vocab_size": 151936 if tied else 152064,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 128000,
        "rope_parameters": ROPE_2_5,
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": width,
    }
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def _qwen3(width: int, inner: int, layers: int, tower: dict[str, Any], tied: bool) -> dict:
    """Return the config of a Qwen3-VL; `tower` has the sizes of the vision tower."""
    text = {
        "vocab_size": 151936,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": ROPE_3,
    }
    vision = {**tower, "num_heads": 16, "patch_size": 16, "out_hidden_size": width}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
LARGE_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
SHAPES = {
    "small": {  # for smoke tests
        "text_config": {
            "vocab_size": 152000,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {**ROPE_2_5, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
        "tie_word_embeddings": True,
    },
    "qwen2.5-vl-3b": _qwen2_5(2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-vl-7b": _qwen2_5(3584, 18944, 28, 28, 4, tied=False),
    "qwen3-vl-4b": _qwen3(2560, 9728, 36, SMALL_TOWER, tied=True),
    "qwen3-vl-8b": _qwen3(4096, 12288, 36, LARGE_TOWER, tied=False),
}


def build(name: str, device: torch.device, dtype: torch.dtype, **text: Any) -> nn.Module:
    """Build a model of `SHAPES`; `text` overrides config fields of its language model."""
    settings = {**SHAPES[name], **TOKEN_IDS}
    settings["text_config"] = {**settings["text_config"], **text}
    is_qwen3 = name.startswith("qwen3")
    config = (Qwen3VLConfig if is_qwen3 else Qwen2_5_VLConfig)(**settings)
    kind = Qwen3VLForConditionalGeneration if is_qwen3 else Qwen2_5_VLForConditionalGeneration
    torch.manual_seed(0)
    with device, default_dtype(dtype):
        model = kind(config)
    return model.to(device, dtype).eval()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager that sets torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
