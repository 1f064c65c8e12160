"""A trained checkpoint put into its model: a folder that transformers load by themselves."""

import logging
from pathlib import Path

import torch
from torch import nn
from transformers.utils import cached_file

from flow_grpo.answer.expert_layout import published_layout
from flow_grpo.answer.fields import ANSWER
from flow_grpo.answer.lora import attach_lora, merge_lora
from flow_grpo.answer.models import load_model, load_processors
from flow_grpo.config.saved import config_of_run
from flow_grpo.files import read_json
from flow_grpo.run.export import Source, refuse_existing, refuse_nonfinite, write_folder

CPU = torch.device("cpu")


def answers(source: Source, model: str) -> bool:
    """Whether the weights are of a model that answers, and not of one that draws."""
    if source.run is not None:
        config = read_json(source.run / "config.json")
        return isinstance(config, dict) and "question_format" in config
    try:
        return bool(cached_file(model, "config.json"))  # a pipeline has model_index.json
    except OSError:
        return False


def export(
    source: Source,
    model: str,
    out: Path,
    dtype: torch.dtype = torch.float32,
    revision: str = "main",
) -> None:
    """Write `model` with the weights of `source` to the new folder `out`, whole or not at all.

    LoRA is merged in float32, and all is stored as `dtype`.
    """
    refuse_existing(out)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    merged = _merged(source, model, revision).to(dtype)
    refuse_nonfinite(source.weights, merged, dtype)
    parts = [part for part in load_processors(model, revision) if part is not None]

    def fill(folder: Path) -> None:
        with published_layout(merged, merged.state_dict()):
            merged.save_pretrained(folder)
        for part in parts:
            part.save_pretrained(folder)

    write_folder(out, fill)


def _merged(source: Source, model: str, revision: str) -> nn.Module:
    if source.run is not None:
        config_of_run(source.run, ANSWER)  # imports a family of the user's own
    if not source.is_lora:
        return load_model(str(source.weights), CPU, torch.float32)
    base = load_model(model, CPU, torch.float32, revision)
    attach_lora(base, source.weights, "--checkpoint")
    return merge_lora(base)
