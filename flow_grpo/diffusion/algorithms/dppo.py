"""Flow-DPPO: a divergence mask instead of a ratio clip (Ping et al. 2026, arXiv 2606.11025).

A sample loses its gradient at a step if the KL of the Gaussian steps is at least `delta` and its
advantage pushes the ratio further away from 1.
"""

import torch
from torch import Tensor

from flow_grpo.diffusion.algorithms.settings import DppoSettings
from flow_grpo.diffusion.algorithms.trajectory import PolicyStep, TrajectoryAlgorithm
from flow_grpo.errors import UserError
from flow_grpo.losses import gaussian_step_kl


class Dppo(TrajectoryAlgorithm):
    """Flow-DPPO: policy gradient with a divergence mask instead of a ratio clip."""

    name = "dppo"
    Settings = DppoSettings
    records_step_means = True
    linear_in_credit = True

    def check(self) -> None:
        """Also reject `sample.sde_type="cps"`, which has no variance to compute a KL with."""
        super().check()
        if self.setup.sde_type == "cps":
            raise UserError(
                "is incompatible with algorithm='dppo': its log-probability has no variance",
                field="sample.sde_type",
                value="cps",
                hint="use 'flow' or 'dance'",
            )

    def surrogate(self, policy_step: PolicyStep) -> tuple[Tensor, dict[str, Tensor]]:
        """Return -A rho, 0 where the KL exceeds `delta` and A pushes the step further away."""
        credit, step = policy_step.credit, policy_step.step
        ratio = torch.exp(policy_step.log_ratio)
        far = gaussian_step_kl(step.mean, policy_step.old_mean, step.std) >= self.settings.delta
        outward = ((ratio > 1) & (credit > 0)) | ((ratio < 1) & (credit < 0))
        masked = (far & outward).detach()
        loss = torch.where(masked, 0.0, -credit * ratio)
        return loss, {"ratio": ratio.detach(), "masked": masked}
