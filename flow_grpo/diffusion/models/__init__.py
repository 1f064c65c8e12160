"""Model adapters, selected by the pipeline class in model_index.json, and checks of models."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoModel, DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from flow_grpo.config.custom import check_class
from flow_grpo.config.registry import Registry
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.models.base import ModelAdapter
from flow_grpo.diffusion.models.inputs import Conditioning, Schedule, Size, latent_shape
from flow_grpo.diffusion.models.lora_files import suppress_duplicate_errors
from flow_grpo.diffusion.models.model_files import (
    PIPELINE_LOAD_ERRORS,
    check_model_files,
    load_error,
    may_run_code,
)
from flow_grpo.diffusion.models.processors import load_pipeline
from flow_grpo.diffusion.models.prompt_cache import make_cache_folder
from flow_grpo.diffusion.models.wan import WanAdapter
from flow_grpo.diffusion.models.wan_5b import Wan5BAdapter
from flow_grpo.diffusion.models.wan_i2v import WanImageToVideoAdapter
from flow_grpo.errors import UserError, check_model_folder, first_line
from flow_grpo.hub_access import check_hub_access, hub_error_message, is_offline
from flow_grpo.weight_checks import check_finite, check_regular_files

__all__ = [
    "Conditioning",
    "ModelAdapter",
    "Schedule",
    "Size",
    "build_meta_transformer",
    "check_model",
    "find_adapter",
    "load_adapter",
    "register_model",
]

ADAPTERS: Registry[type[ModelAdapter]] = Registry(
    "pipeline class",
    {
        "StableDiffusion3Pipeline": f"{__name__}.sd3:SD3Adapter",
        "FluxPipeline": f"{__name__}.flux:FluxAdapter",
        "FluxKontextPipeline": f"{__name__}.flux_kontext:FluxKontextAdapter",
        "Flux2Pipeline": f"{__name__}.flux2:Flux2Adapter",
        "Flux2KleinPipeline": f"{__name__}.flux2:Flux2KleinAdapter",
        "QwenImagePipeline": f"{__name__}.qwen_image:QwenImageAdapter",
        "QwenImage21Pipeline": f"{__name__}.qwen_image_21:QwenImage21Adapter",
        "QwenImageEditPipeline": f"{__name__}.qwen_image_edit:QwenImageEditAdapter",
        "QwenImageEditPlusPipeline": f"{__name__}.qwen_image_edit:QwenImageEditPlusAdapter",
        "ZImagePipeline": f"{__name__}.z_image:ZImageAdapter",
        "HunyuanVideo15Pipeline": f"{__name__}.hunyuan_video15:HunyuanVideo15Adapter",
        "HunyuanVideo15ImageToVideoPipeline": (
            f"{__name__}.hunyuan_video15_i2v:HunyuanVideo15ImageToVideoAdapter"
        ),
        "LTX2Pipeline": f"{__name__}.ltx2:LTX2Adapter",
        "LTX2ImageToVideoPipeline": f"{__name__}.ltx2:LTX2Adapter",
        "WanPipeline": f"{__name__}.wan:WanAdapter",
        "WanImageToVideoPipeline": f"{__name__}.wan_i2v:WanImageToVideoAdapter",
        "WanVideoToVideoPipeline": f"{__name__}.wan_v2v:WanVideoToVideoAdapter",
    },
)
GUIDANCE_2_FIELD = "sample.guidance_scale_2"


def register_model(field: str, name: str, found: Any) -> None:
    """Register a custom model family, possibly replacing a built-in one.

    Args:
        field: Config field that names the class, for messages.
        name: Name of its pipeline class, as in model_index.json.
        found: The class.

    Raises:
        UserError: If the class does not define `pipeline_class`, or adapts another one than `name`.
    """
    check_class(field, found, ModelAdapter)
    if not hasattr(found, "pipeline_class"):
        raise UserError(f"must define pipeline_class in {found.__name__}", field=field)
    if (expected := found.pipeline_class.__name__) != name:
        raise UserError(
            f"is registered for the pipeline class {name!r} but adapts {expected}",
            field=field,
            hint=f"use the key {expected!r}",
        )
    ADAPTERS[name] = found


def load_adapter(
    model: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_sequence_length: int = 256,
    prompt_cache: str = "",
    **options: Any,
) -> ModelAdapter:
    """Load a model and wrap it in the adapter of its family.

    Its files are checked before any weights are read.

    Args:
        model: Pipeline directory or hub id.
        device: Device of the transformer.
        dtype: Dtype of the frozen weights.
        max_sequence_length: Maximum number of prompt tokens.
        prompt_cache: Directory of cached embeddings; "" for none.
        **options: Further arguments of `ModelAdapter`.
    """
    adapter = find_adapter(model)
    cache = make_cache_folder(prompt_cache) if prompt_cache else None
    try:
        check_model_files(model)
        with suppress_duplicate_errors():
            pipeline = load_pipeline(
                adapter.pipeline_class,
                model,
                dtype=dtype,
                use_safetensors=True,  # unpickling could execute code
            )
    except PIPELINE_LOAD_ERRORS as error:
        if message := hub_error_message(error, "pretrained.model", model):
            raise UserError(message) from error
        raise load_error(model, error) from error
    for component in pipeline.components.values():
        if not isinstance(component, torch.nn.Module):
            continue
        kind = type(component).__name__
        for name, parameter in component.named_parameters():
            if parameter.is_meta:  # not in any file
                raise load_error(model, f"{kind} has no {name}")
        check_finite(f"pretrained.model={model!r}: {kind}", component.state_dict().items())
    return adapter(
        pipeline,
        device=device,
        dtype=dtype,
        max_sequence_length=max_sequence_length,
        prompt_cache=cache,
        **options,
    )


def check_size(model: str, size: Size) -> dict[str, Any]:
    """Reject a size that the model cannot generate.

    Returns:
        The configs of its transformer and VAE.
    """
    adapter, parts = find_adapter(model), {}
    try:
        for name in ("transformer", "vae"):
            parts[name] = AutoModel.load_config(model, subfolder=name)
        grid = adapter.grid(parts["transformer"], parts["vae"])
    except PIPELINE_LOAD_ERRORS as error:
        raise load_error(model, error) from error
    latent_shape(grid, size)
    return parts


def build_meta_transformer(model: str) -> torch.nn.Module:
    """Return the (first) transformer on the meta device, without reading its weights."""
    try:
        config = AutoModel.load_config(model, subfolder="transformer")
        with torch.device("meta"):
            return AutoModel.from_config(config)
    except PIPELINE_LOAD_ERRORS as error:
        raise load_error(model, error) from error


def check_model(
    model: str,
    size: Size,
    guidance: Mapping[str, float],
    fewest_steps: int,
    *,
    alternates: bool = True,
) -> None:
    """Reject settings that the model does not support, from its config files only.

    Args:
        model: Pipeline directory or hub id.
        size: Size of the samples.
        guidance: Guidance scales by config field.
        fewest_steps: Smallest number of sampling steps.
        alternates: Whether processes can run different transformers; not with ZeRO-3 and FSDP.
    """
    adapter = find_adapter(model)
    parts = {"pipeline": DiffusionPipeline.load_config(model), **check_size(model, size)}
    try:
        scheduler = FlowMatchEulerDiscreteScheduler.load_config(model, subfolder="scheduler")
    except PIPELINE_LOAD_ERRORS as error:
        raise load_error(model, error) from error
    if fewest_steps < 2 and scheduler.get("shift_terminal"):
        raise UserError(
            f"{fewest_steps} sampling step is too few: the model's scheduler sets shift_terminal, "
            "which needs at least 2",
            hint="set sample.num_steps and sample.eval_num_steps to at least 2",
        )
    has_two = parts["pipeline"].get("boundary_ratio") is not None
    if has_two and not alternates:  # ranks running different transformers would deadlock
        raise UserError(
            "has two transformers, which is incompatible with ZeRO-3 and FSDP1",
            field="pretrained.model",
            value=model,
            hint="use FSDP2, ZeRO-2 or DDP",
        )
    if (late := guidance.get(GUIDANCE_2_FIELD)) is not None and not (
        has_two and any(adapter.is_guided(g) for n, g in guidance.items() if n != GUIDANCE_2_FIELD)
    ):
        why = "for a model with one transformer"
        if has_two:
            why = "while guidance is off (sample.guidance_scale)"
        raise UserError(f"has no effect {why}", field=GUIDANCE_2_FIELD, value=late, hint="unset it")
    adapter.check(parts["pipeline"], parts["transformer"], guidance)


def find_adapter(model: str) -> type[ModelAdapter]:
    """Return the adapter class of a model; reject models that may execute code."""
    check_regular_files("pretrained.model", model)
    if os.path.isdir(model) and not (Path(model) / "model_index.json").is_file():
        raise UserError(
            "is not a diffusers pipeline: it has no model_index.json",
            field="pretrained.model",
            value=model,
        )
    check_model_folder(model, "model_index.json")
    known = DIFFUSION_SPEC.models()
    check_hub_access("pretrained.model", model, file="model_index.json", known=known)
    try:
        index = DiffusionPipeline.load_config(model)
        name = index["_class_name"]
    except PIPELINE_LOAD_ERRORS as error:
        if message := hub_error_message(error, "pretrained.model", model, known=known):
            raise UserError(message) from error
        reason = first_line(error)
        if not os.path.isdir(model):
            hub = "in the cache, and HF_HUB_OFFLINE is set" if is_offline() else "on the hub"
            reason = f"no such directory, and not {hub} ({reason})"
        raise UserError(
            f"cannot be loaded: {reason}", field="pretrained.model", value=model
        ) from error
    if not isinstance(name, str) or name not in ADAPTERS:
        raise UserError(
            f"is a {name}; supported are {', '.join(ADAPTERS)}",
            field="pretrained.model",
            value=model,
            hint="add a custom family with custom_models",
        )
    for part, kind in index.items():
        if kind == ["transformers", ADAPTERS[name].processors.get(part)]:
            continue  # assembled by processors.py from classes that it names
        if isinstance(kind, list) and len(kind) == 2 and may_run_code(*map(str, kind)):
            raise UserError(
                f"has the component {part} = {'.'.join(map(str, kind))}, which may execute code of "
                "the model",
                field="pretrained.model",
                value=model,
                hint="use a model with components of diffusers and transformers only",
            )
    return resolve_adapter(name, index)


def resolve_adapter(name: str, pipeline: Mapping[str, Any]) -> type[ModelAdapter]:
    """Return the adapter by pipeline class and config: Wan 2.2 5B uses the class of either Wan."""
    family = ADAPTERS[name]
    is_5b = family in (WanAdapter, WanImageToVideoAdapter) and pipeline.get("expand_timesteps")
    return Wan5BAdapter if is_5b else family
