"""Online DPO: the best sample of each group against its worst, with one noise for both (Wallace et
al. 2023, arXiv 2311.12908, on samples of the policy itself)."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.advantages import best_and_worst
from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Batch, Scored
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings, Noised
from flow_grpo.losses import mean_square


@dataclass(frozen=True)
class DpoSettings(ForwardSettings):
    beta: float = setting(2000.0, "How far the model may leave the reference.", above=0)


class Dpo(ForwardProcess):
    name = "dpo"
    Settings = DpoSettings
    whole_groups = shares_noise = own_credit = True
    fixed = ("reference",)

    def credit(self, scored: Scored) -> np.ndarray:
        """1 for the best of a group, -1 for its worst, 0 for the others."""
        return best_and_worst(scored.total, scored.groups)

    @property
    def trained_samples(self) -> int:
        return 2 * self.setup.update_samples // self.setup.group_size

    def batches(self, update: list[Batch], size: int) -> list[Batch]:
        """Pairs side by side. A group whose samples are all alike has a pair of no weight, so that
        all processes train as many."""
        whole = Batch.join(update)
        credit = whole.credit.numpy()
        pairs = []
        for rows in whole.by_group():
            pairs += [rows[credit[rows].argmax()], rows[credit[rows].argmin()]]
            if pairs[-1] == pairs[-2]:
                pairs[-1] = rows[1]
        size = _even(size)
        return [whole[np.array(pairs[i : i + size])] for i in range(0, len(pairs), size)]

    def batch_count(self, size: int) -> int:
        return super().batch_count(_even(size))

    def has_gradient(self, credit: Tensor) -> Tensor:
        return super().has_gradient(credit) if self.is_held else credit != 0

    def objective(
        self, velocity: Tensor, at: Noised, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        error = mean_square(velocity - at.target) - mean_square(at.reference - at.target)
        winner, loser = error[0::2], error[1::2]
        margin = -self.settings.beta / 2 * (winner - loser)
        loss = F.softplus(-margin) * batch.credit[0::2].abs()  # -log sigmoid(margin)
        columns = {"margin": margin.detach(), "accuracy": (margin > 0).float()}
        return loss.repeat_interleave(2), {
            name: values.repeat_interleave(2) for name, values in columns.items()
        }


def _even(size: int) -> int:
    return max(2, size - size % 2)
