"""The optimizer of a run, from its config."""

from typing import Any

import torch
from accelerate import Accelerator
from ml_collections import ConfigDict
from torch.optim import Optimizer

from flow_grpo.errors import UserError
from flow_grpo.run.base import Trainable
from flow_grpo.training.offload import offload_state


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
