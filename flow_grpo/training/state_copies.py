"""Copies of training state in host memory, from which a checkpoint is written in the background.

A checkpoint contains the trained weights several times, as resume state and in the formats of other
libraries. Each tensor is transferred from the device once, and the files share the copy.

The copies need as much host memory as the state itself. Where that is too much, as for all weights
of a large model, each file is written before the next one is copied.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flow_grpo.host_memory import available_memory
from flow_grpo.training.distributed import gather_parameters, to_host

logger = logging.getLogger("flow_grpo")

Write = Callable[[], None]  # writes a file from copies
MAX_MEMORY_SHARE = 0.5  # of the available host memory, for the copies of a checkpoint


class StateCopies:
    """Host copies of tensors, one per unsharded tensor however often it is requested.

    Args:
        keep: Whether this process needs the copies. Sharded tensors are gathered nevertheless,
            because that needs all processes.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        # by id; the original is kept as well, so that its id is not reused
        self._copies: dict[int, tuple[Tensor, Tensor | None]] = {}

    @torch.no_grad()
    def gather(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return unsharded copies by name, or nothing if they are not kept; collective."""
        with gather_parameters(named.values(), fixed=True):
            copies = {name: self._copy(tensor) for name, tensor in named.items()}
        return {name: copy for name, copy in copies.items() if copy is not None}

    def copy_nested(self, value: Any) -> Any:
        """Return nested dicts, lists and tuples with copies of their tensors."""
        if isinstance(value, Tensor):
            return self._copy(value)
        if isinstance(value, dict):
            return {key: self.copy_nested(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.copy_nested, value))
        return value

    def _copy(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, DTensor):  # gathered by all processes, whatever each of them keeps
            return to_host(tensor, keep=self._keep)
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, to_host(tensor, keep=self._keep)
        return self._copies[id(tensor)][1]


def count_bytes(value: Any) -> int:
    """Return the size of all tensors in nested dicts, lists and tuples; unsharded if ZeRO-3's."""
    if isinstance(value, Tensor):
        return getattr(value, "ds_numel", value.numel()) * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(count_bytes, value)) if isinstance(value, list | tuple) else 0


def fits_in_memory(size: int) -> bool:
    """Return whether copies of `size` bytes leave enough host memory."""
    return size <= MAX_MEMORY_SHARE * available_memory()
