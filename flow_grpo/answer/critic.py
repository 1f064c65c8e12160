"""The value head of PPO (`train.advantage="gae"`): its learning rate and its warm-up.

The head is a linear layer on the policy's last hidden states. It has its own parameter group, after
that of the policy, so that it can have a different learning rate, and can be trained alone at the
start (verl's `critic_warmup`, OpenRLHF's `freezing_actor_steps`).
"""

import logging
from typing import Any

from torch.optim import Optimizer

logger = logging.getLogger("flow_grpo")


def is_warmup(train: Any, epoch: int) -> bool:
    """Return whether only the value head is trained in this epoch, counted from 0."""
    return epoch < train.critic_warmup


def scale_rates(optimizer: Optimizer, train: Any, *, warmup: bool) -> None:
    """Set the learning-rate multipliers of the policy and the critic."""
    policy, critic = optimizer.param_groups
    policy["lr_scale"] = 0.0 if warmup else 1.0
    critic["lr_scale"] = train.critic_learning_rate / train.learning_rate


def split_saved_groups(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Split the single parameter group of an older checkpoint, where the value head came last."""
    groups = saved["param_groups"]
    if len(groups) != 1 or len(optimizer.param_groups) != 2:
        return saved
    logger.warning(
        "the checkpoint is from a version with one learning rate for policy and value head; from "
        "now on the value head uses train.critic_learning_rate"
    )
    [old], of_critic = groups, len(optimizer.param_groups[1]["params"])
    parts = old["params"][:-of_critic], old["params"][-of_critic:]
    return {**saved, "param_groups": [{**old, "params": own} for own in parts]}
