"""Optimizer and learning-rate schedule."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.optim import Optimizer
from transformers import get_scheduler

from flow_grpo.config.fields import ADAMW, ADAMW_BF16, TrainFields
from flow_grpo.errors import UserError
from flow_grpo.training.adamw_bf16 import AdamWBf16
from flow_grpo.training.policy import BasePolicy

# names in transformers
LR_SCHEDULES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine_with_min_lr",
}


def adamw_kwargs(train: TrainFields) -> dict[str, Any]:
    """Return the hyperparameters of AdamW by their names in torch."""
    return {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "weight_decay": train.adam_weight_decay,
        "eps": train.adam_epsilon,
    }


def build_lr_schedule(train: TrainFields, updates: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the number of applied updates.

    It has no other state, so there is nothing to save.

    Args:
        train: The run's `train` settings.
        updates: Total number of updates of the run.

    Raises:
        UserError: If the warmup is longer than the run, or `lr_min_ratio` has no effect.
    """
    if train.lr_min_ratio and train.lr_scheduler != "cosine":
        raise UserError(
            f"has no effect with train.lr_scheduler={train.lr_scheduler!r}",
            field="train.lr_min_ratio",
            value=train.lr_min_ratio,
            hint="reset it to 0.0, or use 'cosine'",
        )
    if train.lr_warmup_steps >= updates:
        raise UserError(
            f"must be below the {updates} updates of the run",
            field="train.lr_warmup_steps",
            value=train.lr_warmup_steps,
            hint="lower it, or raise num_epochs",
        )
    options = {"min_lr_rate": train.lr_min_ratio} if train.lr_scheduler == "cosine" else {}
    schedule = get_scheduler(
        LR_SCHEDULES[train.lr_scheduler],
        torch.optim.SGD([torch.zeros(1)]),  # required argument; never steps
        num_warmup_steps=train.lr_warmup_steps,
        num_training_steps=updates,
        scheduler_specific_kwargs=options,
    )
    return lambda done: train.learning_rate * schedule.lr_lambdas[0](done)


def build_optimizer(
    train: TrainFields, mixed_precision: str, accelerator: Accelerator, policy: BasePolicy
) -> Optimizer:
    """Return AdamW for the trained weights, with bfloat16, 8-bit or offloaded state if configured.

    Raises:
        UserError: If bitsandbytes is needed and not installed.
    """
    groups = policy.parameter_groups()
    if getattr(train, "optimizer", ADAMW) == ADAMW_BF16:
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise UserError(
                "is incompatible with DeepSpeed, which has its own optimizer step",
                field="train.optimizer",
                value=ADAMW_BF16,
                hint="use DDP or FSDP2",
            )
        optimizer = AdamWBf16(groups, **adamw_kwargs(train))
    elif train.use_8bit_adam:
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise UserError(
                "needs bitsandbytes",
                field="train.use_8bit_adam",
                value=True,
                hint="pip install -e '.[adam8bit]'",
            ) from error
        optimizer = AdamW8bit(groups, **adamw_kwargs(train))
    else:
        # with fp16 a fused step would hide from the EMA which updates were skipped
        fused = accelerator.device.type == "cuda" and mixed_precision != "fp16"
        optimizer = torch.optim.AdamW(groups, fused=fused, **adamw_kwargs(train))
    if train.offload_optimizer:
        offload_optimizer_state(optimizer)
    return optimizer


def offload_optimizer_state(optimizer: Optimizer) -> None:
    """Keep the optimizer's state on the CPU between steps."""
    optimizer.register_step_pre_hook(lambda *_: _move_optimizer_state(optimizer, None))
    optimizer.register_step_post_hook(lambda *_: _move_optimizer_state(optimizer, "cpu"))
    optimizer.register_load_state_dict_post_hook(lambda *_: _move_optimizer_state(optimizer, "cpu"))


def _move_optimizer_state(optimizer: Optimizer, device: str | None) -> None:
    """Move state to `device` (None: its weight's device); Adam's step counts stay on the CPU."""
    for weight, state in optimizer.state.items():
        moved: dict[str, Any] = {
            name: value.to(device or weight.device)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name != "step"
        }
        state.update(moved)
