"""Load LoRA files of diffusers, PEFT, kohya or ComfyUI into a model, completely or not at all.

diffusers and PEFT only warn about tensors that match no layer, and leave the model unchanged.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders.lora_base import (
    LORA_ADAPTER_METADATA_KEY,
    LORA_WEIGHT_NAME_SAFE,
    LoraBaseMixin,
)
from diffusers.loaders.lora_pipeline import HunyuanVideoLoraLoaderMixin
from diffusers.utils import convert_unet_state_dict_to_peft
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from torch import Tensor

from flow_grpo.diffusion.models.kohya import from_kohya, is_kohya
from flow_grpo.errors import UserError, first_line
from flow_grpo.perf.lora import lora_layers
from flow_grpo.perf.quantization import preserve_quantized_weights
from flow_grpo.training.lora_files import (
    PEFT_PREFIX,
    IncompatibleWeights,
    check_lora_values,
    check_plain_lora,
    check_same_tensors,
    lora_config_kwargs,
    read_tensors,
    resolve_lora_path,
)
from flow_grpo.untrusted_files import parse_json, read_json, reject_pickles
from flow_grpo.weight_checks import check_finite, check_regular_files

TRANSFORMER = "transformer"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")  # to which diffusers attaches LoRA
ATTACH_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError)


@dataclass(frozen=True)
class LoraFile:
    """Content of a LoRA file."""

    path: Path
    tensors: dict[str, Tensor]  # by names such as "transformer.<layer>.lora_A.weight"
    settings: dict | None  # arguments of LoraConfig; None in old files of diffusers
    metadata: dict | None = None  # of diffusers: the settings, prefixed by the component

    def for_model(self, model: str) -> dict[str, Tensor]:
        """Return the tensors for one component of the pipeline, by their names in it."""
        return _with_prefix(self.tensors, model)


def lora_mixin(pipeline: type[DiffusionPipeline]) -> type[LoraBaseMixin]:
    """Return the class that saves LoRA files: the pipeline's, if it supports LoRA.

    The method of pipelines with a transformer and no text encoder to train is the same for all.
    """
    return pipeline if issubclass(pipeline, LoraBaseMixin) else HunyuanVideoLoraLoaderMixin


def attach_lora(
    transformer: ModelMixin,
    path: str | Path,
    pipeline: DiffusionPipeline | None = None,
    *,
    family: str = "",
) -> None:
    """Attach the LoRA at `path` to the transformer as the adapter "default".

    Args:
        transformer: Model to modify.
        path: Directory, file or hub id; see `read_lora`.
        pipeline: If given, its text encoders get their part of the LoRA too.
        family: Name of the pipeline class, if no pipeline is given.

    Raises:
        IncompatibleWeights: The LoRA was trained from another model.
    """
    family = type(pipeline).__name__ if pipeline is not None else family
    file = read_lora(path, family=family)
    try:
        with suppress_duplicate_errors():
            left = len(file.tensors) - _attach(transformer, file)
            for name in TEXT_ENCODERS if pipeline is not None else ():
                left -= _attach_to_encoder(pipeline, name, file)
    except torch.OutOfMemoryError:
        raise
    except ATTACH_ERRORS as error:
        raise IncompatibleWeights(
            f"does not fit this model: {first_line(error)}", field=file.path
        ) from error
    if left:
        raise IncompatibleWeights(
            f"has {left} tensors for other models than the {TRANSFORMER}", field=file.path
        )


def read_lora(path: str | Path, field: str = "train.lora_path", *, family: str = "") -> LoraFile:
    """Read and check a LoRA.

    Args:
        path: Directory written by diffusers or PEFT, a .safetensors file, or a hub id.
        field: Config field that names it, for messages.
        family: Name of the pipeline class, which the names of kohya and ComfyUI depend on. Without
            it they are not converted, and only the file is checked.
    """
    file = _find_lora_file(path, field)
    try:
        tensors, header = read_tensors(file)
        if file.name == SAFETENSORS_WEIGHTS_NAME:
            settings = read_json(file.with_name(CONFIG_NAME))
            if not isinstance(settings, dict):
                raise ValueError(f"{CONFIG_NAME} is not a JSON object")
            check_plain_lora(file.with_name(CONFIG_NAME), settings)
            check_lora_values(file.with_name(CONFIG_NAME), settings, tensors)
            names = {k: f"{TRANSFORMER}.{k.removeprefix(PEFT_PREFIX)}" for k in tensors}
            if repeated := sorted(k for k in tensors if PEFT_PREFIX + k in tensors):
                raise ValueError(
                    f"duplicate tensor {repeated[0]}, with and without {PEFT_PREFIX!r}"
                )
            return LoraFile(file, {names[k]: v for k, v in tensors.items()}, settings)
        if is_kohya(tensors):
            return _read_kohya(file, tensors, family)
        if named := next((k for k in tensors if k.startswith(PEFT_PREFIX)), None):
            raise ValueError(f"{named} has no alpha without the {CONFIG_NAME} that PEFT saves")
        metadata = parse_json(header.get(LORA_ADAPTER_METADATA_KEY, "null"), f"cannot read {file}")
        if not isinstance(metadata, dict | None):
            raise ValueError(f"{LORA_ADAPTER_METADATA_KEY} is not a JSON object")
        settings = {
            model: _with_prefix(metadata or {}, model) for model in (TRANSFORMER, *TEXT_ENCODERS)
        }
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise UserError(f"cannot be read: {first_line(error)}", field=file) from error
    for model, model_settings in settings.items():
        check_plain_lora(file, model_settings)
        own = _with_prefix(tensors, model)
        if model_settings and own:
            check_lora_values(file, model_settings, own)
    return LoraFile(file, tensors, settings[TRANSFORMER] or None, metadata)


def _read_kohya(file: Path, tensors: dict[str, Tensor], family: str) -> LoraFile:
    """Return the LoRA of a file with tensor names of kohya or ComfyUI; see `read_lora`."""
    if not family:
        return LoraFile(file, tensors, None)
    converted, settings = from_kohya(tensors, family, file)
    check_lora_values(file, settings, converted)
    return LoraFile(file, {f"{TRANSFORMER}.{k}": v for k, v in converted.items()}, settings)


def load_full_weights(transformer: ModelMixin, folder: Path) -> None:
    """Load all parameters from the .safetensors files in `folder`, which may lack buffers."""
    check_regular_files("weights", folder)
    missing = {name for name, _ in transformer.named_parameters()}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            saved, _ = read_tensors(path)
            if unknown := transformer.load_state_dict(saved, strict=False).unexpected_keys:
                raise IncompatibleWeights(
                    f"does not fit this model: unexpected tensor {unknown[0]}", field=folder
                )
            missing -= saved.keys()
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot be read: {first_line(error)}", field=folder) from error
    except RuntimeError as error:
        raise IncompatibleWeights(
            "does not fit this model: its tensors have different shapes", field=folder
        ) from error
    if missing:
        raise IncompatibleWeights(
            f"does not fit this model: missing tensor {min(missing)}", field=folder
        )


def _with_prefix(items: dict, model: str) -> dict:
    prefix = f"{model}."
    return {k.removeprefix(prefix): v for k, v in items.items() if k.startswith(prefix)}


def _find_lora_file(path: str | Path, field: str) -> Path:
    """Return the LoRA file at a path, in a directory or on the hub; reject several and pickles."""
    folder = resolve_lora_path(path, field)
    if folder.is_file():
        if folder.suffix != ".safetensors":
            raise UserError(
                "must be a .safetensors file, because unpickling can execute code", field=folder
            )
        if folder.name != SAFETENSORS_WEIGHTS_NAME:
            return folder
        found, folder = [folder], folder.parent
    else:
        found = sorted(folder.glob("*.safetensors"))
    peft_file = folder / SAFETENSORS_WEIGHTS_NAME
    if peft_file in found and not (folder / CONFIG_NAME).is_file():
        raise UserError(f"needs the {CONFIG_NAME} that PEFT saves with it", field=peft_file)
    if not found:
        reject_pickles(folder)
        names = f"{LORA_WEIGHT_NAME_SAFE}, {peft_file.name}"
        raise UserError(f"has neither a LoRA ({names}) nor a model", field=folder)
    if len(found) > 1:
        names = ", ".join(p.name for p in found[:3])
        raise UserError(f"has more than one LoRA ({names})", field=folder, hint="name one file")
    return found[0]


def _attach(transformer: ModelMixin, file: LoraFile) -> int:
    """Attach the transformer's part of a LoRA as the adapter "default".

    Returns:
        The number of its tensors.

    Raises:
        ValueError: If there are none, or they do not fit the layers.
    """
    tensors = file.for_model(TRANSFORMER)
    if not tensors:
        first = next(iter(file.tensors), "no tensors")
        raise ValueError(f"it has no tensors for a {TRANSFORMER}, but {first}")
    if file.settings is None:
        if not any(".lora_A." in name for name in tensors):
            tensors = convert_unet_state_dict_to_peft(tensors)
        named = {f"{TRANSFORMER}.{name}": tensor for name, tensor in tensors.items()}
        transformer.load_lora_adapter(named, adapter_name="default")
    else:
        kwargs = lora_config_kwargs(file.path, file.settings)
        with torch.random.fork_rng():  # for the initial weights, which are replaced below
            transformer.add_adapter(LoraConfig(**kwargs))
    check_same_tensors(tensors, get_peft_model_state_dict(transformer))
    for layer in lora_layers(transformer):  # PEFT would cast to the model's dtype
        for name in layer.adapter_layer_names:
            getattr(layer, name).to(torch.promote_types(transformer.dtype, torch.float32))
    set_peft_model_state_dict(transformer, tensors)
    check_finite(str(file.path), get_peft_model_state_dict(transformer).items())  # after the cast
    transformer.eval()  # new layers may have dropout
    return len(tensors)


def _attach_to_encoder(pipeline: DiffusionPipeline, name: str, file: LoraFile) -> int:
    """Attach the part of a LoRA for the text encoder `name`, if both exist.

    Returns:
        The number of its tensors.

    Raises:
        ValueError: If they do not fit the layers.
    """
    tensors, encoder = file.for_model(name), getattr(pipeline, name, None)
    if not tensors or encoder is None:
        return 0
    with preserve_quantized_weights(encoder):  # which diffusers would cast
        pipeline.load_lora_into_text_encoder(
            file.tensors,
            network_alphas=None,
            text_encoder=encoder,
            prefix=name,
            adapter_name="default",
            metadata=file.metadata,
        )
    found = len(get_peft_model_state_dict(encoder))
    if found != len(tensors):
        raise ValueError(f"it has {len(tensors)} tensors for {name}, which needs {found}")
    encoder.requires_grad_(False).eval()
    return found


@contextmanager
def suppress_duplicate_errors() -> Iterator[None]:
    """Context manager that suppresses error logs of diffusers, which also raises the errors."""
    handlers = logging.getLogger("diffusers").handlers

    def is_below_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    for handler in handlers:
        handler.addFilter(is_below_error)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_below_error)
