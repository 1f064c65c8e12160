"""Families of models that answer, one file each, found by the `model_type` of a model's config.

All files of this folder are imported, so that a new one is found.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from flow_grpo.answer.models.base import FAMILIES, Family
from flow_grpo.errors import UserError
from flow_grpo.files import read_json
from flow_grpo.rewards.loading import explained

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

KIND = "a vision-language model"


def family_of(model: nn.Module) -> Family:
    return FAMILIES[model.config.model_type](model)


def find_family(source: str, revision: str = "main") -> type[Family]:
    """The family of the model in a folder or under a hub id; its weights are not read."""
    with explained("pretrained.model", source, KIND):
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        names = [name for family in FAMILIES.values() for name in family.names.values()]
        *others, last = [f"a {name}" for name in dict.fromkeys(names)]
        raise UserError(
            f"pretrained.model={source!r} is a {(config.architectures or [config.model_type])[0]}, "
            f"and must be {', '.join(others)} or {last}"
        )
    return FAMILIES[config.model_type]


def load_model(
    source: str, device: torch.device, dtype: torch.dtype, revision: str = "main"
) -> nn.Module:
    family = find_family(source, revision)
    with explained("pretrained.model", source, KIND):
        model = family.loader.from_pretrained(
            source, dtype=dtype, revision=revision, trust_remote_code=False
        )
    return model.to(device).eval()


def load_processors(
    source: str, revision: str = "main", *, min_pixels: int = 0, max_pixels: int = 0
) -> tuple[PreTrainedTokenizerBase, Any]:
    """The tokenizer and the image processor, None for a model that sees no pictures; these are
    resized to so many pixels, where a number is given."""
    pixels = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    options = {name: number for name, number in pixels.items() if number}
    family, images = find_family(source, revision), None
    with explained("pretrained.model", source, KIND):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        if family.image_loader is not None:
            # with PIL, whether or not torchvision is there: tokens are the same everywhere
            images = family.image_loader.from_pretrained(
                source, revision=revision, backend="pil", trust_remote_code=False, **options
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
