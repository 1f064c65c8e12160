"""Export a trained checkpoint as a standalone transformers model directory."""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig
from transformers.utils import cached_file

from flow_grpo.config.saved_config import load_run_config
from flow_grpo.modelscope_hub import local_model
from flow_grpo.rewards.loading import explain_load_errors, load_network
from flow_grpo.rewards.text.reward_model import KIND as REWARD_MODEL_KIND
from flow_grpo.training.export import (
    ExportSource,
    reject_existing,
    reject_nonfinite,
    write_folder_atomically,
)
from flow_grpo.untrusted_files import read_json
from flow_grpo.vlm.chat_template_file import read_chat_template
from flow_grpo.vlm.expert_layout import published_layout
from flow_grpo.vlm.fields import VLM_SPEC, VlmConfig
from flow_grpo.vlm.lora import attach_lora, merge_lora
from flow_grpo.vlm.models import load_model, load_processors
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.reward_models.classifier import (
    SCORE_FILE,
    build_classifier,
    classifier_class,
    find_pad_token,
    read_statistics,
    set_statistics,
)

CPU = torch.device("cpu")


def is_vlm_checkpoint(source: ExportSource, model: str) -> bool:
    """Return whether the weights are those of a VLM or language model, not of a pipeline."""
    if source.run is not None:
        config = read_json(source.run / "config.json")
        return isinstance(config, dict) and "question_format" in config
    try:
        # a pipeline has model_index.json
        return bool(cached_file(local_model(model), "config.json"))
    except OSError:
        return False


def export(
    source: ExportSource,
    model: str,
    out: Path,
    dtype: torch.dtype = torch.float32,
    revision: str = "main",
) -> None:
    """Write `model` with the weights of `source` atomically to the new directory `out`.

    LoRA is merged in float32; the result is stored as `dtype`.
    """
    reject_existing(out)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = None
    if source.run is not None:
        config = load_run_config(source.run, VLM_SPEC)  # registers custom model families
    if is_reward_model(source.weights):
        merged, parts = load_reward_model(source, model, revision, config)
    else:
        merged = _load_merged_model(source, model, revision)
        template = "" if config is None else read_chat_template(config.chat_template)
        processors = load_processors(model, revision, chat_template=template)
        parts = [part for part in processors if part is not None]
    merged = merged.to(dtype)
    reject_nonfinite(source.weights, merged, dtype)

    def fill(folder: Path) -> None:
        """Write the merged model in its published layout, and the tokenizer and processor."""
        with published_layout(merged, merged.state_dict()):
            merged.save_pretrained(folder)
        for part in parts:
            part.save_pretrained(folder)

    write_folder_atomically(out, fill)


def is_reward_model(weights: Path) -> bool:
    """Return whether a directory has the weights of a reward model, or its LoRA with the head."""
    if (weights / SCORE_FILE).is_file():
        return True
    config = weights / "config.json"
    architectures = read_json(config).get("architectures") if config.is_file() else None
    return any(each.endswith("SequenceClassification") for each in architectures or ())


def load_reward_model(
    source: ExportSource, model: str, revision: str, config: VlmConfig | None
) -> tuple[nn.Module, list[Any]]:
    """Return the sequence classifier with the exported weights in float32, and its processors.

    Args:
        source: The weights; LoRA is merged.
        model: The model that the run started from.
        revision: Its revision.
        config: Settings of the run, with the size of images and the chat template; None if unknown.
    """
    options = {}
    if config is not None:
        options = {
            "min_pixels": config.min_pixels,
            "max_pixels": config.max_pixels,
            "chat_template": read_chat_template(config.chat_template),
        }
    tokenizer, image_processor = load_processors(model, revision, **options)
    parts = [part for part in (tokenizer, image_processor) if part is not None]
    if not source.is_lora:
        with explain_load_errors("--checkpoint", str(source.weights), REWARD_MODEL_KIND):
            saved = AutoConfig.from_pretrained(source.weights, trust_remote_code=False)
        kind = classifier_class(saved)
        weights = str(source.weights)
        return load_network(kind, weights, dtype=torch.float32, kind=REWARD_MODEL_KIND), parts
    merged = _load_merged_model(source, model, revision)
    pad_token_id = find_pad_token(PromptEncoder(tokenizer, image_processor, merged))
    weights = {**merged.state_dict(), **load_file(source.weights / SCORE_FILE)}
    classifier = build_classifier(merged.config, weights, pad_token_id)
    set_statistics(classifier.config, read_statistics(source.weights / SCORE_FILE))
    return classifier, parts


def _load_merged_model(source: ExportSource, model: str, revision: str) -> nn.Module:
    """Return the model with the exported weights in float32 on the CPU; LoRA is merged."""
    if not source.is_lora:
        return load_model(str(source.weights), CPU, torch.float32)
    base = load_model(model, CPU, torch.float32, revision)
    attach_lora(base, source.weights, "--checkpoint")
    return merge_lora(base)
