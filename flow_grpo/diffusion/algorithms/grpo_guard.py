"""GRPO-Guard: centred ratios and equally weighted steps (Wang et al. 2025, arXiv 2510.22319).

The log-ratio of a Gaussian step has mean -b, b = mean((mean - mean_old)^2) / (2 std^2), so ratios
above 1 are rarer than below and the clip acts on one side only. GRPO-Guard clips
rho = exp((log p - log p_old + b) std), with b per sample, and divides the loss by -dt.
"""

from torch import Tensor

from flow_grpo.diffusion.algorithms.grpo import Grpo
from flow_grpo.diffusion.algorithms.settings import GuardSettings
from flow_grpo.diffusion.algorithms.trajectory import PolicyStep
from flow_grpo.errors import UserError
from flow_grpo.losses import gaussian_step_kl


class GrpoGuard(Grpo):
    """GRPO-Guard: Flow-GRPO with centred ratios and equally weighted steps."""

    name = "grpo_guard"
    Settings = GuardSettings
    records_step_means = True

    def check(self) -> None:
        """Also reject `sample.sde_type` other than "flow"."""
        super().check()
        if self.setup.sde_type != "flow":
            raise UserError(
                "is incompatible with algorithm='grpo_guard', whose ratio is derived for 'flow'",
                field="sample.sde_type",
                value=self.setup.sde_type,
                hint="use 'flow'",
            )

    def log_ratio(self, policy_step: PolicyStep) -> Tensor:
        std = policy_step.step.std
        bias = gaussian_step_kl(policy_step.step.mean, policy_step.old_mean, std)
        return (policy_step.log_ratio + bias) * std.flatten()
