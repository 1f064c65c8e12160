"""LoRA switched off, and LoRA added to the weights it sits on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of a float32


def lora_layers(model: nn.Module) -> list[lora.LoraLayer]:
    return [module for module in model.modules() if isinstance(module, lora.LoraLayer)]


@contextmanager
def without_lora(layers: list[lora.LoraLayer]) -> Iterator[None]:
    trained = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        for parameter, was_trained in trained:  # peft would have all of LoRA trained
            parameter.requires_grad_(was_trained)


def is_plain(layer: lora.LoraLayer) -> bool:
    """Whether it is `xW + (xA)B` and nothing else."""
    return (
        isinstance(layer.base_layer, nn.Linear)
        and not layer.lora_variant  # DoRA and others are no sum
        and not any(layer.lora_bias.values())
        and all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())
    )


def is_sum(layer: lora.LoraLayer) -> bool:
    """Whether it is a sum of weights: those in few bits have no room for LoRA."""
    return is_plain(layer) and type(layer.base_layer) is nn.Linear


def merged_weight(layer: lora.Linear, weight: Tensor) -> Tensor:
    """LoRA added to the `weight` it sits on, in float32 or better."""
    total = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for name in layer.active_adapters:
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        total = torch.addmm(total, b, a, alpha=layer.scaling[name])
    return total


class MergedLora:
    """The sums of weights and LoRA, to compute with where nothing is trained.

    Takes the memory of these weights twice.
    """

    def __init__(self, layers: list[lora.Linear]) -> None:
        self.layers = layers
        self.weights = [layer.base_layer.weight.data for layer in layers]
        self.before = [weight.clone() for weight in self.weights]
        self.sums = [torch.empty_like(weight) for weight in self.weights]

    @torch.no_grad()
    def renew(self, seed: int) -> None:
        """After LoRA has changed."""
        noise: dict[torch.Size, Tensor] = {}  # one for each shape
        for layer, weight, out in zip(self.layers, self.before, self.sums, strict=True):
            total = merged_weight(layer, weight)
            if out.dtype in DROPPED_BITS:
                if out.shape not in noise:
                    noise[out.shape] = rounding_noise(out, seed)
                total = rounded_at_random(total, out.dtype, noise[out.shape])
            out.copy_(total)

    @contextmanager
    def applied(self) -> Iterator[None]:
        torch._foreach_copy_(self.weights, self.sums)
        try:
            with without_lora(self.layers):
                yield
        finally:
            torch._foreach_copy_(self.weights, self.before)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded at random to what `dtype` holds, the same way every time."""
    if dtype not in DROPPED_BITS:
        return x.to(dtype)
    return rounded_at_random(x, dtype, rounding_noise(x.to(dtype), seed=0)).to(dtype)


def rounding_noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    most = 1 << DROPPED_BITS[like.dtype]
    return torch.randint(
        most, like.shape, generator=generator, device=like.device, dtype=torch.int32
    )


def rounded_at_random(x: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """`x` up or down to what `dtype` holds, so that the mean over noise is `x`.

    To the nearest, a weight would swallow all of LoRA that is below half its last bit.
    """
    kept = (x.view(torch.int32) + noise) & -(1 << DROPPED_BITS[dtype])
    return kept.view(torch.float32)


class FoldedLinear(lora.Linear):
    """`x (W + BA)` in place of `xW + (xA)B`, in sampling and in training alike.

    The same arithmetic in both keeps the on-policy ratio at 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base_layer.weight
        if not self.disable_adapters:
            for name in self.active_adapters:
                weight = weight + self.get_delta_weight(name)
        # torch multiplies a slice of a larger tensor sample by sample, at half the speed
        return F.linear(x.contiguous(), weight, self.base_layer.bias)


def fold_lora(model: nn.Module) -> None:
    """Fold where nothing is lost, plain LoRA on weights in float32 or better, and time is won.

    Half precision cannot hold a sum of a weight and the small steps that training takes.
    """
    for layer in model.modules():
        if type(layer) is lora.Linear and is_sum(layer) and _is_exact(layer) and _pays(layer):
            layer.__class__ = FoldedLinear


def _is_exact(layer: lora.Linear) -> bool:
    dtype = layer.base_layer.weight.dtype
    return torch.promote_types(dtype, torch.float32) == dtype


def _pays(layer: lora.Linear) -> bool:
    """Whether the gradient of the sum takes fewer operations than LoRA's own products do."""
    width, height = layer.in_features, layer.out_features
    return width * height < 3 * max(layer.r.values()) * (width + height)
