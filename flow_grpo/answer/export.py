"""A trained checkpoint put into its model: a folder that transformers load by themselves."""

import logging
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers.utils import cached_file

from flow_grpo import disk
from flow_grpo.answer.models import load_model, load_processors
from flow_grpo.draw.export import Source
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import read_json
from flow_grpo.rewards.loading import explained

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
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists; choose another --out or remove it")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    merged = _merged(source, model, revision).to(dtype)
    parts = [part for part in load_processors(model, revision) if part is not None]
    partial = out.with_name(f".partial-{out.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for part in (merged, *parts):
            part.save_pretrained(partial)
        disk.publish(partial, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _merged(source: Source, model: str, revision: str) -> nn.Module:
    if not source.is_lora:
        return load_model(str(source.weights), CPU, torch.float32)
    base = load_model(model, CPU, torch.float32, revision)
    with explained("--checkpoint", str(source.weights), f"a LoRA of {model}"):
        return PeftModel.from_pretrained(base, source.weights).merge_and_unload()
