"""LoRA from a file onto a model: diffusers' format or PEFT's, all of it or an error.

diffusers and PEFT only warn of tensors that fit no layer, and go on with the model as it was.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from diffusers.utils import convert_unet_state_dict_to_peft
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from torch import Tensor

from flow_grpo.errors import UserError, first_line
from flow_grpo.files import parse_json, read_json, refuse_pickles
from flow_grpo.run.adapters import (
    OF_PEFT,
    Misfit,
    check_settings,
    check_values,
    compare_layers,
    downloaded,
    lora_settings,
    read_tensors,
)
from flow_grpo.speed.lora import lora_layers
from flow_grpo.speed.low_bits import stored_as_before
from flow_grpo.weights import check_finite, check_regular_files

TRANSFORMER = "transformer"
ENCODERS = ("text_encoder", "text_encoder_2")  # that diffusers puts LoRA on
WRONG = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError)


@dataclass(frozen=True)
class LoraFile:
    path: Path
    tensors: dict[str, Tensor]  # named like "transformer.<layer>.lora_A.weight"
    settings: dict | None  # of the LoraConfig; diffusers' older files have none
    metadata: dict | None = None  # diffusers' own: settings with the name of the model in front

    def of(self, model: str) -> dict[str, Tensor]:
        """The tensors for one model of the pipeline, named as in there."""
        return _with_prefix(self.tensors, model)


def attach_lora(
    transformer: ModelMixin, path: str | Path, pipeline: DiffusionPipeline | None = None
) -> None:
    """Put the LoRA at `path` on the transformer as the adapter "default".

    With the `pipeline` also what the file holds for its text encoders.
    """
    file = read_lora(path)
    try:
        with errors_told_once():
            left = len(file.tensors) - _attach(transformer, file)
            for name in ENCODERS if pipeline is not None else ():
                left -= _attach_to_encoder(pipeline, name, file)
    except torch.OutOfMemoryError:
        raise
    except WRONG as error:
        raise Misfit(f"{file.path} is of another model: {first_line(error)}") from error
    if left:
        raise Misfit(f"{file.path} has {left} tensors for other models than the {TRANSFORMER}")


def read_lora(path: str | Path, field: str = "train.lora_path") -> LoraFile:
    """A folder as diffusers or PEFT write it, one .safetensors file, or a hub id, which `field`
    names."""
    file = _find(path, field)
    try:
        tensors, header = read_tensors(file)
        if file.name == SAFETENSORS_WEIGHTS_NAME:
            settings = read_json(file.with_name(CONFIG_NAME))
            if not isinstance(settings, dict):
                raise ValueError(f"{CONFIG_NAME} is no JSON object")
            check_settings(file.with_name(CONFIG_NAME), settings)
            check_values(file.with_name(CONFIG_NAME), settings, tensors)
            names = {k: f"{TRANSFORMER}.{k.removeprefix(OF_PEFT)}" for k in tensors}
            if repeated := sorted(k for k in tensors if OF_PEFT + k in tensors):
                raise ValueError(f"it has {repeated[0]} twice, with and without {OF_PEFT!r}")
            return LoraFile(file, {names[k]: v for k, v in tensors.items()}, settings)
        metadata = parse_json(header.get(LORA_ADAPTER_METADATA_KEY, "null"), f"cannot read {file}")
        if not isinstance(metadata, dict | None):
            raise ValueError(f"its {LORA_ADAPTER_METADATA_KEY} is no JSON object")
        settings = {
            model: _with_prefix(metadata or {}, model) for model in (TRANSFORMER, *ENCODERS)
        }
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error
    for model, each in settings.items():
        check_settings(file, each)
        if each:
            check_values(file, each, _with_prefix(tensors, model))
    return LoraFile(file, tensors, settings[TRANSFORMER] or None, metadata)


def replace_weights(transformer: ModelMixin, folder: Path) -> None:
    """All parameters from the .safetensors files in `folder`. Buffers may be left out there."""
    check_regular_files("weights", folder)
    missing = {name for name, _ in transformer.named_parameters()}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            saved, _ = read_tensors(path)
            if unknown := transformer.load_state_dict(saved, strict=False).unexpected_keys:
                raise Misfit(f"{folder} is of another model: it has {unknown[0]}")
            missing -= saved.keys()
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {folder}: {first_line(error)}") from error
    except RuntimeError as error:
        raise Misfit(f"{folder} is of another model: its tensors have other shapes") from error
    if missing:
        raise Misfit(f"{folder} is of another model: it has no {min(missing)}")


def _with_prefix(items: dict, model: str) -> dict:
    prefix = f"{model}."
    return {k.removeprefix(prefix): v for k, v in items.items() if k.startswith(prefix)}


def _find(path: str | Path, field: str) -> Path:
    folder = downloaded(path, field)
    if folder.is_file():
        if folder.suffix != ".safetensors":
            raise UserError(f"{folder} must be a .safetensors file: a pickle can run code")
        if folder.name == SAFETENSORS_WEIGHTS_NAME:
            folder = folder.parent
        else:
            return folder
    theirs, ours = folder / SAFETENSORS_WEIGHTS_NAME, folder / LORA_WEIGHT_NAME_SAFE
    if theirs.is_file() and not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{theirs} needs the {CONFIG_NAME} that PEFT saves with it")
    found = [p for p in (theirs, ours) if p.is_file()] or sorted(folder.glob("*.safetensors"))
    if not found:
        refuse_pickles(folder)
        raise UserError(f"{folder} has neither a LoRA ({ours.name}, {theirs.name}) nor a model")
    if len(found) > 1:
        names = ", ".join(p.name for p in found[:3])
        raise UserError(f"{folder} has more than one LoRA ({names}); name one file")
    return found[0]


def _attach(transformer: ModelMixin, file: LoraFile) -> int:
    """The number of tensors that found their layer; all that are for the transformer, or none."""
    tensors = file.of(TRANSFORMER)
    if not tensors:
        first = next(iter(file.tensors), "nothing")
        raise ValueError(f"none of its tensors is for a {TRANSFORMER}; it has {first}")
    if file.settings is None:
        if not any(".lora_A." in name for name in tensors):
            tensors = convert_unet_state_dict_to_peft(tensors)
        named = {f"{TRANSFORMER}.{name}": tensor for name, tensor in tensors.items()}
        transformer.load_lora_adapter(named, adapter_name="default")
    else:
        known = lora_settings(file.path, file.settings)
        with torch.random.fork_rng():  # it draws weights, which are replaced below
            transformer.add_adapter(LoraConfig(**known))
    compare_layers(tensors, get_peft_model_state_dict(transformer))
    for layer in lora_layers(transformer):  # peft would round them to the dtype of the model
        for name in layer.adapter_layer_names:
            getattr(layer, name).to(torch.promote_types(transformer.dtype, torch.float32))
    set_peft_model_state_dict(transformer, tensors)
    check_finite(str(file.path), get_peft_model_state_dict(transformer).items())  # also as float32
    transformer.eval()  # new layers may have dropout
    return len(tensors)


def _attach_to_encoder(pipeline: DiffusionPipeline, name: str, file: LoraFile) -> int:
    tensors, encoder = file.of(name), getattr(pipeline, name, None)
    if not tensors or encoder is None:
        return 0
    with stored_as_before(encoder):  # all of which diffusers cast
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
        raise ValueError(f"it has {len(tensors)} tensors for {name}, which takes {found}")
    encoder.requires_grad_(False).eval()
    return found


@contextmanager
def errors_told_once() -> Iterator[None]:
    """diffusers logs errors that it also raises."""
    handlers = logging.getLogger("diffusers").handlers

    def is_no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    for handler in handlers:
        handler.addFilter(is_no_error)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_no_error)
