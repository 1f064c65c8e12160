"""Diffusion-DPO (Wallace et al. 2023, arXiv 2311.12908) on samples of the policy or given pairs.

A pair is the best and the worst sample of a group, or a preferred and a rejected image of a data
set; both have the same noise and noise level. With the error e = mean((v - u)^2), the loss is
-log sigmoid(margin), margin = -beta / 2 [(e_w - e_w_ref) - (e_l - e_l_ref)].

The formula is that of the authors' code (SalesforceAIResearch/DiffusionDPO, train.py, lines 1053 to
1055 and 1121 to 1145): shared noise and timestep, errors averaged over the latents, all timesteps
weighted equally, and the factor 1/2 next to beta, which is 5000 there for SD1.5 and SDXL. Flow-GRPO
has the same one for flow matching (yifan123/flow_grpo, scripts/train_sd3_dpo.py).
"""

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.advantages import mark_best_and_worst
from flow_grpo.diffusion.algorithms.base import Batch, ScoredSamples
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm, NoisedSamples
from flow_grpo.diffusion.algorithms.settings import DpoSettings
from flow_grpo.losses import mean_square


class PairAlgorithm(ForwardProcessAlgorithm):
    """Base of algorithms that compare two images of a prompt; a subclass defines `pair_loss`.

    The credit of the preferred image is 2 p - 1, with the probability p that it is preferred, and
    that of the other one is its negative.
    """

    needs_whole_groups = True
    shares_group_noise = True
    overrides_credit = True
    zero_loss_without_credit = True
    needed_velocities = ("reference",)
    given = "pairs"

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        """Return 1 for the best of each group, -1 for its worst and 0 for others."""
        return mark_best_and_worst(scored.total, scored.groups)

    @property
    def trained_samples(self) -> int:
        return 2 * (self.setup.update_samples // self.setup.group_size) + self.setup.given_samples

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

    def pair_loss(self, margin: Tensor, preference: Tensor) -> Tensor:
        """Return the loss of each pair, (P,).

        Args:
            margin: `beta` times the difference of the log-likelihood ratios, (P,).
            preference: 2 p - 1, from 0 to 1, (P,).
        """
        raise NotImplementedError

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each (best, worst) pair, for both of its adjacent rows.

        Pairs of weight 0, from groups with equal scores, have a loss of 0.
        """
        error = mean_square(velocity - at.target)
        change = error - mean_square(at.reference - at.target)
        margin = -self.settings.beta / 2 * (change[0::2] - change[1::2])
        preference = batch.credit[0::2].abs().clamp(max=1)
        loss = self.pair_loss(margin, preference) * (preference > 0)
        columns = {
            "margin": margin,
            "accuracy": (margin > 0).float(),
            "chosen_error": error[0::2],
            "rejected_error": error[1::2],
            "chosen_change": change[0::2],
            "rejected_change": change[1::2],
        }
        return loss.repeat_interleave(2), {
            name: values.detach().repeat_interleave(2) for name, values in columns.items()
        }


class Dpo(PairAlgorithm):
    """Diffusion-DPO on the best and worst sample of each group, or on given pairs."""

    name = "dpo"
    Settings = DpoSettings

    def pair_loss(self, margin: Tensor, preference: Tensor) -> Tensor:
        """Return the cross-entropy of sigmoid(margin) with the probability of the preference."""
        probability = (1 + preference) / 2
        return probability * F.softplus(-margin) + (1 - probability) * F.softplus(margin)


def _round_down_to_even(size: int) -> int:
    return max(2, size - size % 2)
