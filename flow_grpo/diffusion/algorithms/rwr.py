"""Reward-weighted regression: flow matching weighted by the softmax of the reward in the group."""

import numpy as np
from torch import Tensor

from flow_grpo.advantages import group_softmax
from flow_grpo.diffusion.algorithms.base import Batch, ScoredSamples
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm, NoisedSamples
from flow_grpo.diffusion.algorithms.settings import RwrSettings
from flow_grpo.losses import mean_square


class Rwr(ForwardProcessAlgorithm):
    """Reward-weighted regression: flow matching weighted by the softmax of the reward."""

    name = "rwr"
    Settings = RwrSettings
    overrides_credit = True

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        """Return weights with mean 1 in each group."""
        return group_softmax(scored.total, scored.groups, self.settings.temperature)

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        error = mean_square(velocity - at.target)
        return batch.credit * error, {"matching_error": error}
