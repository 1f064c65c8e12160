"""Reinforce adjoint matching (Bergmeister et al. 2026, arXiv 2605.10759).

Regression on the reference policy's velocity, shifted towards good samples and away from bad ones.
"""

from torch import Tensor

from flow_grpo.diffusion.algorithms.base import Batch
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm, NoisedSamples
from flow_grpo.diffusion.algorithms.settings import RamSettings
from flow_grpo.losses import mean_square


class Ram(ForwardProcessAlgorithm):
    """Reinforce adjoint matching: regression on the reference velocity shifted by advantages."""

    name = "ram"
    Settings = RamSettings
    zero_loss_without_credit = True

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return R |v - u|^2, R the scaled advantage.

        With the KL its gradient is that of |v - sg(v_ref + R (u - v))|^2, which is
        2 (v - v_ref) + 2 R (v - u).
        """
        error = mean_square(velocity - at.target)
        credit = self.clip_credit(batch.credit) / self.settings.adv_scale
        return credit * error, {"matching_error": error}
