"""Load LoRA in PEFT's format into a language model, completely or not at all."""

from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.tuners import lora
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from torch import Tensor, nn

from flow_grpo.answer.expert_layout import kept_conversions
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import read_json, refuse_pickles
from flow_grpo.rewards.loading import explained
from flow_grpo.run.adapters import (
    check_settings,
    check_values,
    downloaded,
    lora_settings,
    read_tensors,
)
from flow_grpo.run.policy import ADAPTER, widen
from flow_grpo.speed.lora import lora_layers
from flow_grpo.weights import check_finite, check_loading_report, quiet_transformers


def attach_lora(model: nn.Module, path: str | Path, field: str = "train.lora_path") -> None:
    """Add the LoRA at `path`, a folder or a hub id, to the model, in float32 or wider.

    Raises:
        UserError: If it is not a plain LoRA, does not fit the model tensor by tensor, or has values
            that are not finite.
    """
    folder = downloaded(path, field)
    if folder.is_file():
        if folder.name != SAFETENSORS_WEIGHTS_NAME:
            raise UserError(
                f"{field}={str(path)!r} must be a folder that PEFT wrote, or the "
                f"{SAFETENSORS_WEIGHTS_NAME} in it"
            )
        folder = folder.parent
    settings, tensors = _read(folder)
    kind = f"a LoRA of this {type(model).__name__}"
    with explained(field, str(path), kind), quiet_transformers(), kept_conversions(model):
        config = LoraConfig(**lora_settings(folder, settings))
        model.add_adapter(config, adapter_name=ADAPTER)
        # PEFT adds layers in the model's dtype, to which the file's values would be rounded
        widen(parameter for name, parameter in model.named_parameters() if "lora_" in name)
        report = model.load_adapter(
            adapter_name=ADAPTER,
            peft_config=config,
            adapter_state_dict=tensors,  # names of older model layouts are converted
            hotswap=True,  # into the existing layers
            is_trainable=True,
            ignore_mismatched_sizes=True,  # the report has them
        )
    check_loading_report(field, str(path), report.to_dict(), kind)
    loaded = ((name, weight) for name, weight in model.named_parameters() if "lora_" in name)
    check_finite(f"{field}={str(path)!r}", loaded)  # also as float32
    for layer in lora_layers(model):
        if isinstance(layer, lora.ParamWrapper):
            raise UserError(
                f"{field}={str(path)!r} has LoRA on fused expert weights "
                f"({layer.parameter_name}), and only LoRA on linear layers is supported"
            )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a PEFT adapter."""
    config, weights = folder / CONFIG_NAME, folder / SAFETENSORS_WEIGHTS_NAME
    for file in (config, weights):
        if not file.is_file():
            refuse_pickles(folder)
            raise UserError(f"{folder} cannot be loaded as a LoRA of this model: no {file.name}")
    settings = read_json(config)
    if not isinstance(settings, dict):
        raise UserError(f"{config} must be a JSON object with the fields of a LoraConfig")
    check_settings(config, settings)
    try:
        tensors, _ = read_tensors(weights)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {weights}: {first_line(error)}") from error
    check_values(config, settings, tensors)
    return settings, tensors


def merge_lora(model: nn.Module) -> nn.Module:
    """Merge the LoRA of `attach_lora` into the weights and restore the plain layers."""
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, lora.LoraLayer):
            try:
                layer.merge(safe_merge=True)
            except ValueError as error:
                raise UserError(
                    f"the LoRA of {name} cannot be merged: the sum with the model's weights is not "
                    "finite; use an earlier checkpoint"
                ) from error
            owner, _, place = name.rpartition(".")
            setattr(model.get_submodule(owner), place, layer.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False  # else save_pretrained looks for an adapter
    return model
