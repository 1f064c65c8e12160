"""Text encoders at their published depth; those of untrained/full.py have one or two layers."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from flow_grpo.errors import UserError
from untrained.vlm import SHAPES


def _clip(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the config of a CLIP text encoder."""
    return {
        "vocab_size": 49408,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "projection_dim": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _t5_xxl(vocabulary: int) -> dict[str, Any]:
    """Return the config of a T5-XXL encoder with this vocabulary size."""
    return {
        "vocab_size": vocabulary,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
    }


def _qwen3(width: int, inner: int, tied: bool) -> dict[str, Any]:
    """Return the config of a Qwen3 text encoder: hidden size, MLP size, tied embeddings."""
    return {
        "vocab_size": 151936,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": tied,
    }


CLIP_L = _clip(768, 12, 12)
CLIP_G = _clip(1280, 32, 20)
T5 = _t5_xxl(32128)
UMT5 = _t5_xxl(256384)
QWEN_4B = _qwen3(2560, 9728, True)
QWEN_8B = _qwen3(4096, 12288, False)
QWEN_VL_7B = SHAPES["qwen2.5-vl-7b"]
FLUX = {"text_encoder": CLIP_L, "text_encoder_2": T5}
ENCODERS = {  # by model: config fields of each encoder
    "sd3.5-medium": {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": T5},
    "flux.1-dev": FLUX,
    "flux.1-kontext-dev": FLUX,
    "flux.2-4b-klein": {"text_encoder": QWEN_4B},
    "flux.2-9b-klein": {"text_encoder": QWEN_8B},
    "qwen-image": {"text_encoder": QWEN_VL_7B},
    "qwen-image-edit": {"text_encoder": QWEN_VL_7B},
    "z-image": {"text_encoder": QWEN_4B},
    "wan2.1-1.3b": {"text_encoder": UMT5},
    "wan2.1-14b": {"text_encoder": UMT5},
    "wan2.2-5b": {"text_encoder": UMT5},
    "wan2.2-a14b": {"text_encoder": UMT5},
}
DERIVED = ("layer_types", "dense_act_fn", "is_gated_act")  # computed from other fields if missing


def check_full_encoder(model: str) -> None:
    """Raise a UserError if the text encoder of `model` has no published sizes here."""
    if model not in ENCODERS:
        raise UserError(
            f"supports only {', '.join(ENCODERS)}, not {model}",
            field="--whole_encoders",
            hint="omit it",
        )


def resize_encoder(encoder: PreTrainedModel, sizes: dict[str, Any]) -> PreTrainedModel:
    """Build an encoder of the same class with other config fields and random weights."""
    kind: type[PretrainedConfig] = type(encoder.config)
    config = kind.from_dict(_merged(encoder.config.to_dict(), sizes))
    return type(encoder)(config).eval().to(torch.get_default_dtype())


def _merged(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _merged(config[k], v) for k, v in sizes.items() if k.endswith("_config")}
    return {**{k: v for k, v in config.items() if k not in DERIVED}, **sizes, **nested}
