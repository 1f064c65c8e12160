"""Online supervised fine-tuning: flow matching on the best sample of each group."""

import numpy as np
from torch import Tensor

from flow_grpo.advantages import best_and_worst
from flow_grpo.draw.algorithms.base import Batch, Scored
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings, Noised
from flow_grpo.losses import mean_square


class Sft(ForwardProcess):
    name = "sft"
    Settings = ForwardSettings
    whole_groups = own_credit = True

    def credit(self, scored: Scored) -> np.ndarray:
        """1 for the best of a group, 0 for the others, and for all where none is better."""
        return best_and_worst(scored.total, scored.groups).clip(min=0)

    @property
    def trained_samples(self) -> int:
        return self.setup.update_samples // self.setup.group_size

    def batches(self, update: list[Batch], size: int) -> list[Batch]:
        whole = Batch.join(update)
        credit = whole.credit.numpy()
        best = np.array([rows[credit[rows].argmax()] for rows in whole.by_group()])
        return [whole[best[i : i + size]] for i in range(0, len(best), size)]

    def has_gradient(self, credit: Tensor) -> Tensor:
        return super().has_gradient(credit) if self.is_held else credit != 0

    def objective(
        self, velocity: Tensor, at: Noised, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        error = mean_square(velocity - at.target)
        return batch.credit * error, {"matching_error": error}
