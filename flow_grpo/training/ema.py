import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from flow_grpo.training.shards import gathered, sharded_like, whole

log = logging.getLogger(__name__)

AVERAGE = "ema.safetensors"


class Ema:
    """A moving average of the trained weights, updated every `every` optimizer steps.

    As in Flow-GRPO, the decay at optimizer step n is min((1 + n) / (10 + n), decay): the first
    weights are forgotten soon. It follows from the step, so the average is all there is to save.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, every: int) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.decay = decay
        self.every = every
        with gathered(self.parameters):
            self.average = [p.detach().clone() for p in self.parameters]

    def prepare(self, accelerator: Accelerator) -> None:
        """Save and load it with the accelerator's state; not by accelerate, which would pickle."""
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: self.save(Path(folder), accelerator.is_main_process)
        )
        accelerator.register_load_state_pre_hook(lambda models, folder: self.load(Path(folder)))

    @torch.no_grad()
    def update(self, step: int) -> None:
        if step % self.every == 0:
            decay = min((1 + step) / (10 + step), self.decay)
            with gathered(self.parameters):
                torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    def save(self, folder: Path, writes: bool = True) -> None:
        """With whole weights, so that any number of processes can load it. Call it on all."""
        weights = {n: whole(a).cpu() for n, a in zip(self.names, self.average, strict=True)}
        if writes:
            save_file(weights, folder / AVERAGE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Where there is none, the run had no average so far: it begins with the weights."""
        path = folder / AVERAGE
        if not path.exists():
            log.warning("%s has no moving average; it begins with the weights", folder)
            with gathered(self.parameters):
                for average, parameter in zip(self.average, self.parameters, strict=True):
                    average.copy_(parameter)
            return
        saved = load_file(path)
        if saved.keys() != set(self.names):
            raise ValueError(f"{AVERAGE} is of other weights than those trained")
        for name, average in zip(self.names, self.average, strict=True):
            if saved[name].shape != average.shape:
                raise ValueError(f"{AVERAGE} is of weights of another shape than those trained")
            average.copy_(sharded_like(saved[name], average))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Evaluate and save with the average in place of the weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """One by one, so that it takes the memory of one weight only."""
        with gathered(self.parameters):
            for average, parameter in zip(self.average, self.parameters, strict=True):
                weight = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(weight)
