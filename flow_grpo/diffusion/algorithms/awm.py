"""Advantage-weighted matching (Xue et al. 2025, arXiv 2509.25050).

A policy gradient in which a power of the flow-matching error replaces the log-probability.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flow_grpo.diffusion.algorithms.base import Batch
from flow_grpo.diffusion.algorithms.forward_process import (
    ForwardProcessAlgorithm,
    NoisedSamples,
    old_policy_decay,
)
from flow_grpo.diffusion.algorithms.settings import AwmSettings
from flow_grpo.losses import mean_square

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy

EPS = 1e-10


class Awm(ForwardProcessAlgorithm):
    """Advantage-weighted matching: policy gradient whose log-probability is a matching error."""

    name = "awm"
    Settings = AwmSettings
    keeps_old_policy = True
    needed_velocities = ("old",)

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return -A exp(log p - sg(log p)) + old_beta |v - v_old|^2."""
        error = mean_square(velocity - at.target)
        log_prob = matching_log_prob(error, at.t.flatten(), self.settings.power)
        # On-policy the ratio is 1 and PPO's clip has no effect, so it is left out.
        ratio = torch.exp(log_prob - log_prob.detach())
        old_distance = mean_square(velocity - at.old)
        credit = self.clip_credit(batch.credit) / self.settings.adv_scale
        loss = -credit * ratio + self.settings.old_beta * old_distance
        return loss, {"matching_error": error, "old_distance": old_distance}

    def after_epoch(self, policy: "Policy", updates: int) -> None:
        """Blend the current weights into the old policy."""
        s = self.settings
        policy.old.blend(
            old_policy_decay(updates, rate=s.old_rate, start=0, maximum=s.old_max_decay)
        )


def matching_log_prob(error: Tensor, t: Tensor, p: float) -> Tensor:
    """Return -t error^p / p, smoothed at 0, in place of a log-probability, (B,)."""
    return -t / p * ((error + EPS) ** p - EPS**p)
