"""Families of models that answer, one file each, found by the `model_type` of a model's config.

All files of this folder are imported, so that a new one is found.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from flow_grpo.answer.fields import ANSWER
from flow_grpo.answer.models.base import FAMILIES, Family
from flow_grpo.answer.models.text import TextModel, is_text_model
from flow_grpo.config.custom import check_class
from flow_grpo.errors import UserError
from flow_grpo.files import read_json
from flow_grpo.rewards.loading import explained
from flow_grpo.speed.low_bits import FULL, NF4, to_low_bits
from flow_grpo.weights import (
    check_finite,
    check_implementations,
    check_loading_report,
    check_not_nan,
    check_stored_weights,
    quiet_transformers,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

KIND = "a language model"


def take_model(field: str, name: str, found: Any) -> None:
    """Add a family of the user's own, or put it in the place of ours."""
    check_class(field, found, Family)
    if name not in found.names:
        raise UserError(f"{field} names a class with names={found.names}; add {name!r} to them")
    FAMILIES[name] = found


def family_of(model: nn.Module) -> Family:
    """The family of a model that `load_model` loaded."""
    return _known(model.config)(model)


def _known(config: PretrainedConfig) -> type[Family] | None:
    """The family of a model; a language model without one of its own has that of all of them."""
    return FAMILIES.get(config.model_type) or (TextModel if is_text_model(config) else None)


def find_family(source: str, revision: str = "main") -> type[Family]:
    """The family of the model in a folder or under a hub id; its weights are not read."""
    with explained("pretrained.model", source, KIND, ANSWER.models()):
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        raw, _ = config.get_config_dict(source, revision=revision)
    if (family := _known(config)) is None:
        names = [name for family in FAMILIES.values() for name in family.names.values()]
        raise UserError(
            f"pretrained.model={source!r} is a {(config.architectures or [config.model_type])[0]}, "
            f"and must be one of {', '.join(dict.fromkeys(names))}, a language model of "
            "transformers, or of a family of your own (custom_models)"
        )
    check_implementations("pretrained.model", source, raw)
    check_not_nan("pretrained.model", source, raw)
    return family


def load_model(
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    revision: str = "main",
    base_precision: str = FULL,
) -> nn.Module:
    """Load a model from the hub or a folder.

    Raises:
        UserError: If no family supports it, if its files have missing or unexpected tensors, or if
            a value is not finite.
    """
    family = find_family(source, revision)
    with explained("pretrained.model", source, KIND), quiet_transformers():
        model, report = family.loader.from_pretrained(
            source,
            dtype=dtype,
            revision=revision,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report has them
            trust_remote_code=False,
        )
    check_loading_report("pretrained.model", source, report, f"a {type(model).__name__}")
    with explained("pretrained.model", source, KIND):
        folder = Path(cached_file(source, "config.json", revision=revision)).parent
        check_stored_weights(folder, "model*.safetensors")
    check_finite(f"pretrained.model={source!r}", model.state_dict().items())
    rotary = ((n, b) for n, b in model.named_buffers() if n.endswith("inv_freq"))  # of the config
    check_finite(f"pretrained.model={source!r}", rotary)
    if getattr(model, "peft_config", None):  # transformers loads an adapter from the same folder
        raise UserError(
            f"pretrained.model={source!r} contains both a model and an adapter "
            "(adapter_config.json); move the adapter to its own folder and set train.lora_path, or "
            "merge the two"
        )
    if base_precision != FULL:
        to_low_bits([model.model], base_precision, device)  # all but the head
    return model.to(device).eval()


def check_room(
    source: str, room: int, dtype: torch.dtype, revision: str = "main", base_precision: str = FULL
) -> None:
    """Refuse a model with more bytes of weights than a GPU has: `room`. Each holds all of them
    while they load, sharded or not, and the default engine does while it samples."""
    needed = _weight_bytes(source, dtype, revision, base_precision)
    if needed > room:
        out = "a smaller model, or GPUs with more"
        if base_precision != NF4 and (less := _weight_bytes(source, dtype, revision, NF4)) < room:
            out = f"--config.pretrained.base_precision=nf4, {_gigabytes(less)}"
        raise UserError(
            f"pretrained.model={source!r} has {_gigabytes(needed)} of weights, and a GPU, which "
            f"holds all of them at least while they load, has {_gigabytes(room)}; use {out}"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _weight_bytes(source: str, dtype: torch.dtype, revision: str, base_precision: str) -> int:
    """Without loading any."""
    model = empty_model(source, revision, dtype)
    if base_precision != FULL:
        to_low_bits([model.model], base_precision, torch.device("meta"))
    return sum(parameter.nbytes for parameter in model.parameters())


def empty_model(
    source: str, revision: str = "main", dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return the model on the meta device, without reading its weights."""
    family = find_family(source, revision)
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    with torch.device("meta"):
        return family.loader.from_config(config, dtype=dtype, trust_remote_code=False)


def load_processors(
    source: str, revision: str = "main", *, min_pixels: int = 0, max_pixels: int = 0
) -> tuple[PreTrainedTokenizerBase, Any]:
    """The tokenizer and the image processor, None for a model that sees no pictures; these are
    resized to so many pixels, where a number is given."""
    family, images = find_family(source, revision), None
    with explained("pretrained.model", source, KIND):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        if family.image_loader is not None:
            images = family.load_images(
                source, revision, min_pixels=min_pixels, max_pixels=max_pixels
            )
    if not tokenizer.chat_template:
        tokenizer.chat_template = _template_of_processor(source, revision)
    return tokenizer, images


def _template_of_processor(source: str, revision: str) -> str:
    """For models that were published before tokenizers had one."""
    try:
        path = cached_file(source, "chat_template.json", revision=revision)
        return read_json(Path(path))["chat_template"]
    except (UserError, OSError, KeyError, TypeError) as error:
        raise UserError(
            f"pretrained.model={source!r} has no chat template; name a model that was tuned to chat"
        ) from error
