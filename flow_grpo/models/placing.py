"""Parts of a model on their device, in their precision."""

from itertools import chain

import torch
from diffusers import ModelMixin
from torch import nn


def place(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Frozen, and in float32 still where its family keeps a layer so in half precision."""
    module.requires_grad_(False).eval()
    nn.Module.to(module, device)  # diffusers' own warns of what does not apply
    kept = (module._keep_in_fp32_modules or []) if isinstance(module, ModelMixin) else []
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_floating_point():
            wanted = dtype
            if any(part in name.split(".") for part in kept):
                wanted = torch.promote_types(dtype, torch.float32)
            tensor.data = tensor.data.to(wanted)


def vae_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 where it is fast; SD3's VAE overflows in float16."""
    half = dtype in (torch.float16, torch.bfloat16)
    if half and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.promote_types(dtype, torch.float32)
