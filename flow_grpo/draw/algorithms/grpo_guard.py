"""GRPO-Guard: ratios centred at 1 on every step, and steps of equal weight (Wang et al. 2025,
arXiv 2510.22319).

Log-ratios of a Gaussian step have the mean -b, b = |mean - old mean|^2 / 2 std^2, so that ratios
above 1 are rarer than those below and the clip holds back one side only. Adding b, per sample,
and scaling by the noise evens that out.
"""

from dataclasses import dataclass

from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.draw.algorithms.trajectory import StepWeight, Taken
from flow_grpo.losses import drift


@dataclass(frozen=True)
class GuardSettings(GrpoSettings):
    clip_range: float = setting(
        2e-6, "How far the ratio may move from 1: for OCR; 4e-6 for PickScore.", above=0
    )
    beta: float = setting(
        0.0,
        "Weight of the KL to the model as training began: 0, as the clip keeps the model near.",
        at_least=0,
    )
    step_weight: StepWeight = setting(
        "guard",
        "1/(-dt): gradients of steps with little noise are not smaller than those of others.",
        choices=("none", "guard", "tempflow"),
    )


class GrpoGuard(Grpo):
    name = "grpo_guard"
    Settings = GuardSettings
    keeps_means = True

    def check(self) -> None:
        super().check()
        if self.setup.sde_type != "flow":
            raise ValueError(
                f"algorithm='grpo_guard' needs sample.sde_type='flow', not "
                f"{self.setup.sde_type!r}: its ratio is worked out for that step"
            )

    def log_ratio(self, taken: Taken) -> Tensor:
        std = taken.step.std
        return (taken.log_ratio + drift(taken.step.mean, taken.old_mean, std)) * std.flatten()
