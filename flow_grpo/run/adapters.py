"""Find, read and check LoRA files in the formats of PEFT and diffusers, for both trainers.

PEFT and diffusers only warn about tensors that match no layer, and continue with the unmodified
model. They also apply whatever the adapter's config specifies, including methods that are not LoRA
and initialisations that replace the base weights (`init_lora_weights="pissa"`).
"""

import logging
import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from peft import LoraConfig
from safetensors import safe_open
from torch import Tensor

from flow_grpo.access import check_access, refusal
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import PICKLES
from flow_grpo.run.plan import is_lost
from flow_grpo.weights import check_finite, check_regular_files, check_stored_types

logger = logging.getLogger("flow_grpo")

# The fields of a LoraConfig that say how the tensors of a plain LoRA or DoRA are used.
SETTINGS = (
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "lora_bias", "fan_in_fan_out", "init_lora_weights"),
)
NOTES = (  # nothing that changes what is computed, or checked by itself
    *("auto_mapping", "inference_mode", "base_model_name_or_path", "revision", "task_type"),
    *("peft_type", "peft_version", "megatron_core", "qalora_group_size", "bias"),
)
STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the model's weights
SWITCHES = ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out")
LARGEST_ALPHA = 3e38  # that float32 holds
OF_PEFT = "base_model.model."  # in front of each name that PEFT saves


class Misfit(UserError):
    """Weights that are of another model."""


def downloaded(path: str | Path, field: str = "train.lora_path") -> Path:
    """Return the local file or folder of a path or hub id; `field` is the setting that names it."""
    local = Path(path)
    if local.exists():
        check_regular_files(field, local)
        return local
    start = f"cannot load a LoRA for this model from {path}"
    if is_lost(str(path)):
        raise UserError(f"{start}: there is no such folder")
    check_access(field, str(path), file="adapter_config.json")
    try:
        return Path(snapshot_download(str(path), ignore_patterns=["*/*", *PICKLES]))
    except (OSError, ValueError) as error:
        message = refusal(error, field, str(path))
        reason = f"{start}: no such folder, and not on the hub ({first_line(error)})"
        raise UserError(message or reason) from error


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a .safetensors file and its header metadata; reject NaN and inf."""
    with safe_open(file, "pt") as opened:
        names = opened.keys()
        check_stored_types(str(file), ((n, opened.get_slice(n).get_dtype()) for n in names))
        tensors = {name: opened.get_tensor(name) for name in names}
        metadata = opened.metadata() or {}
    check_finite(str(file), tensors.items())
    return tensors, metadata


def check_settings(where: Path, settings: dict) -> None:
    """Refuse what is more than LoRA: loaded as one, it would compute something else."""
    kind, start = settings.get("peft_type", "LORA"), settings.get("init_lora_weights")
    usual = LoraConfig().to_dict()
    more = [
        f"{name}={value!r}"
        for name, value in settings.items()
        if name not in (*SETTINGS, *NOTES)
        if value is True or isinstance(value, dict | list) or value != usual.get(name, value)
        if value
    ]
    if kind != "LORA":
        more = [f"peft_type={kind!r}", *more]
    if settings.get("bias", "none") != "none":
        more.append(f"bias={settings['bias']!r}")
    if start not in STARTS:
        more.append(f"init_lora_weights={start!r}")
    if more:
        raise UserError(f"{where} is no plain LoRA ({more[0]}), and only that can be loaded")


def check_values(where: Path, settings: dict, tensors: dict[str, Tensor]) -> None:
    """Reject values with which PEFT computes something else, or fails late or without end."""
    ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    targets = settings.get("target_modules")
    for name, found in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(found, dict):
            raise UserError(f"{where}: {name}={found!r} must be an object")
    widest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    for rank in (settings.get("r", 1), *ranks.values()):
        if type(rank) is not int or not 0 < rank <= widest:
            raise UserError(
                f"{where}: the rank {rank!r} must be a positive integer that fits its tensors, "
                f"which have at most {widest} rows or columns"
            )
    for alpha in (settings.get("lora_alpha", 1), *alphas.values()):
        if type(alpha) not in (int, float) or not abs(alpha) <= LARGEST_ALPHA:
            raise UserError(f"{where}: lora_alpha={alpha!r} must be a finite number")
    for name in SWITCHES:
        if settings.get(name) not in (None, False, True):
            raise UserError(f"{where}: {name}={settings[name]!r} must be true or false")
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise UserError(
                f"{where}: target_modules={targets!r} is no regular expression ({error})"
            ) from error


def lora_settings(where: Path, settings: dict) -> dict[str, Any]:
    """Return the arguments of a LoraConfig, with `lora_dropout` set to 0.

    With dropout the trained policy would differ from the behaviour policy, so that the importance
    ratio would not be 1 at the first update.
    """
    known = {name: value for name, value in settings.items() if name in SETTINGS}
    if dropout := known.get("lora_dropout"):
        logger.info("%s: lora_dropout=%s is set to 0: RL trains without dropout", where, dropout)
        known["lora_dropout"] = 0.0
    return known


def compare_layers(saved: dict[str, Tensor], layers: dict[str, Tensor]) -> None:
    """Raise a ValueError unless both have the same names and shapes."""
    if unknown := sorted(saved.keys() - layers.keys()):
        raise ValueError(
            f"{len(unknown)} of its {len(saved)} tensors fit no layer, like {unknown[0]}"
        )
    if missing := sorted(layers.keys() - saved.keys()):
        raise ValueError(f"it has no {missing[0]}")
    for name, tensor in saved.items():
        here, there = tuple(layers[name].shape), tuple(tensor.shape)
        if here != there:
            raise ValueError(f"{name} has shape {there} where this model needs {here}")
