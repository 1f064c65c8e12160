"""Online Diffusion-DPO (Wallace et al. 2023, arXiv 2311.12908, on the policy's own samples).

The pair is the best and the worst sample of a group, with the same noise. With the error
e = mean((v - u)^2), the loss is -log sigmoid(-beta / 2 [(e_w - e_w_ref) - (e_l - e_l_ref)]).
"""

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.advantages import mark_best_and_worst
from flow_grpo.diffusion.algorithms.base import Batch, ScoredSamples
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm, NoisedSamples
from flow_grpo.diffusion.algorithms.settings import DpoSettings
from flow_grpo.losses import mean_square


class Dpo(ForwardProcessAlgorithm):
    """Online Diffusion-DPO on the best and worst sample of each group."""

    name = "dpo"
    Settings = DpoSettings
    needs_whole_groups = True
    shares_group_noise = True
    overrides_credit = True
    zero_loss_without_credit = True
    needed_velocities = ("reference",)

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        """Return 1 for the best of each group, -1 for its worst and 0 for others."""
        return mark_best_and_worst(scored.total, scored.groups)

    @property
    def trained_samples(self) -> int:
        return 2 * self.setup.update_samples // self.setup.group_size

    def batches(self, update: list[Batch], size: int) -> list[Batch]:
        """Return batches of (best, worst) pairs in adjacent rows, one per group.

        A group of equal scores contributes a pair of weight 0, so that all ranks train equally
        many.
        """
        samples = Batch.concat(update)
        credit = samples.credit.numpy()
        pairs = []
        for rows in samples.rows_by_group():
            pairs += [rows[credit[rows].argmax()], rows[credit[rows].argmin()]]
            if pairs[-1] == pairs[-2]:
                pairs[-1] = rows[1]
        size = _round_down_to_even(size)
        return [samples[np.array(pairs[i : i + size])] for i in range(0, len(pairs), size)]

    def batch_count(self, size: int) -> int:
        return super().batch_count(_round_down_to_even(size))

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return -log sigmoid(margin) of each (best, worst) pair, for both of its adjacent rows.

        Pairs of weight 0, from groups with equal scores, have a loss of 0.
        """
        error = mean_square(velocity - at.target) - mean_square(at.reference - at.target)
        winner, loser = error[0::2], error[1::2]
        margin = -self.settings.beta / 2 * (winner - loser)
        loss = F.softplus(-margin) * batch.credit[0::2].abs()  # -log sigmoid(margin)
        columns = {"margin": margin.detach(), "accuracy": (margin > 0).float()}
        return loss.repeat_interleave(2), {
            name: values.repeat_interleave(2) for name, values in columns.items()
        }


def _round_down_to_even(size: int) -> int:
    return max(2, size - size % 2)
