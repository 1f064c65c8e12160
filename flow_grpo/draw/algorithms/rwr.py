"""Reward-weighted regression: flow matching on all samples, weighted by the softmax of their reward
in the group."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from flow_grpo.advantages import group_softmax
from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Batch, Scored
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings, Noised
from flow_grpo.losses import mean_square


@dataclass(frozen=True)
class RwrSettings(ForwardSettings):
    temperature: float = setting(
        0.1,
        "Temperature of the softmax, in units of the reward: lower takes the best alone.",
        above=0,
    )


class Rwr(ForwardProcess):
    name = "rwr"
    Settings = RwrSettings
    own_credit = True

    def credit(self, scored: Scored) -> np.ndarray:
        """Weights with a mean of 1 in each group."""
        return group_softmax(scored.total, scored.groups, self.settings.temperature)

    def objective(
        self, velocity: Tensor, at: Noised, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        error = mean_square(velocity - at.target)
        return batch.credit * error, {"matching_error": error}
