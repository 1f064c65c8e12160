from collections.abc import Iterator
from contextlib import contextmanager

from diffusers.training_utils import EMAModel
from torch import nn


class Ema:
    """A moving average of the trained weights, updated every `every` optimizer steps."""

    def __init__(self, parameters: list[nn.Parameter], decay: float, every: int) -> None:
        self.parameters = parameters
        self.every = every
        self.average = EMAModel(parameters, decay=decay)
        self.average.to(parameters[0].device)

    def update(self, step: int) -> None:
        if step % self.every == 0:
            self.average.step(self.parameters)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Evaluate and save with the average in place of the weights."""
        self.average.store(self.parameters)
        self.average.copy_to(self.parameters)
        try:
            yield
        finally:
            self.average.restore(self.parameters)
