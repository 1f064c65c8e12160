"""Export a trained checkpoint as a standalone transformers model directory."""

import logging
from pathlib import Path

import torch
from torch import nn
from transformers.utils import cached_file

from flow_grpo.config.saved_config import load_run_config
from flow_grpo.training.export import (
    ExportSource,
    reject_existing,
    reject_nonfinite,
    write_folder_atomically,
)
from flow_grpo.untrusted_files import read_json
from flow_grpo.vlm.expert_layout import published_layout
from flow_grpo.vlm.fields import VLM_SPEC
from flow_grpo.vlm.lora import attach_lora, merge_lora
from flow_grpo.vlm.models import load_model, load_processors

CPU = torch.device("cpu")


def is_vlm_checkpoint(source: ExportSource, model: str) -> bool:
    """Return whether the weights are those of a VLM or language model, not of a pipeline."""
    if source.run is not None:
        config = read_json(source.run / "config.json")
        return isinstance(config, dict) and "question_format" in config
    try:
        return bool(cached_file(model, "config.json"))  # a pipeline has model_index.json
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
    merged = _load_merged_model(source, model, revision).to(dtype)
    reject_nonfinite(source.weights, merged, dtype)
    parts = [part for part in load_processors(model, revision) if part is not None]

    def fill(folder: Path) -> None:
        """Write the merged model in its published layout, and the tokenizer and processor."""
        with published_layout(merged, merged.state_dict()):
            merged.save_pretrained(folder)
        for part in parts:
            part.save_pretrained(folder)

    write_folder_atomically(out, fill)


def _load_merged_model(source: ExportSource, model: str, revision: str) -> nn.Module:
    """Return the model with the exported weights in float32 on the CPU; LoRA is merged."""
    if source.run is not None:
        load_run_config(source.run, VLM_SPEC)  # registers custom model families
    if not source.is_lora:
        return load_model(str(source.weights), CPU, torch.float32)
    base = load_model(model, CPU, torch.float32, revision)
    attach_lora(base, source.weights, "--checkpoint")
    return merge_lora(base)
