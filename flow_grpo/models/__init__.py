"""Model adapters, found by the class that a pipeline folder names."""

from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from flow_grpo.errors import UserError
from flow_grpo.models.base import Conditioning, ModelAdapter, Schedule
from flow_grpo.models.embeddings import cache_folder
from flow_grpo.models.sd3 import SD3Adapter

__all__ = ["Conditioning", "ModelAdapter", "SD3Adapter", "Schedule", "find_adapter", "load_adapter"]

ADAPTERS = {"StableDiffusion3Pipeline": SD3Adapter}


def load_adapter(
    model: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_sequence_length: int = 256,
    prompt_cache: str = "",
    offload_idle: bool = False,
) -> ModelAdapter:
    """Load a pipeline folder or hub id. What it is is checked before any weights are read."""
    adapter = find_adapter(model)
    cache = cache_folder(prompt_cache) if prompt_cache else None
    try:
        pipeline = adapter.pipeline_class.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot load pretrained.model={model!r}: {reason}") from error
    return adapter(
        pipeline,
        device=device,
        dtype=dtype,
        max_sequence_length=max_sequence_length,
        prompt_cache=cache,
        offload_idle=offload_idle,
    )


def find_adapter(model: str) -> type[SD3Adapter]:
    """The one for the pipeline in this folder or of this hub id."""
    if Path(model).is_dir() and not (Path(model) / "model_index.json").is_file():
        raise UserError(f"{model} is not a diffusers pipeline folder: it has no model_index.json")
    if "/" in model and Path(model).parent.is_dir() and not Path(model).exists():
        # a hub id would be asked for, and retried
        raise UserError(f"no model at pretrained.model={model!r}: there is no such folder")
    try:
        name = DiffusionPipeline.load_config(model)["_class_name"]
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot load pretrained.model={model!r}: no such folder, and not on the hub ({reason})"
        ) from error
    if name not in ADAPTERS:
        raise UserError(
            f"{model} is a {name}; pretrained.model must be one of {', '.join(ADAPTERS)}"
        )
    return ADAPTERS[name]
