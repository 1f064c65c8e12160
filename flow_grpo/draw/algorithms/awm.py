"""Advantage weighted matching: the policy gradient with the flow-matching error for a
log-probability (Xue et al. 2025, arXiv 2509.25050)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Batch
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings, Noised, decay_at
from flow_grpo.losses import mean_square

if TYPE_CHECKING:
    from flow_grpo.draw.policy import Policy

TINY = 1e-10


@dataclass(frozen=True)
class AwmSettings(ForwardSettings):
    power: float = setting(
        0.25,
        "Exponent of the error: below 1, samples that are far off count less.",
        above=0,
        at_most=1,
    )
    adv_clip_max: float = setting(
        5.0, "Advantages beyond +-this are cut: one success in 1,152 samples has 32.", above=0
    )
    adv_scale: float = setting(5.0, "Advantages are divided by it.", above=0)
    kl_beta: float = setting(0.001, "Weight of the KL to the model as training began.", at_least=0)
    old_beta: float = setting(
        1.0,
        "Weight of the mean squared difference to the velocity of the old weights. Without it the "
        "model collapses.",
        at_least=0,
    )
    old_rate: float = setting(
        0.001,
        "The old weights are a moving average, which keeps min(old_rate * updates, old_most) of "
        "itself once an epoch.",
        at_least=0,
    )
    old_most: float = setting(
        0.3, "0: the old weights are those of the last epoch.", at_least=0, below=1
    )


class Awm(ForwardProcess):
    name = "awm"
    Settings = AwmSettings
    keeps_old = True
    fixed = ("old",)

    def objective(
        self, velocity: Tensor, at: Noised, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        error = mean_square(velocity - at.target)
        log_prob = matching_log_prob(error, at.t.flatten(), self.settings.power)
        # The ratio to the policy of this update is 1, where PPO's clip has no effect.
        ratio = torch.exp(log_prob - log_prob.detach())
        s, moved = self.settings, mean_square(velocity - at.old)
        credit = batch.credit.clamp(-s.adv_clip_max, s.adv_clip_max) / s.adv_scale
        loss = -credit * ratio + s.old_beta * moved
        return loss, {"matching_error": error, "old_distance": moved}

    def after_epoch(self, policy: "Policy", updates: int) -> None:
        s = self.settings
        policy.old.blend(decay_at(updates, rate=s.old_rate, start=0, most=s.old_most))


def matching_log_prob(error: Tensor, t: Tensor, p: float) -> Tensor:
    """What stands in for a log-probability: -t error^p / p, smooth where the error is 0."""
    return -t / p * ((error + TINY) ** p - TINY**p)
