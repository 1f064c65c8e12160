"""Load and merge LoRA in PEFT's format."""

from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.tuners import lora
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from torch import Tensor, nn

from flow_grpo.errors import UserError, first_line
from flow_grpo.perf.lora import lora_layers
from flow_grpo.rewards.loading import explain_load_errors
from flow_grpo.training.lora_files import (
    check_lora_values,
    check_plain_lora,
    lora_config_kwargs,
    read_tensors,
    resolve_lora_path,
)
from flow_grpo.training.lora_targets import select_target_modules
from flow_grpo.training.policy import ADAPTER_NAME, upcast_parameters
from flow_grpo.untrusted_files import read_json, reject_pickles
from flow_grpo.vlm.expert_layout import preserve_conversions
from flow_grpo.vlm.models.base import Family
from flow_grpo.weight_checks import check_finite, check_loading_report, quiet_transformers


def attach_lora(model: nn.Module, path: str | Path, field: str = "train.lora_path") -> None:
    """Add the LoRA at `path`, a directory or a hub id, to the model in at least float32.

    Raises:
        UserError: If it is not a plain LoRA, does not fit the model tensor by tensor, or has values
            that are not finite.
    """
    folder = resolve_lora_path(path, field)
    if folder.is_file():
        if folder.name != SAFETENSORS_WEIGHTS_NAME:
            raise UserError(
                f"must be a PEFT adapter directory or its {SAFETENSORS_WEIGHTS_NAME}",
                field=field,
                value=str(path),
            )
        folder = folder.parent
    settings, tensors = read_adapter(folder)
    kind = f"a LoRA of this {type(model).__name__}"
    with (
        explain_load_errors(field, str(path), kind),
        quiet_transformers(),
        preserve_conversions(model),
    ):
        config = LoraConfig(**lora_config_kwargs(folder, settings))
        model.add_adapter(config, adapter_name=ADAPTER_NAME)
        # PEFT creates layers in the model's dtype, which would round the file's values
        upcast_parameters(
            parameter for name, parameter in model.named_parameters() if "lora_" in name
        )
        report = model.load_adapter(
            adapter_name=ADAPTER_NAME,
            peft_config=config,
            adapter_state_dict=tensors,  # converts names of older model layouts
            hotswap=True,  # loads into the existing layers
            is_trainable=True,
            ignore_mismatched_sizes=True,  # listed in the report
        )
    check_loading_report(field, str(path), report.to_dict(), kind)
    loaded = ((name, weight) for name, weight in model.named_parameters() if "lora_" in name)
    check_finite(f"{field}={str(path)!r}", loaded)  # also as float32
    for layer in lora_layers(model):
        if isinstance(layer, lora.ParamWrapper):
            raise UserError(
                f"has LoRA on fused expert weights ({layer.parameter_name}), but only LoRA on "
                "linear layers is supported",
                field=field,
                value=str(path),
            )


def select_lora_layers(family: Family, text: str, freeze_vision: bool) -> list[str] | str:
    """Return PEFT's `target_modules` for `train.lora_target_modules`.

    The LM head is excluded because log-probabilities are computed from its weight directly.

    Args:
        family: Family of the model, which may be on the meta device.
        text: The setting, not empty.
        freeze_vision: Whether the vision tower is excluded.
    """
    tower, unused = _modules(family.tower), unused_layers(family)

    def exclude(name: str, layer: nn.Module) -> str:
        if layer in unused:
            return unused[layer]
        return "train.freeze_vision=True" if freeze_vision and layer in tower else ""

    return select_target_modules(family.model, text, exclude)


def unused_layers(family: Family) -> dict[nn.Module, str]:
    """Return the layers whose LoRA would have no effect and no gradient, with the reason."""
    skipped = dict.fromkeys(_modules(family.unused), "the model's forward pass skips them")
    return {**skipped, family.model.get_output_embeddings(): "the LM head is not called as a layer"}


def _modules(part: nn.Module | None) -> set[nn.Module]:
    return set() if part is None else set(part.modules())


def check_lora_is_used(family: Family, path: str, field: str = "train.lora_path") -> None:
    """Reject the LoRA of `attach_lora` if some of its layers have no effect.

    Raises:
        UserError: If it has such a layer.
    """
    unused = unused_layers(family)
    for name, layer in family.model.named_modules():
        if isinstance(layer, lora.LoraLayer) and layer in unused:
            raise UserError(
                f"has LoRA on {name}, which cannot be trained: {unused[layer]}",
                field=field,
                value=path,
                hint="merge it with flow-grpo export and set pretrained.model to the result",
            )


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a PEFT adapter.

    Raises:
        UserError: If a file is missing or damaged.
    """
    config, weights = folder / CONFIG_NAME, folder / SAFETENSORS_WEIGHTS_NAME
    for file in (config, weights):
        if not file.is_file():
            reject_pickles(folder)
            raise UserError(
                f"cannot be loaded as a LoRA of this model: it has no {file.name}", field=folder
            )
    settings = read_json(config)
    if not isinstance(settings, dict):
        raise UserError("must be a JSON object with the fields of a LoraConfig", field=config)
    check_plain_lora(config, settings)
    try:
        tensors, _ = read_tensors(weights)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot be read: {first_line(error)}", field=weights) from error
    check_lora_values(config, settings, tensors)
    return settings, tensors


def merge_lora(model: nn.Module) -> nn.Module:
    """Merge the LoRA of `attach_lora` into the weights and restore the plain layers.

    Raises:
        UserError: If the merged weights are not finite.
    """
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, lora.LoraLayer):
            try:
                layer.merge(safe_merge=True)
            except ValueError as error:
                raise UserError(
                    "cannot be merged: its sum with the model's weights is not finite",
                    field=f"LoRA of {name}",
                    hint="use an earlier checkpoint",
                ) from error
            owner, _, child = name.rpartition(".")
            setattr(model.get_submodule(owner), child, layer.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False  # otherwise save_pretrained looks for an adapter
    return model
