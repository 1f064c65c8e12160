"""Find, read and check LoRA files in the formats of PEFT and diffusers, for both trainers.

PEFT and diffusers only warn about tensors that match no layer, and continue with the unmodified
model. They also apply everything that the adapter's config specifies, including methods other than
LoRA and initialisations that replace the base weights (`init_lora_weights="pissa"`).
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors import safe_open
from torch import Tensor

from flow_grpo.errors import UserError
from flow_grpo.training.plan import is_missing
from flow_grpo.training.weight_sources import download_lora
from flow_grpo.weight_checks import check_finite, check_regular_files, check_stored_dtypes

logger = logging.getLogger("flow_grpo")

# LoraConfig fields that define a plain LoRA or DoRA
LORA_CONFIG_FIELDS = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "lora_bias",
    "fan_in_fan_out",
    "init_lora_weights",
)
# fields that do not change the result, or are checked separately
IGNORED_FIELDS = (
    "auto_mapping",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "peft_type",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "bias",
)
# other initialisations change the base weights
SUPPORTED_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
BOOLEAN_FIELDS = ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out")
MAX_ALPHA = 3e38  # fits into float32
PEFT_PREFIX = "base_model.model."  # prefix of all tensor names that PEFT saves


class IncompatibleWeights(UserError):
    """Raised for weights of a different model."""


def resolve_lora_path(path: str | Path, field: str = "train.lora_path") -> Path:
    """Return the local path of a LoRA; `field` is the setting with its path or hub id."""
    local = Path(path)
    if local.exists():
        check_regular_files(field, local)
        return local
    if is_missing(str(path)):
        raise UserError("does not exist", field=field, value=str(path))
    return download_lora(str(path), field)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a .safetensors file and its header metadata; reject NaN and inf."""
    with safe_open(file, "pt") as opened:
        names = opened.keys()
        check_stored_dtypes(str(file), ((n, opened.get_slice(n).get_dtype()) for n in names))
        tensors = {name: opened.get_tensor(name) for name in names}
        metadata = opened.metadata() or {}
    check_finite(str(file), tensors.items())
    return tensors, metadata


def check_plain_lora(where: Path, settings: dict) -> None:
    """Reject a config with anything beyond plain LoRA, which would silently compute differently."""
    defaults = LoraConfig().to_dict()
    unsupported = [
        f"{name}={value!r}"
        for name, value in settings.items()
        if name not in (*LORA_CONFIG_FIELDS, *IGNORED_FIELDS) and value
        if value is True or isinstance(value, dict | list) or value != defaults.get(name, value)
    ]
    if (kind := settings.get("peft_type", "LORA")) != "LORA":
        unsupported.insert(0, f"peft_type={kind!r}")
    if settings.get("bias", "none") != "none":
        unsupported.append(f"bias={settings['bias']!r}")
    if (init := settings.get("init_lora_weights")) not in SUPPORTED_INITS:
        unsupported.append(f"init_lora_weights={init!r}")
    if unsupported:
        raise UserError(f"is not a plain LoRA ({unsupported[0]})", field=where)


def check_lora_values(where: Path, settings: dict, tensors: dict[str, Tensor]) -> None:
    """Reject values with which PEFT computes something else, fails late or never returns."""
    ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    targets = settings.get("target_modules")
    for name, found in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(found, dict):
            raise UserError("must be an object", field=f"{where}: {name}", value=found)
    widest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    for rank in (settings.get("r", 1), *ranks.values()):
        if type(rank) is not int or not 0 < rank <= widest:
            raise UserError(
                f"must be a positive integer of at most {widest}, the largest tensor dimension",
                field=f"{where}: rank",
                value=rank,
            )
    for alpha in (settings.get("lora_alpha", 1), *alphas.values()):
        if type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
            raise UserError("must be a finite number", field=f"{where}: lora_alpha", value=alpha)
    for name in BOOLEAN_FIELDS:
        if settings.get(name) not in (None, False, True):
            raise UserError("must be true or false", field=f"{where}: {name}", value=settings[name])
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise UserError(
                f"is not a valid regular expression ({error})",
                field=f"{where}: target_modules",
                value=targets,
            ) from error


def lora_config_kwargs(where: Path, settings: dict) -> dict[str, Any]:
    """Return the arguments of a LoraConfig, with `lora_dropout` set to 0.

    With dropout the trained policy would differ from the behaviour policy, so that the importance
    ratio would not be 1 at the first update.
    """
    known = {name: value for name, value in settings.items() if name in LORA_CONFIG_FIELDS}
    if dropout := known.get("lora_dropout"):
        logger.info("%s: lora_dropout=%s is set to 0: RL trains without dropout", where, dropout)
        known["lora_dropout"] = 0.0
    return known


def check_same_tensors(saved: Mapping[str, Tensor], layers: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless the saved tensors have the names and shapes of the layers."""
    if unknown := sorted(saved.keys() - layers.keys()):
        raise ValueError(
            f"{len(unknown)} of its {len(saved)} tensors fit no layer, such as {unknown[0]}"
        )
    if missing := sorted(layers.keys() - saved.keys()):
        raise ValueError(f"{missing[0]} is missing")
    for name, tensor in saved.items():
        shape, needed = tuple(tensor.shape), tuple(layers[name].shape)
        if shape != needed:
            raise ValueError(f"{name} has shape {shape}, but this model needs {needed}")
