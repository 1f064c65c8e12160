"""LoRA layers: disable them, merge them into the base weights, or fold them into the product.

A LoRA layer computes x W + scale (x A) B from its base weight W and the trained matrices A and B.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

# Low bits of a float32 that a cast to these dtypes drops.
TRUNCATED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def lora_layers(model: nn.Module) -> list[lora.LoraLayer]:
    return [module for module in model.modules() if isinstance(module, lora.LoraLayer)]


@contextmanager
def disable_lora(layers: list[lora.LoraLayer]) -> Iterator[None]:
    """Compute with the base weights only for the duration of the context."""
    parameters = [p for layer in layers for p in layer.parameters()]
    requires_grad = [p.requires_grad for p in parameters]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        # PEFT enables the gradient of all LoRA tensors, also of frozen ones
        for parameter, value in zip(parameters, requires_grad, strict=True):
            parameter.requires_grad_(value)


def is_plain_lora(layer: lora.LoraLayer) -> bool:
    """Return whether a layer computes x W + scale (x A) B, without dropout, bias or DoRA."""
    return (
        isinstance(layer.base_layer, nn.Linear)
        and not layer.lora_variant  # such as DoRA
        and not any(layer.lora_bias.values())
        and all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())
    )


def is_mergeable(layer: lora.LoraLayer) -> bool:
    """Return whether LoRA can be added to the base weight, which must not be quantized."""
    return is_plain_lora(layer) and type(layer.base_layer) is nn.Linear


def merged_weight(layer: lora.Linear, weight: Tensor) -> Tensor:
    """Return `weight` plus the LoRA of `layer`, in float32 or better.

    Args:
        layer: A layer for which `is_mergeable` holds.
        weight: Its base weight, (out_features, in_features).
    """
    total = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for name in layer.active_adapters:
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        total = torch.addmm(total, b, a, alpha=layer.scaling[name])
    return total


def cast_stochastic(
    x: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Cast with stochastic rounding to half precision.

    The mean over the random bits is `x`. Rounding to nearest would drop every change by LoRA or an
    optimizer that is smaller than half the last bit of a weight.

    Args:
        x: Values in float32; other dtypes than half precision are cast as usual.
        dtype: Dtype of the result.
        generator: Generator of the random bits; by default, every call uses the same bits.
    """
    if dtype not in TRUNCATED_BITS:
        return x.to(dtype)
    unit = 1 << TRUNCATED_BITS[dtype]
    generator = generator or torch.Generator(x.device).manual_seed(0)
    noise = torch.randint(unit, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    rounded = ((x.view(torch.int32) + noise) & -unit).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(dtype)  # noise would turn a NaN into -0.0


class FoldedLinear(lora.Linear):
    """LoRA layer that computes x (W + BA) instead of x W + (x A) B, with a single product.

    It is used in sampling and in training alike: the on-policy ratio is exactly 1 only if both use
    the same arithmetic.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for `x`, (..., in_features), by a single product."""
        weight = self.base_layer.weight
        if not self.disable_adapters:
            for name in self.active_adapters:
                weight = weight + self.get_delta_weight(name)
        # torch multiplies a slice of a larger tensor sample by sample, at half the speed
        return F.linear(x.contiguous(), weight, self.base_layer.bias)


def fold_lora(model: nn.Module) -> None:
    """Turn LoRA layers into `FoldedLinear` where that is exact and saves time.

    Weights in half precision cannot represent the small changes of training, so layers are folded
    only in float32 or better.
    """
    for layer in model.modules():
        if (
            type(layer) is lora.Linear
            and is_mergeable(layer)
            and layer.base_layer.weight.dtype in (torch.float32, torch.float64)
            and _saves_flops(layer)
        ):
            layer.__class__ = FoldedLinear


def _saves_flops(layer: lora.Linear) -> bool:
    """Return whether the gradient of W + BA takes fewer operations than the products with LoRA."""
    width, height = layer.in_features, layer.out_features
    return width * height < 3 * max(layer.r.values()) * (width + height)
