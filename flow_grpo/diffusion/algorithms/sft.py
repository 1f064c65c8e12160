"""Supervised fine-tuning: flow matching on the best sample of each group, or on given images."""

import numpy as np
from torch import Tensor

from flow_grpo.advantages import mark_best_and_worst
from flow_grpo.diffusion.algorithms.base import Batch, ScoredSamples
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm, NoisedSamples
from flow_grpo.diffusion.algorithms.settings import ForwardSettings
from flow_grpo.losses import mean_square


class Sft(ForwardProcessAlgorithm):
    """Supervised fine-tuning: flow matching on the best sample of each group, or given images."""

    name = "sft"
    Settings = ForwardSettings
    needs_whole_groups = True
    overrides_credit = True
    zero_loss_without_credit = True
    given = "demonstrations"

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        """Return 1 for the best of each group and 0 otherwise; all 0 if the scores are equal."""
        return mark_best_and_worst(scored.total, scored.groups).clip(min=0)

    @property
    def trained_samples(self) -> int:
        return self.setup.update_samples // self.setup.group_size + self.setup.given_samples

    def batches(self, update: list[Batch], size: int) -> list[Batch]:
        """Return batches of the best sample of each group; a given image is a group of its own."""
        samples = Batch.concat(update)
        credit = samples.credit.numpy()
        best = np.array([rows[credit[rows].argmax()] for rows in samples.rows_by_group()])
        return [samples[best[i : i + size]] for i in range(0, len(best), size)]

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        error = mean_square(velocity - at.target)
        return batch.credit * error, {"matching_error": error}
