"""Copies of the trained weights: where training began, earlier ones, their moving average."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flow_grpo.run.distributed import gathered, own_parts, sharded_like, whole, whole_state
from flow_grpo.run.finite import first_nonfinite

log = logging.getLogger(__name__)
AT_ONCE = 16  # weights that are swapped together


class Snapshot:
    """A copy of the trained weights that can stand in for them.

    It is saved and loaded with the accelerator's state, as `<name>.safetensors`.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], name: str) -> None:
        self.name = name
        self.names, self.parameters = list(parameters), list(parameters.values())
        with gathered(self.parameters):
            self.copy = [p.detach().clone() for p in self.parameters]
        self.is_current = True  # equal to the weights; whoever changes these sets it back

    def prepare(self, accelerator: Accelerator) -> Self:
        """Save and load it with the accelerator's state: not its own way, which would pickle."""
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: self.save(Path(folder), accelerator.is_main_process)
        )
        accelerator.register_load_state_pre_hook(lambda models, folder: self.load(Path(folder)))
        return self

    @torch.no_grad()
    def blend(self, keep: float) -> None:
        """copy <- keep * copy + (1 - keep) * weights"""
        with gathered(self.parameters):
            copies, weights = own_parts(self.copy), own_parts(self.parameters)
            if keep == 0:
                torch._foreach_copy_(copies, weights)
                self.is_current = True
            else:
                torch._foreach_lerp_(copies, weights, 1 - keep)

    def named(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.copy, strict=True))

    def save(self, folder: Path, writes: bool = True) -> None:
        """Write whole weights, so that any number of processes can load them. Call it on all."""
        weights = {name: whole(copy).cpu() for name, copy in self.named().items()}
        self._check_finite(weights)
        if writes:
            save_file(weights, folder / f"{self.name}.safetensors")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Where there is none, the run had none so far: it begins with the weights."""
        path = folder / f"{self.name}.safetensors"
        if not path.exists():
            log.warning("%s has no %s weights; they begin with those trained", folder, self.name)
            self.blend(0)
            return
        saved = load_file(path)
        if saved.keys() != set(self.names):
            raise ValueError(f"{path.name} is of other weights than those trained")
        self._check_finite(saved)
        for name, copy in self.named().items():
            if saved[name].shape != copy.shape:
                raise ValueError(f"{path.name} is of weights of another shape than those trained")
            copy.copy_(sharded_like(saved[name], copy))
        now = whole_state(dict(zip(self.names, self.parameters, strict=True)))
        self.is_current = all(torch.equal(saved[name], now[name]) for name in self.names)

    def _check_finite(self, weights: dict[str, Tensor]) -> None:
        if name := first_nonfinite(weights.items()):
            raise ValueError(f"{name} contains NaN or infinite values in {self.name}.safetensors")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The copy in place of the weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """A few at a time: together they are quicker, and take the memory of a few only."""
        for first in range(0, len(self.copy), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            with gathered(self.parameters[part]):
                copies, weights = own_parts(self.copy[part]), own_parts(self.parameters[part])
                kept = [torch.empty_like(weight) for weight in weights]
                torch._foreach_copy_(kept, weights)
                torch._foreach_copy_(weights, copies)
                torch._foreach_copy_(copies, kept)


class Reference(Snapshot):
    """The weights that training began with. LoRA's are saved too: what `train.lora_path` names may
    be another one by the time the run is resumed."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(parameters, "reference")

    def load(self, folder: Path) -> None:
        """Where there is none, the run needed none so far: it is what this run was built with."""
        if (folder / f"{self.name}.safetensors").exists():
            super().load(folder)


class Ema(Snapshot):
    """A moving average of the trained weights, updated every `every` optimizer steps.

    As in Flow-GRPO, the decay at optimizer step n is min((1 + n) / (10 + n), decay): the first
    weights are forgotten soon. It follows from the step, so the average is all there is to save.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, every: int) -> None:
        super().__init__(parameters, "ema")
        self.decay, self.every = decay, every

    def update(self, step: int) -> None:
        if step % self.every == 0:
            self.blend(min((1 + step) / (10 + step), self.decay))
