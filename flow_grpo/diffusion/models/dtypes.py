"""Dtypes of frozen components, with the exceptions that the libraries' loaders make."""

import re
from collections.abc import Callable
from itertools import chain

import torch
from diffusers import ModelMixin
from torch import nn
from transformers import PreTrainedModel


def freeze(module: nn.Module, dtype: torch.dtype) -> None:
    """Disable gradients and cast to `dtype`, with the same exceptions as the library's loader.

    Layers that the library keeps in float32 stay in float32. Non-persistent buffers are never cast
    to a narrower dtype: these are rotary frequencies, whose rounding error grows with position.
    """
    module.requires_grad_(False).eval()
    saved, is_kept = module.state_dict().keys(), float32_predicate(module, dtype)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_floating_point():
            wanted = dtype
            if is_kept(name):
                wanted = torch.promote_types(dtype, torch.float32)
            elif name not in saved:
                wanted = torch.promote_types(dtype, tensor.dtype)
            tensor.data = tensor.data.to(wanted)


def float32_predicate(module: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return which tensors, by name, stay in float32 when `module` is loaded in `dtype`.

    diffusers matches parts of the name in any dtype. transformers matches patterns: those of
    `_keep_in_fp32_modules` in float16 (such as `wo` of T5, which overflows there), those of
    `_keep_in_fp32_modules_strict` in bfloat16 too.
    """
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if isinstance(module, ModelMixin):
        return lambda name: not kept.isdisjoint(name.split("."))
    if not isinstance(module, PreTrainedModel) or dtype not in (torch.float16, torch.bfloat16):
        return lambda name: False
    strict = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    names = strict | kept if dtype == torch.float16 else strict
    patterns = [re.compile(name.replace("*", ".*")) for name in names]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def vae_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return bfloat16 where it is fast, else float32 or better: SD3's VAE overflows in float16."""
    half = dtype in (torch.float16, torch.bfloat16)
    if half and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.promote_types(dtype, torch.float32)
