"""Flow-DPPO: no clip of the ratio, but no gradient for samples that have moved too far already in
the direction they are pushed. Distance is the KL of the Gaussian steps (Ping et al. 2026, arXiv
2606.11025)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.trajectory import Taken, TrajectoryAlgorithm, TrajectorySettings
from flow_grpo.losses import drift


@dataclass(frozen=True)
class DppoSettings(TrajectorySettings):
    delta: float = setting(
        1e-5, "How far a step's mean may move before its sample is left out.", above=0
    )


class Dppo(TrajectoryAlgorithm):
    name = "dppo"
    Settings = DppoSettings
    keeps_means = linear_in_credit = True

    def check(self) -> None:
        super().check()
        if self.setup.sde_type == "cps":
            raise ValueError(
                "algorithm='dppo' needs sample.sde_type='flow' or 'dance', not 'cps', which leaves "
                "the variance out of its log-probability"
            )

    def surrogate(self, taken: Taken) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = torch.exp(taken.log_ratio)
        far = drift(taken.step.mean, taken.old_mean, taken.step.std) >= self.settings.delta
        outward = ((ratio > 1) & (taken.credit > 0)) | ((ratio < 1) & (taken.credit < 0))
        masked = (far & outward).detach()
        loss = torch.where(masked, 0.0, -taken.credit * ratio)
        return loss, {"ratio": ratio.detach(), "masked": masked}
