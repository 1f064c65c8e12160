"""One matrix product for several layers that take the same input."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class SharedProjection:
    """Computes the outputs of several layers with the same input as one product.

    The first layer that is called computes it; the outputs of the others are kept until they are
    called with the same input.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.input: Tensor | None = None
        self.pending: dict[nn.Module, Tensor] = {}

    def take(
        self, layer: nn.Module, x: Tensor, product: Callable[[Tensor], Sequence[Tensor]]
    ) -> Tensor:
        """Return the output of one layer.

        Args:
            layer: One of the layers.
            x: Its input.
            product: Computes the outputs of all layers from `x`, in their order.
        """
        if x is not self.input or layer not in self.pending:
            self.input, self.pending = x, dict(zip(self.layers, product(x), strict=True))
        part = self.pending.pop(layer)
        if not self.pending:
            self.input = None
        return part
