"""Model families, one file each, selected by the `model_type` of a model's config.

Families are imported on first use.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from flow_grpo.config.custom import check_class
from flow_grpo.config.registry import Registry
from flow_grpo.errors import UserError
from flow_grpo.modelscope_hub import local_model
from flow_grpo.perf.quantization import NF4, UNQUANTIZED, quantize_linears
from flow_grpo.rewards.loading import explain_load_errors, load_chat_template
from flow_grpo.vlm.fields import VLM_SPEC
from flow_grpo.vlm.models.base import Family
from flow_grpo.vlm.models.text import TextModel, is_text_model
from flow_grpo.weight_checks import (
    check_finite,
    check_implementations,
    check_loading_report,
    check_not_nan,
    check_stored_weights,
    quiet_transformers,
)

logger = logging.getLogger("flow_grpo")

FAMILIES: Registry[type[Family]] = Registry(
    "model family",
    {
        "gemma3": f"{__name__}.gemma3:Gemma3",
        "gemma3_text": f"{__name__}.gemma3:Gemma3Text",
        "glm4v": f"{__name__}.glm4v:Glm4V",
        "glm46v": f"{__name__}.glm4v:Glm4V",
        "internvl": f"{__name__}.internvl:InternVL",
        "minicpmv4_6": f"{__name__}.minicpmv:MiniCPMV",
        "minicpmv4_7": f"{__name__}.minicpmv:MiniCPMV47",
        "qwen2_vl": f"{__name__}.qwen_vl:QwenVL",
        "qwen2_5_vl": f"{__name__}.qwen_vl:QwenVL",
        "qwen3_vl": f"{__name__}.qwen3_vl:Qwen3VL",
        "qwen3_vl_moe": f"{__name__}.qwen3_vl:Qwen3VL",
        "qwen3_5": f"{__name__}.qwen3_5:Qwen35",
        "qwen3_5_moe": f"{__name__}.qwen3_5:Qwen35",
    },
)
MODEL_KIND = "a language model"
# Prefix of the weights for multi-token prediction (MTP), which models in transformers lack.
TOKEN_PREDICTION = "mtp."


def register_model(field: str, name: str, found: Any) -> None:
    """Register a user-defined family, possibly replacing a built-in one.

    Raises:
        UserError: If the class does not list `name` in its `names`.
    """
    check_class(field, found, Family)
    if name not in found.names:
        raise UserError(f"must list {name!r} in its `names`, which are {found.names}", field=field)
    FAMILIES[name] = found


def get_family(model: nn.Module) -> Family:
    """Return the family of a model that `load_model` loaded."""
    return _find_family_class(model.config)(model)


def _find_family_class(config: PretrainedConfig) -> type[Family] | None:
    """Return the family of a config: its own, `TextModel` for other language models, or None."""
    return FAMILIES.get(config.model_type) or (TextModel if is_text_model(config) else None)


def find_family(
    source: str, revision: str = "main", *, field: str = "pretrained.model"
) -> type[Family]:
    """Return the family of a model directory or hub id without reading the weights.

    Args:
        source: Model directory or hub id.
        revision: Revision on the hub.
        field: Name of the setting, for error messages.

    Raises:
        UserError: If no family supports the model.
    """
    source = local_model(source, revision, field)
    with explain_load_errors(field, source, MODEL_KIND, VLM_SPEC.models()):
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        raw, _ = config.get_config_dict(source, revision=revision)
    if (family := _find_family_class(config)) is None:
        names = [name for family in FAMILIES.values() for name in family.names.values()]
        raise UserError(
            f"is a {(config.architectures or [config.model_type])[0]}, which is not supported",
            field=field,
            value=source,
            hint=f"use {', '.join(dict.fromkeys(names))}, a causal language model of transformers, "
            "or a custom family (custom_models)",
        )
    check_implementations(field, source, raw)
    check_not_nan(field, source, raw)
    return family


def load_model(
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    revision: str = "main",
    base_precision: str = UNQUANTIZED,
    *,
    field: str = "pretrained.model",
) -> nn.Module:
    """Load a model from the hub or a directory, in evaluation mode.

    Args:
        source: Model directory or hub id.
        device: Device of the model.
        dtype: Dtype of the weights.
        revision: Revision on the hub.
        base_precision: Quantization of the frozen weights.
        field: Name of the setting, for error messages.

    Raises:
        UserError: If no family supports it, if its files have missing or unexpected tensors, or if
            a value is not finite.
    """
    source = local_model(source, revision, field)
    family = find_family(source, revision, field=field)
    with explain_load_errors(field, source, MODEL_KIND), quiet_transformers():
        model, report = family.loader.from_pretrained(
            source,
            dtype=dtype,
            revision=revision,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # listed in the report
            trust_remote_code=False,
        )
    unexpected = {n for n in report["unexpected_keys"] if not n.startswith(TOKEN_PREDICTION)}
    report["unexpected_keys"] = unexpected
    check_loading_report(field, source, report, f"a {type(model).__name__}")
    with explain_load_errors(field, source, MODEL_KIND):
        folder = Path(cached_file(source, "config.json", revision=revision)).parent
        stored = check_stored_weights(folder, "model*.safetensors")
    if ignored := sum(name.startswith(TOKEN_PREDICTION) for name in stored):
        logger.info(
            "%s: %d of its tensors (%s*, multi-token prediction) are not loaded, and exports "
            "lack them",
            source,
            ignored,
            TOKEN_PREDICTION,
        )
    check_finite(f"{field}={source!r}", model.state_dict().items())
    rotary = ((n, b) for n, b in model.named_buffers() if n.endswith("inv_freq"))
    check_finite(f"{field}={source!r}", rotary)  # computed from the config
    if getattr(model, "peft_config", None):  # transformers loads an adapter from the same folder
        raise UserError(
            "contains both a model and an adapter (adapter_config.json)",
            field=field,
            value=source,
            hint="move the adapter to its own directory and set train.lora_path, or merge the two",
        )
    if base_precision != UNQUANTIZED:
        quantize_linears([model.model], base_precision, device)  # without the head
    return model.to(device).eval()


def check_gpu_memory(
    source: str,
    capacity: int,
    dtype: torch.dtype,
    revision: str = "main",
    base_precision: str = UNQUANTIZED,
) -> None:
    """Reject a model whose weights exceed the memory of a GPU.

    Even if weights are sharded, each GPU stores all of them during loading, and with the default
    engine also during sampling.

    Args:
        source: Value of `pretrained.model`.
        capacity: Memory of a GPU in bytes.
        dtype: Dtype of the weights.
        revision: Revision on the hub.
        base_precision: Quantization of the frozen weights.
    """
    needed = _weight_bytes(source, dtype, revision, base_precision)
    if needed <= capacity:
        return
    hint = "use a smaller model, or GPUs with more memory"
    if base_precision != NF4:
        quantized = _weight_bytes(source, dtype, revision, NF4)
        if quantized < capacity:
            size = _format_gigabytes(quantized)
            hint = f"use --config.pretrained.base_precision=nf4 ({size})"
    raise UserError(
        f"needs {_format_gigabytes(needed)} for its weights, which must fit on one GPU while "
        f"loading, but the GPU has {_format_gigabytes(capacity)}",
        field="pretrained.model",
        value=source,
        hint=hint,
    )


def _format_gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _weight_bytes(source: str, dtype: torch.dtype, revision: str, base_precision: str) -> int:
    """Return the size of the weights without loading them."""
    model = build_meta_model(source, revision, dtype)
    if base_precision != UNQUANTIZED:
        quantize_linears([model.model], base_precision, torch.device("meta"))
    return sum(parameter.nbytes for parameter in model.parameters())


def build_meta_model(
    source: str, revision: str = "main", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return the model on the meta device, without reading its weights."""
    source = local_model(source, revision)
    family = find_family(source, revision)
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    with torch.device("meta"):
        return family.loader.from_config(config, dtype=dtype, trust_remote_code=False)


def load_processors(
    source: str,
    revision: str = "main",
    *,
    min_pixels: int = 0,
    max_pixels: int = 0,
    chat_template: str = "",
) -> tuple[PreTrainedTokenizerBase, Any]:
    """Load the tokenizer and the image processor.

    Args:
        source: Model directory or hub id.
        revision: Revision on the hub.
        min_pixels: Images are resized to at least this many pixels; 0 keeps the model's limit.
        max_pixels: Images are resized to at most this many pixels; 0 keeps the model's limit.
        chat_template: Chat template in place of the model's; "" keeps it.

    Returns:
        Tokenizer and image processor; the latter is None for a text-only model.
    """
    source = local_model(source, revision)
    family, image_processor = find_family(source, revision), None
    with explain_load_errors("pretrained.model", source, MODEL_KIND):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        if family.vision_processor_class is not None:
            image_processor = family.load_vision_processor(
                source, revision, min_pixels=min_pixels, max_pixels=max_pixels
            )
    if chat_template:
        tokenizer.chat_template = chat_template
    if not tokenizer.chat_template:
        tokenizer.chat_template = load_chat_template(source, revision, option="pretrained.model")
    return tokenizer, image_processor
