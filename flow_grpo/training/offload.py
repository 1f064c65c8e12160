"""Adam's two moments wait on the CPU while no update is taken."""

from typing import Any

import torch
from torch.optim import Optimizer


def offload_state(optimizer: Optimizer) -> None:
    """From now on its state is where the weights are during a step only."""
    optimizer.register_step_pre_hook(lambda *_: _move(optimizer, None))
    optimizer.register_step_post_hook(lambda *_: _move(optimizer, "cpu"))
    optimizer.register_load_state_dict_post_hook(lambda *_: _move(optimizer, "cpu"))


def _move(optimizer: Optimizer, device: str | None) -> None:
    """To `device`, or each to that of its weight. Step counts stay, where Adam wants them."""
    for weight, state in optimizer.state.items():
        moved: dict[str, Any] = {
            name: value.to(device or weight.device)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name != "step"
        }
        state.update(moved)
