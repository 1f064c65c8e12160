"""Layers that take the same input, and share a product."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class Siblings:
    """The first that is called computes the product for all; each takes its part of it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.input: Tensor | None = None
        self.waiting: dict[nn.Module, Tensor] = {}

    def part(
        self, layer: nn.Module, x: Tensor, product: Callable[[Tensor], Sequence[Tensor]]
    ) -> Tensor:
        """The part of `product(x)` that belongs to `layer`."""
        if x is not self.input or layer not in self.waiting:
            self.input, self.waiting = x, dict(zip(self.layers, product(x), strict=True))
        part = self.waiting.pop(layer)
        if not self.waiting:
            self.input = None
        return part
