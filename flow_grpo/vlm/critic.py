"""The critic of PPO (`train.advantage="gae"`): its learning rate and its warm-up.

The critic is a linear layer on the policy's last hidden states (`train.critic="head"`) or a model
with its own weights ("separate"). It has its own parameter group, after the policy's, for a
different learning rate and a warm-up in which only the critic is trained (verl's `critic_warmup`,
OpenRLHF's `freezing_actor_steps`).
"""

import logging
from typing import Any

from torch.optim import Optimizer

logger = logging.getLogger("flow_grpo")


def set_lr_scales(optimizer: Optimizer, train: Any, *, warmup: bool) -> None:
    """Set the learning-rate multipliers of the policy and of the critic.

    Args:
        optimizer: Optimizer with one parameter group for each.
        train: The config's `train` section.
        warmup: Whether only the critic is trained (`train.critic_warmup`).
    """
    policy, critic = optimizer.param_groups
    policy["lr_scale"] = 0.0 if warmup else 1.0
    critic["lr_scale"] = train.critic_learning_rate / train.learning_rate


def split_saved_param_groups(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Split the single parameter group of an older checkpoint, in which the critic is last."""
    groups = saved["param_groups"]
    if len(groups) != 1 or len(optimizer.param_groups) != 2:
        return saved
    logger.warning(
        "the checkpoint has one learning rate for policy and critic; from now on the critic uses "
        "train.critic_learning_rate"
    )
    old = groups[0]
    critic_size = len(optimizer.param_groups[1]["params"])
    parts = old["params"][:-critic_size], old["params"][-critic_size:]
    return {**saved, "param_groups": [{**old, "params": own} for own in parts]}
