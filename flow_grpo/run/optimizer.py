"""The optimizer of a run, from its config."""

from typing import Any

import torch
from accelerate import Accelerator
from ml_collections import ConfigDict
from torch.optim import Optimizer

from flow_grpo.errors import UserError
from flow_grpo.run.base import Trainable


def adam_settings(config: ConfigDict) -> dict[str, Any]:
    train = config.train
    return {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "weight_decay": train.adam_weight_decay,
        "eps": train.adam_epsilon,
    }


def build_optimizer(config: ConfigDict, accelerator: Accelerator, policy: Trainable) -> Optimizer:
    optimizer = _build(config, accelerator, policy)
    if config.train.offload_optimizer:
        offload_state(optimizer)
    return optimizer


def _build(config: ConfigDict, accelerator: Accelerator, policy: Trainable) -> Optimizer:
    train = config.train
    settings = adam_settings(config)
    on_gpu = accelerator.device.type == "cuda"
    if not train.use_8bit_adam:
        # in fp16 a fused step hides from the moving average which updates were skipped
        fused = on_gpu and config.mixed_precision != "fp16"
        return torch.optim.AdamW(policy.parameters(), fused=fused, **settings)
    if not on_gpu:
        raise UserError("train.use_8bit_adam=True needs a GPU; this run is on the CPU")
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            "train.use_8bit_adam=True needs bitsandbytes: pip install -e '.[adam8bit]'"
        ) from error
    return AdamW8bit(policy.parameters(), **settings)


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
