"""Flow-GRPO: PPO's clipped surrogate on every noisy step (Liu et al. 2025, arXiv 2505.05470)."""

import torch
from torch import Tensor

from flow_grpo.diffusion.algorithms.settings import GrpoSettings
from flow_grpo.diffusion.algorithms.trajectory import PolicyStep, TrajectoryAlgorithm
from flow_grpo.losses import clipped_policy_loss


class Grpo(TrajectoryAlgorithm):
    """Flow-GRPO: PPO's clipped surrogate on every noisy step."""

    name = "grpo"
    Settings = GrpoSettings
    linear_in_credit = True

    @property
    def trust_radius(self) -> float:
        return min(self.settings.clip)

    def log_ratio(self, policy_step: PolicyStep) -> Tensor:
        """Return the log-ratio to clip, (B,)."""
        return policy_step.log_ratio

    def surrogate(self, policy_step: PolicyStep) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the clipped surrogate of a step, and the ratio and where it is clipped."""
        low, high = self.settings.clip
        clipped = clipped_policy_loss(
            torch.exp(self.log_ratio(policy_step)), policy_step.credit, clip_low=low, clip_high=high
        )
        return clipped.loss, {
            "ratio": clipped.ratio,
            "clip_low": clipped.clipped_low,
            "clip_high": clipped.clipped_high,
        }
