"""Flow-GRPO: PPO's clipped surrogate on every noisy step (Liu et al. 2025, arXiv 2505.05470)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.trajectory import Taken, TrajectoryAlgorithm, TrajectorySettings
from flow_grpo.losses import clipped_policy_loss


@dataclass(frozen=True)
class GrpoSettings(TrajectorySettings):
    clip_range: float = setting(
        1e-4,
        "The ratio stays near 1 because log-probabilities are means over pixels, hence so small.",
        above=0,
    )
    clip_range_low: float | None = setting(
        None, "Where set, the lower side of the clip on its own.", above=0
    )
    clip_range_high: float | None = setting(
        None, "Where set, the upper side of the clip on its own.", above=0
    )

    @property
    def clip(self) -> tuple[float, float]:
        """How far the ratio may go below and above 1."""
        low, high = self.clip_range_low, self.clip_range_high
        return self.clip_range if low is None else low, self.clip_range if high is None else high


class Grpo(TrajectoryAlgorithm):
    name = "grpo"
    Settings = GrpoSettings
    linear_in_credit = True

    @property
    def trust(self) -> float:
        return min(self.settings.clip)

    def log_ratio(self, taken: Taken) -> Tensor:
        return taken.log_ratio

    def surrogate(self, taken: Taken) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = self.settings.clip
        clipped = clipped_policy_loss(
            torch.exp(self.log_ratio(taken)), taken.credit, clip_low=low, clip_high=high
        )
        return clipped.loss, {
            "ratio": clipped.ratio,
            "clip_low": clipped.clipped_low,
            "clip_high": clipped.clipped_high,
        }
