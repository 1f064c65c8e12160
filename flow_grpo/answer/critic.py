"""The value head of PPO (`train.advantage="gae"`): its learning rate and its warm-up.

The head is a linear layer on the policy's last hidden states. It has a parameter group of its own,
behind that of the policy, so that it can learn at another rate, and alone while it still predicts
nothing useful (verl's `critic_warmup`, OpenRLHF's `freezing_actor_steps`).
"""

import logging
from typing import Any

from torch.optim import Optimizer

logger = logging.getLogger("flow_grpo")


def is_warmup(train: Any, epoch: int) -> bool:
    """Whether the value head alone is trained in an epoch, counted from 0."""
    return epoch < train.critic_warmup


def scale_rates(optimizer: Optimizer, train: Any, *, warmup: bool) -> None:
    """Set what the learning rate of an update is multiplied by, for the policy and its critic."""
    policy, critic = optimizer.param_groups
    policy["lr_scale"] = 0.0 if warmup else 1.0
    critic["lr_scale"] = train.critic_learning_rate / train.learning_rate


def split_saved_groups(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Divide the one parameter group of an older checkpoint, which had the value head last."""
    groups = saved["param_groups"]
    if len(groups) != 1 or len(optimizer.param_groups) != 2:
        return saved
    logger.warning(
        "the checkpoint is of a version with one learning rate for policy and value head; from now "
        "on the value head has train.critic_learning_rate"
    )
    [old], of_critic = groups, len(optimizer.param_groups[1]["params"])
    parts = old["params"][:-of_critic], old["params"][-of_critic:]
    return {**saved, "param_groups": [{**old, "params": own} for own in parts]}
