"""Rewards: scorers by name, and the weighted sum of several.

`build_reward` builds them; protocol.py defines what a scorer is. Scorers are imported when they are
built, so importing this package is cheap.
"""

from flow_grpo.rewards.builder import build_reward, build_scorers, guard_scorers, option_names
from flow_grpo.rewards.config_checks import check_nonzero_weight, check_reward_fields
from flow_grpo.rewards.registry import IMAGE_REWARDS, REWARDS, TEXT_REWARDS
from flow_grpo.rewards.weighted_reward import (
    TOTAL,
    PendingScores,
    WeightedReward,
    close_scorers,
    nonzero_weights,
)

__all__ = [
    "IMAGE_REWARDS",
    "REWARDS",
    "TEXT_REWARDS",
    "TOTAL",
    "PendingScores",
    "WeightedReward",
    "build_reward",
    "build_scorers",
    "check_nonzero_weight",
    "check_reward_fields",
    "close_scorers",
    "guard_scorers",
    "nonzero_weights",
    "option_names",
]
