"""Adaptive weight of the KL to the reference policy (Ziegler et al. 2019, arXiv 1909.08593).

After each epoch the weight is multiplied by

    1 + clip(kl / target - 1, -0.2, 0.2) * min(samples / horizon, 1)

so that the KL approaches the target. This is the rule of EasyR1 (hiyouga/EasyR1@b44b311,
verl/trainer/core_algos.py, lines 44 to 58) and OpenRLHF, except for the minimum, without which a
short horizon makes the weight negative.
"""

import math
from collections.abc import Mapping
from typing import Any

MAX_ERROR = 0.2  # of the relative deviation of the KL from its target
KL_BETA = "kl_beta"  # `train.beta` of the run that wrote a checkpoint
KL_WEIGHT = "kl_weight"  # name in `Progress.algorithm`, and of the logged metric


def next_kl_weight(
    weight: float, kl: float, *, target: float, horizon: float, samples: int
) -> float:
    """Return the weight of the next epoch; a non-finite KL leaves it unchanged."""
    if not math.isfinite(kl):
        return weight
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return weight * (1 + error * min(samples / horizon, 1))


def current_kl_weight(train: Any, state: Mapping[str, float]) -> float:
    """Return the weight of the KL of the current epoch.

    It starts at `train.beta`, also in a run that is resumed with another one.

    Args:
        train: The config's `train` section.
        state: `Progress.algorithm`, which a checkpoint contains.
    """
    if not train.kl_target or state.get(KL_BETA, train.beta) != train.beta:
        return train.beta
    return state.get(KL_WEIGHT, train.beta)


def update_kl_weight(
    train: Any, state: dict[str, float], metrics: Mapping[str, float], samples: int
) -> dict[str, float]:
    """Adapt the weight in `state` to the KL of an epoch; return the metric of the weight it used.

    Args:
        train: The config's `train` section.
        state: `Progress.algorithm`, changed in place.
        metrics: Training metrics of the epoch.
        samples: Number of responses of an epoch.
    """
    if not train.kl_target:
        return {}
    used = current_kl_weight(train, state)
    state[KL_BETA] = train.beta
    state[KL_WEIGHT] = next_kl_weight(
        used,
        metrics.get("train/kl", math.nan),
        target=train.kl_target,
        horizon=train.kl_horizon,
        samples=samples,
    )
    return {f"train/{KL_WEIGHT}": used}
