"""Model adapters, found by the class that a pipeline folder names."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoModel, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from flow_grpo.access import check_access, is_offline, refusal
from flow_grpo.config.custom import check_class
from flow_grpo.draw.fields import DRAW
from flow_grpo.draw.models.base import ModelAdapter
from flow_grpo.draw.models.embeddings import cache_folder
from flow_grpo.draw.models.flux import FluxAdapter
from flow_grpo.draw.models.flux2 import Flux2Adapter, Flux2KleinAdapter
from flow_grpo.draw.models.flux_kontext import FluxKontextAdapter
from flow_grpo.draw.models.inputs import Conditioning, Schedule, Size, latent_shape
from flow_grpo.draw.models.lora_files import errors_told_once
from flow_grpo.draw.models.processors import TOKENIZERS, load_pipeline
from flow_grpo.draw.models.qwen_image import QwenImageAdapter
from flow_grpo.draw.models.qwen_image_21 import QwenImage21Adapter
from flow_grpo.draw.models.qwen_image_edit import QwenImageEditAdapter, QwenImageEditPlusAdapter
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.models.wan import WanAdapter
from flow_grpo.draw.models.wan_5b import Wan5BAdapter
from flow_grpo.draw.models.wan_i2v import WanImageToVideoAdapter
from flow_grpo.draw.models.z_image import ZImageAdapter
from flow_grpo.errors import UserError, check_model_folder, first_line
from flow_grpo.files import read_json
from flow_grpo.weights import (
    check_finite,
    check_implementations,
    check_not_nan,
    check_regular_files,
    check_stored_weights,
)

__all__ = [
    "Conditioning",
    "ModelAdapter",
    "Schedule",
    "Size",
    "check_model",
    "find_adapter",
    "load_adapter",
    "take_model",
]

ADAPTERS: dict[str, type[ModelAdapter]] = {
    adapter.pipeline_class.__name__: adapter
    for adapter in (
        *(SD3Adapter, FluxAdapter, FluxKontextAdapter, Flux2Adapter, Flux2KleinAdapter),
        *(QwenImageAdapter, QwenImage21Adapter, QwenImageEditAdapter, QwenImageEditPlusAdapter),
        *(ZImageAdapter, WanAdapter, WanImageToVideoAdapter),
    )
}
LATE_GUIDANCE = "sample.guidance_scale_2"
LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
COMPOSED = (DiffusionPipeline, transformers.ProcessorMixin)
# What diffusers, transformers and safetensors raise when files of a model are missing or damaged.
LOADING = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError),
    *(ArithmeticError, SafetensorError, StrictDataclassError),
)


def take_model(field: str, name: str, found: Any) -> None:
    """Add a family of the user's own, or put it in the place of ours."""
    check_class(field, found, ModelAdapter)
    if not hasattr(found, "pipeline_class"):
        raise UserError(f"{field}: {found.__name__} must say its pipeline_class")
    if (own := found.pipeline_class.__name__) != name:
        raise UserError(f"{field} is for {own}; name it so, as a model_index.json does")
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
    """Load a pipeline folder or hub id. What it is is checked before any weights are read. Other
    options are those of a ModelAdapter."""
    adapter = find_adapter(model)
    cache = cache_folder(prompt_cache) if prompt_cache else None
    _check_parts(Path(model))
    try:
        _check_implementations(model)
        for part in sorted(Path(model).glob("*/")):
            check_stored_weights(part)
            for config in sorted(part.glob("*config.json")):
                check_not_nan("pretrained.model", part, read_json(config))
        with errors_told_once():
            pipeline = load_pipeline(
                adapter.pipeline_class,
                model,
                dtype=dtype,
                use_safetensors=True,  # a pickle could run code
            )
    except LOADING as error:
        why = error.__cause__ if isinstance(error, StrictDataclassError) else error
        reason = _damaged_file(Path(model)) or first_line(why or error)
        told = refusal(error, "pretrained.model", model)
        raise UserError(told or f"cannot load pretrained.model={model!r}: {reason}") from error
    for part in (p for p in pipeline.components.values() if isinstance(p, torch.nn.Module)):
        for name, parameter in part.named_parameters():
            if parameter.is_meta:  # it was in no file
                kind = type(part).__name__
                raise UserError(f"cannot load pretrained.model={model!r}: {kind} has no {name}")
        kind = type(part).__name__
        check_finite(f"pretrained.model={model!r}: {kind}", part.state_dict().items())
    return adapter(
        pipeline,
        device=device,
        dtype=dtype,
        max_sequence_length=max_sequence_length,
        prompt_cache=cache,
        **options,
    )


def check_size(model: str, size: Size) -> dict[str, Any]:
    """Reject a size that this model cannot draw; returns the configs that say so, by part."""
    adapter, parts = find_adapter(model), {}
    try:
        for name in ("transformer", "vae"):
            parts[name] = AutoModel.load_config(model, subfolder=name)
        shape = adapter.grid(parts["transformer"], parts["vae"])
    except LOADING as error:
        reason = _damaged_file(Path(model)) or first_line(error)
        raise UserError(f"cannot load pretrained.model={model!r}: {reason}") from error
    latent_shape(shape, size)
    return parts


def check_model(
    model: str,
    size: Size,
    guidance: Mapping[str, float],
    fewest_steps: int,
    *,
    sharded: bool = False,
) -> None:
    """Refuse what this model cannot do, by its configs alone; `guidance` has scales by field."""
    adapter = find_adapter(model)
    parts = {"pipeline": DiffusionPipeline.load_config(model), **check_size(model, size)}
    try:
        scheduler = FlowMatchEulerDiscreteScheduler.load_config(model, subfolder="scheduler")
    except LOADING as error:
        reason = _damaged_file(Path(model)) or first_line(error)
        raise UserError(f"cannot load pretrained.model={model!r}: {reason}") from error
    if fewest_steps < 2 and scheduler.get("shift_terminal"):
        raise UserError(
            f"{fewest_steps} step is too few: this model's scheduler stretches the noise levels "
            "between the first and the last; set sample.num_steps and sample.eval_num_steps to 2 "
            "or more"
        )
    has_two = parts["pipeline"].get("boundary_ratio") is not None
    if has_two and sharded:  # processes may be at different ones, and would wait for each other
        raise UserError(
            f"{model} has two transformers, which does not go with ZeRO-3 or FSDP; take ZeRO-2 or "
            "no engine"
        )
    if (late := guidance.get(LATE_GUIDANCE)) is not None and not (
        has_two and any(adapter.is_guided(g) for n, g in guidance.items() if n != LATE_GUIDANCE)
    ):
        why = "without sample.guidance_scale" if has_two else "with one transformer"
        raise UserError(f"{LATE_GUIDANCE}={late} has no effect {why}; leave it out")
    adapter.check(parts["pipeline"], parts["transformer"], guidance)


def find_adapter(model: str) -> type[ModelAdapter]:
    """The one for the pipeline in this folder or of this hub id."""
    check_regular_files("pretrained.model", model)
    if os.path.isdir(model) and not (Path(model) / "model_index.json").is_file():
        raise UserError(f"{model} is not a diffusers pipeline folder: it has no model_index.json")
    check_model_folder(model, "model_index.json")
    known = DRAW.models()
    check_access("pretrained.model", model, file="model_index.json", known=known)
    try:
        index = DiffusionPipeline.load_config(model)
        name = index["_class_name"]
    except LOADING as error:
        reason = first_line(error)
        if not os.path.isdir(model):
            hub = "in the cache, and HF_HUB_OFFLINE is set" if is_offline() else "on the hub"
            reason = f"no such folder, and not {hub} ({reason})"
        told = refusal(error, "pretrained.model", model, known=known)
        raise UserError(told or f"cannot load pretrained.model={model!r}: {reason}") from error
    if not isinstance(name, str) or name not in ADAPTERS:
        raise UserError(
            f"{model} is a {name}; pretrained.model must be one of {', '.join(ADAPTERS)}, or of a "
            "family of your own (custom_models)"
        )
    for part, kind in index.items():
        if kind == ["transformers", ADAPTERS[name].processors.get(part)]:
            continue  # which we put together ourselves
        if isinstance(kind, list) and len(kind) == 2 and _may_run_code(*map(str, kind)):
            raise UserError(
                f"{model}: its {part} is {'.'.join(map(str, kind))}, which may run Python code of "
                "the model's own; name a model whose parts are diffusers' and transformers'"
            )
    return family_of(name, index)


def family_of(name: str, pipeline: Mapping[str, Any]) -> type[ModelAdapter]:
    """By the name of the pipeline's class and its config: Wan 2.2 5B goes by either name of Wan."""
    family = ADAPTERS[name]
    is_5b = family in (WanAdapter, WanImageToVideoAdapter) and pipeline.get("expand_timesteps")
    return Wan5BAdapter if is_5b else family


def _may_run_code(library: str, name: str) -> bool:
    """Whether a part is loaded by a file beside it, or by a class that has to find out what it is,
    or what its own parts are."""
    kind = getattr(LIBRARIES.get(library), name, object)
    finds = re.match("Auto[A-Z]", name) or (isinstance(kind, type) and issubclass(kind, COMPOSED))
    return library != "None" and (library not in LIBRARIES or bool(finds))


def _check_implementations(model: str) -> None:
    """Reject a text encoder whose config.json selects kernels from the hub."""
    for name, part in DiffusionPipeline.load_config(model).items():
        kind = getattr(transformers, str(part[1]), None) if _is_part(part, "transformers") else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            config, _ = transformers.PretrainedConfig.get_config_dict(model, subfolder=name)
            check_implementations("pretrained.model", f"{model}/{name}", config)


def _is_part(value: Any, library: str) -> bool:
    """Whether this value of a model_index.json names a class of `library`."""
    return isinstance(value, list) and len(value) == 2 and value[0] == library


def _check_parts(folder: Path) -> None:
    """Without these files transformers would go on, with an empty vocabulary or another size."""
    if not folder.is_dir():
        return
    for name, part in DiffusionPipeline.load_config(folder).items():
        if not _is_part(part, "transformers"):
            continue
        kind = TOKENIZERS.get(str(part[1])) or getattr(transformers, str(part[1]), None)
        choices = []
        if not isinstance(kind, type):
            continue
        if issubclass(kind, transformers.PreTrainedModel):
            choices = [["config.json"]]
        elif issubclass(kind, transformers.PreTrainedTokenizerBase):
            vocabulary = dict(kind.vocab_files_names)
            whole = vocabulary.pop("tokenizer_file", None)
            names = [n for n in (list(vocabulary.values()), [whole] if whole else []) if n] or [[]]
            choices = [["tokenizer_config.json", *each] for each in names]
        lacking = [[f for f in files if not (folder / name / f).is_file()] for files in choices]
        if lacking and all(lacking):
            files = " or ".join(map(", ".join, lacking))
            raise UserError(f"cannot load pretrained.model='{folder}': {name} has no {files}")


def _damaged_file(folder: Path) -> str:
    """A file that cannot be read: the libraries may not name it."""
    for path in sorted(folder.glob("*/*")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif path.suffix == ".json":
                read_json(path)
        except (UserError, OSError, SafetensorError) as error:
            return f"{path} is damaged ({first_line(error)})"
    return ""
