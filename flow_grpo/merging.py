"""LoRA added to the weights it sits on: fewer products per step, where a step is not trained."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from peft.tuners import lora
from torch import Tensor, nn

from flow_grpo.folding import is_plain

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of a float32


def can_merge(model: nn.Module) -> bool:
    """DoRA, and LoRA on what is not linear, are no sum of weights."""
    return all(isinstance(layer, lora.Linear) and is_plain(layer) for layer in _layers(model))


@torch.no_grad()
def merge_lora(
    model: nn.Module, generator: torch.Generator
) -> Callable[[], AbstractContextManager[None]]:
    """A context in which `model` computes with the sums of weights and LoRA as they are now.

    It can be entered as often as wanted. Takes the memory of these weights twice.
    """
    layers = _layers(model)
    weights = [layer.base_layer.weight.data for layer in layers]
    before = [weight.clone() for weight in weights]
    noise: dict[tuple, Tensor] = {}
    sums = []
    for layer, weight in zip(layers, weights, strict=True):
        total = weight.to(torch.promote_types(weight.dtype, torch.float32))
        for name in layer.active_adapters:
            total = total + layer.get_delta_weight(name)
        sums.append(round_at_random(total, weight.dtype, generator, noise))

    @contextmanager
    def merged() -> Iterator[None]:
        torch._foreach_copy_(weights, sums)
        model.disable_adapters()
        try:
            yield
        finally:
            model.enable_adapters()
            torch._foreach_copy_(weights, before)

    return merged


def _layers(model: nn.Module) -> list[lora.LoraLayer]:
    return [module for module in model.modules() if isinstance(module, lora.LoraLayer)]


def round_at_random(
    x: Tensor, dtype: torch.dtype, generator: torch.Generator, noise: dict[tuple, Tensor]
) -> Tensor:
    """`x` in half precision, up or down so that the mean is `x`.

    To the nearest, a weight would swallow all of LoRA that is below half its last bit. `noise` is
    drawn once for each shape.
    """
    if dtype not in DROPPED_BITS:
        return x.to(dtype)
    bits = DROPPED_BITS[dtype]
    if x.shape not in noise:
        noise[x.shape] = torch.randint(
            1 << bits, x.shape, generator=generator, device=x.device, dtype=torch.int32
        )
    kept = (x.view(torch.int32) + noise[x.shape]) & -(1 << bits)
    return kept.view(torch.float32).to(dtype)
