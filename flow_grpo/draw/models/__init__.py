"""Model adapters, found by the class that a pipeline folder names."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import AutoModel, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from flow_grpo.draw.models.base import ModelAdapter
from flow_grpo.draw.models.embeddings import cache_folder
from flow_grpo.draw.models.flux import FluxAdapter
from flow_grpo.draw.models.inputs import Conditioning, Schedule, Size, latent_shape
from flow_grpo.draw.models.lora_files import errors_told_once
from flow_grpo.draw.models.qwen_image import QwenImageAdapter
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.models.wan import WanAdapter
from flow_grpo.draw.models.z_image import ZImageAdapter
from flow_grpo.errors import UserError, check_model_folder, first_line
from flow_grpo.files import read_json

__all__ = [
    "Conditioning",
    "ModelAdapter",
    "Schedule",
    "Size",
    "check_model",
    "find_adapter",
    "load_adapter",
]

ADAPTERS: dict[str, type[ModelAdapter]] = {
    adapter.pipeline_class.__name__: adapter
    for adapter in (SD3Adapter, FluxAdapter, QwenImageAdapter, ZImageAdapter, WanAdapter)
}
LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
COMPOSED = (DiffusionPipeline, transformers.ProcessorMixin)
# What diffusers, transformers and safetensors raise when files of a model are missing or damaged.
LOADING = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)


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
    _check_parts(Path(model))
    try:
        with errors_told_once():
            pipeline = adapter.pipeline_class.from_pretrained(
                model,
                dtype=dtype,
                use_safetensors=True,  # a pickle could run code
            )
    except LOADING as error:
        why = error.__cause__ if isinstance(error, StrictDataclassError) else error
        reason = _damaged_file(Path(model)) or first_line(why or error)
        raise UserError(f"cannot load pretrained.model={model!r}: {reason}") from error
    for part in (p for p in pipeline.components.values() if isinstance(p, torch.nn.Module)):
        for name, parameter in part.named_parameters():
            if parameter.is_meta:  # it was in no file
                kind = type(part).__name__
                raise UserError(f"cannot load pretrained.model={model!r}: {kind} has no {name}")
    return adapter(
        pipeline,
        device=device,
        dtype=dtype,
        max_sequence_length=max_sequence_length,
        prompt_cache=cache,
        offload_idle=offload_idle,
    )


def check_model(model: str, size: Size, guidance: Mapping[str, float], fewest_steps: int) -> None:
    """Refuse what this model cannot do, by its configs alone; `guidance` has scales by field."""
    adapter = find_adapter(model)
    parts = {"pipeline": DiffusionPipeline.load_config(model)}
    try:
        for name in ("transformer", "vae"):
            parts[name] = AutoModel.load_config(model, subfolder=name)
        scheduler = FlowMatchEulerDiscreteScheduler.load_config(model, subfolder="scheduler")
        shape = adapter.grid(parts["transformer"], parts["vae"])
    except LOADING as error:
        reason = _damaged_file(Path(model)) or first_line(error)
        raise UserError(f"cannot load pretrained.model={model!r}: {reason}") from error
    latent_shape(shape, size)
    if fewest_steps < 2 and scheduler.get("shift_terminal"):
        raise UserError(
            f"{fewest_steps} step is too few: this model's scheduler stretches the noise levels "
            "between the first and the last; set sample.num_steps and sample.eval_num_steps to 2 "
            "or more"
        )
    adapter.check(parts["pipeline"], parts["transformer"], guidance)


def find_adapter(model: str) -> type[ModelAdapter]:
    """The one for the pipeline in this folder or of this hub id."""
    if os.path.isdir(model) and not (Path(model) / "model_index.json").is_file():
        raise UserError(f"{model} is not a diffusers pipeline folder: it has no model_index.json")
    check_model_folder(model, "model_index.json")
    try:
        index = DiffusionPipeline.load_config(model)
        name = index["_class_name"]
    except LOADING as error:
        reason = first_line(error)
        if not os.path.isdir(model):
            reason = f"no such folder, and not on the hub ({reason})"
        raise UserError(f"cannot load pretrained.model={model!r}: {reason}") from error
    if not isinstance(name, str) or name not in ADAPTERS:
        raise UserError(
            f"{model} is a {name}; pretrained.model must be one of {', '.join(ADAPTERS)}"
        )
    for part, kind in index.items():
        if isinstance(kind, list) and len(kind) == 2 and _may_run_code(*map(str, kind)):
            raise UserError(
                f"{model}: its {part} is {'.'.join(map(str, kind))}, which may run Python code of "
                "the model's own; name a model whose parts are diffusers' and transformers'"
            )
    return ADAPTERS[name]


def _may_run_code(library: str, name: str) -> bool:
    """Whether a part is loaded by a file beside it, or by a class that has to find out what it is,
    or what its own parts are."""
    kind = getattr(LIBRARIES.get(library), name, object)
    finds = re.match("Auto[A-Z]", name) or (isinstance(kind, type) and issubclass(kind, COMPOSED))
    return library != "None" and (library not in LIBRARIES or bool(finds))


def _check_parts(folder: Path) -> None:
    """Without these files transformers would go on, with an empty vocabulary or another size."""
    if not folder.is_dir():
        return
    for name, part in DiffusionPipeline.load_config(folder).items():
        if not isinstance(part, list) or len(part) != 2 or part[0] != "transformers":
            continue
        kind, choices = getattr(transformers, str(part[1]), None), []
        if not isinstance(kind, type):
            continue
        if issubclass(kind, transformers.PreTrainedModel):
            choices = [["config.json"]]
        elif issubclass(kind, transformers.PreTrainedTokenizerBase):
            vocabulary = dict(kind.vocab_files_names)
            whole = vocabulary.pop("tokenizer_file", None)
            choices = [["tokenizer_config.json", *vocabulary.values()]]
            if whole:
                choices.append(["tokenizer_config.json", whole])
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
