from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.training_utils import EMAModel
from torch import nn

from flow_grpo.shards import gathered, shared_like, whole


class Ema:
    """A moving average of the trained weights, updated every `every` optimizer steps."""

    def __init__(self, parameters: list[nn.Parameter], decay: float, every: int) -> None:
        self.parameters = parameters
        self.every = every
        with gathered(parameters):
            self.average = EMAModel(parameters, decay=decay)
        self.average.to(parameters[0].device)

    def update(self, step: int) -> None:
        if step % self.every == 0:
            with gathered(self.parameters):
                self.average.step(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """With whole weights, so that any number of processes can load it."""
        state = self.average.state_dict()
        return {**state, "shadow_params": [whole(p) for p in state["shadow_params"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pairs = zip(state["shadow_params"], self.average.shadow_params, strict=True)
        shared = [shared_like(saved, ours) for saved, ours in pairs]
        self.average.load_state_dict({**state, "shadow_params": shared})

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Evaluate and save with the average in place of the weights."""
        with gathered(self.parameters):
            self.average.store(self.parameters)
            self.average.copy_to(self.parameters)
        try:
            yield
        finally:
            with gathered(self.parameters):
                self.average.restore(self.parameters)
