"""LeapAlign: the reward's own gradient, taken back through a few long steps between states of the
rollout (Liang et al. 2026, arXiv 2604.15311). For rewards that can be differentiated."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Batch, Scored
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings, Noised
from flow_grpo.speed.transfer import send

if TYPE_CHECKING:
    from flow_grpo.draw.policy import Policy


@dataclass(frozen=True)
class LeapSettings(ForwardSettings):
    times: int = setting(
        2, "Leaps to the picture: from so many states of the rollout, each to the next.", at_least=1
    )
    discount: float = setting(
        0.3,
        "How much counts of what a leap changes by where the later ones begin. 0 leaves it out, "
        "and saves a backward pass for each of them.",
        at_least=0,
        at_most=1,
    )


class Leap(ForwardProcess):
    name = "leap"
    Settings = LeapSettings
    own_credit = needs_reward_gradient = True

    def credit(self, scored: Scored) -> np.ndarray:
        """1 for every sample that has a score."""
        return np.isfinite(scored.total).astype(float)

    def has_gradient(self, credit: Tensor) -> Tensor:
        return super().has_gradient(credit) if self.is_held else credit != 0

    def prepare(self, policy: "Policy", batch: Batch) -> Noised:
        """States of the rollout, and for `target` the slope of minus the reward in the velocity
        at each, by the chain rule from the last leap to the first."""
        schedule, states = policy.dynamics.schedule, batch.trajectory.states
        _, steps = self.levels(batch, len(schedule))
        chosen = torch.from_numpy(steps)  # (B, T)
        x = states[torch.arange(len(batch))[:, None], chosen]
        timesteps = send(torch.tensor(schedule.timesteps)[chosen], states.device)
        t = torch.tensor(schedule.sigmas)[F.pad(chosen, (0, 1), value=len(schedule))]
        t = send(t.to(states.dtype), states.device).reshape(*t.shape, *[1] * (states.ndim - 2))
        at = Noised(steps, t[:, :-1], timesteps, x, torch.zeros_like(x))
        slope, slopes = -batch.trajectory.pull, []
        for j in reversed(range(steps.shape[1])):
            slopes.insert(0, (t[:, j + 1] - t[:, j]) * slope)  # a leap adds v times this to x
            if j and self.settings.discount:
                back = policy.input_gradient(
                    *(x[:, j], at.timesteps[:, j], batch.trajectory.conditioning, slopes[0]),
                    guidance=self.settings.train_guidance,
                )
                slope = slope + self.settings.discount * back
        at = replace(at, target=torch.stack(slopes, 1))
        if not self.needs_reference:
            return at
        return replace(at, reference=self.fixed_velocities(policy, "reference", at, batch))

    def objective(
        self, velocity: Tensor, at: Noised, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.credit * (at.target * velocity).flatten(1).sum(1), {}
