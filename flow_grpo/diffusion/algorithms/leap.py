"""LeapAlign: backpropagate a differentiable reward (Liang et al. 2026, arXiv 2604.15311).

The gradient flows through a few long ODE steps ("leaps") between states of the rollout instead of
through all of its steps.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.diffusion.algorithms.base import Batch, ScoredSamples
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm, NoisedSamples
from flow_grpo.diffusion.algorithms.settings import LeapSettings
from flow_grpo.perf.transfer import to_device

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy


class Leap(ForwardProcessAlgorithm):
    """LeapAlign: backpropagation of a differentiable reward through a few long ODE steps."""

    name = "leap"
    Settings = LeapSettings
    overrides_credit = True
    zero_loss_without_credit = True
    needs_reward_gradient = True

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        """Return 1 for every sample with a score, 0 for others."""
        return np.isfinite(scored.total).astype(float)

    def prepare(self, policy: "Policy", batch: Batch) -> NoisedSamples:
        """Return the states before each leap.

        Their `target` is the gradient of -reward with respect to the velocity, (B, T, C, H, W).

        The chain rule runs from the last leap to the first: a leap adds (t' - t) v to the latents.
        """
        schedule, states = policy.dynamics.schedule, batch.trajectory.states
        _, steps = self.sample_noise_levels(batch, len(schedule))
        index = torch.from_numpy(steps)  # (B, T)
        x = states[torch.arange(len(batch))[:, None], index]
        timesteps = to_device(torch.tensor(schedule.timesteps)[index], states.device)
        t = torch.tensor(schedule.sigmas)[F.pad(index, (0, 1), value=len(schedule))]
        t = to_device(t.to(states.dtype), states.device).reshape(*t.shape, *[1] * (states.ndim - 2))
        at = NoisedSamples(steps, t[:, :-1], timesteps, x, torch.zeros_like(x))
        latent_gradient = -batch.trajectory.reward_gradient
        velocity_gradients = []
        for j in reversed(range(steps.shape[1])):
            velocity_gradient = (t[:, j + 1] - t[:, j]) * latent_gradient
            velocity_gradients.insert(0, velocity_gradient)
            if j and self.settings.discount:
                through_input = policy.input_gradient(
                    x[:, j],
                    at.timesteps[:, j],
                    batch.trajectory.conditioning,
                    velocity_gradient,
                    guidance=self.settings.train_guidance,
                )
                latent_gradient = latent_gradient + self.settings.discount * through_input
        at = replace(at, target=torch.stack(velocity_gradients, 1))
        if not self.needs_reference:
            return at
        return replace(at, reference=self.no_grad_velocities(policy, "reference", at, batch))

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.credit * (at.target * velocity).flatten(1).sum(1), {}
