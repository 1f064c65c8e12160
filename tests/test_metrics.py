import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from flow_grpo.grpo import StepLoss
from flow_grpo.metrics import TrainingStats, off_policy_warning, reward_metrics
from flow_grpo.objectives import PolicyLoss


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


def test_samples_left_out_count_as_a_loss_of_zero():
    ratio, no = torch.tensor([1.0, 1.5]), torch.zeros(2, dtype=torch.bool)
    policy = PolicyLoss(torch.tensor([-1.0, 3.0]), ratio, no, ~no)
    loss = StepLoss(policy.loss, policy, kl=torch.zeros(2), approx_kl=torch.tensor([0.0, 2.0]))
    stats = TrainingStats()
    stats.add(loss, on_policy=True, left_out=6)
    stats.add_grad_norm(torch.tensor(2.0))
    metrics = stats.metrics(Accelerator(cpu=True))
    assert metrics["train/loss"] == metrics["train/policy_loss"] == 0.25
    assert metrics["train/approx_kl"] == metrics["train/clip_high"] == 1.0  # of what was computed
    assert (metrics["train/ratio_min"], metrics["train/ratio_max"]) == (1.0, 1.5)
    assert metrics["train/ratio_mean"] == 1.25
    assert metrics["train/first_update_ratio_dev"] == 0.5
