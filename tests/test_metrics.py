import math

import numpy as np
import pytest

from flow_grpo.metrics import off_policy_warning, reward_metrics


def test_spread_is_within_groups_and_over_what_was_scored():
    rewards = {"a": np.array([1.0, 3.0, 5.0, 5.0, np.nan]), "avg": np.array([1, 3, 5, 5, np.nan])}
    metrics = reward_metrics(rewards, np.array([0, 0, 1, 1, 1]))
    assert metrics["reward/a"] == metrics["reward/avg"] == 3.5
    assert metrics["reward/std_within_group"] == 0.5  # 1 and 0
    assert metrics["reward/zero_std_ratio"] == 0.5
    assert metrics["reward/failed"] == 1


def test_with_nothing_scored_there_is_no_mean():
    metrics = reward_metrics({"avg": np.full(2, np.nan)}, np.zeros(2, int))
    assert math.isnan(metrics["reward/avg"])
    assert math.isnan(metrics["reward/zero_std_ratio"])
    assert metrics["reward/failed"] == 2


@pytest.mark.parametrize(("deviation", "warns"), [(0.0, False), (9e-6, False), (2e-5, True)])
def test_drift_near_the_clip_range_is_told(deviation, warns):
    assert bool(off_policy_warning(deviation, clip=1e-4)) == warns
