"""Copies of the trained weights: the reference policy, earlier policies and the moving average."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flow_grpo.training.distributed import (
    gather_parameters,
    gather_state_dict,
    local_shards,
    shard_like,
)
from flow_grpo.training.finite import first_nonfinite
from flow_grpo.training.lora_files import check_same_tensors
from flow_grpo.training.state_copies import StateCopies, Write

log = logging.getLogger(__name__)
SWAP_CHUNK = 16  # weights swapped together


class Snapshot:
    """A copy of the trained weights that can temporarily replace them.

    Args:
        parameters: The trained weights by name.
        name: Name of the file `<name>.safetensors` in a checkpoint's state.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], name: str) -> None:
        self.name = name
        self.names, self.parameters = list(parameters), list(parameters.values())
        with gather_parameters(self.parameters):
            self.copy = [p.detach().clone() for p in self.parameters]
        self.is_current = True  # equal to the weights; to be reset by code that changes them

    @torch.no_grad()
    def blend(self, keep: float) -> None:
        """Update the copy in place: copy <- keep * copy + (1 - keep) * weights."""
        with gather_parameters(self.parameters):
            copies, weights = local_shards(self.copy), local_shards(self.parameters)
            if keep == 0:
                torch._foreach_copy_(copies, weights)
                self.is_current = True
            else:
                torch._foreach_lerp_(copies, weights, 1 - keep)

    def named(self) -> dict[str, Tensor]:
        """Return the copied weights, not the current ones, by parameter name."""
        return dict(zip(self.names, self.copy, strict=True))

    def by_parameter(self) -> dict[nn.Parameter, Tensor]:
        """Return the copied weights by the parameter they are a copy of."""
        return dict(zip(self.parameters, self.copy, strict=True))

    def copy_to_host(self, folder: Path, copies: StateCopies) -> Write:
        """Copy the unsharded weights, so that any world size can load them.

        Call it on all ranks.

        Returns:
            A function that writes the copy to `folder`.
        """
        weights = copies.gather(self.named())

        def write() -> None:
            self._check_finite(weights)
            save_file(weights, folder / f"{self.name}.safetensors")

        return write

    def save(self, folder: Path) -> None:
        """Write the unsharded weights."""
        self.copy_to_host(folder, StateCopies())()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the saved copy; if there is none, start from the trained weights."""
        path = folder / f"{self.name}.safetensors"
        if not path.exists():
            log.warning("%s has no %s weights; starting from the trained ones", folder, self.name)
            self.blend(0)
            return
        saved = load_file(path)
        try:
            check_same_tensors(saved, self.named())
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
        self._check_finite(saved)
        for name, copy in self.named().items():
            copy.copy_(shard_like(saved[name], copy))
        now = gather_state_dict(dict(zip(self.names, self.parameters, strict=True)))
        self.is_current = all(torch.equal(saved[name], now[name]) for name in self.names)

    def _check_finite(self, weights: dict[str, Tensor]) -> None:
        if name := first_nonfinite(weights.items()):
            raise ValueError(f"{name} contains NaN or infinite values in {self.name}.safetensors")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the copy in for the weights within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap the copy and the weights in place.

        Chunks are faster than one tensor at a time, and need memory for one chunk only.
        """
        for first in range(0, len(self.copy), SWAP_CHUNK):
            part = slice(first, first + SWAP_CHUNK)
            with gather_parameters(self.parameters[part]):
                copies, weights = local_shards(self.copy[part]), local_shards(self.parameters[part])
                kept = [torch.empty_like(weight) for weight in weights]
                torch._foreach_copy_(kept, weights)
                torch._foreach_copy_(weights, copies)
                torch._foreach_copy_(copies, kept)


class Reference(Snapshot):
    """The weights at the start of training (reference policy).

    Saved for LoRA too, as the LoRA at `train.lora_path` may change before the run is resumed.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(parameters, "reference")

    def load(self, folder: Path) -> None:
        """Load the saved weights; if there are none, keep those from the start of this process."""
        if (folder / f"{self.name}.safetensors").exists():
            super().load(folder)


class Ema(Snapshot):
    """Exponential moving average of the trained weights, updated every `every` optimizer steps.

    As in Flow-GRPO, the decay at optimizer step n is min((1 + n) / (10 + n), decay), so that the
    initial weights are forgotten quickly. It depends on nothing else, so only the average is saved.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, every: int) -> None:
        super().__init__(parameters, "ema")
        self.decay, self.every = decay, every

    def update(self, step: int) -> None:
        """Update the average if `step` is a multiple of `every`."""
        if step % self.every == 0:
            self.blend(min((1 + step) / (10 + step), self.decay))
