"""Base of algorithms that train on the forward (noising) process of the final latents.

Problem: trajectory methods need stochastic sampling and log-probabilities of its steps. The final
latents x0 are enough to train the velocity at any noise level, as in pretraining, however they were
sampled.

Formula: noise x0 again and evaluate the velocity there,

    x_t = (1 - t) x0 + t e,   u = e - x0,   e ~ N(0, I)

A subclass defines an objective of the velocity v(x_t, t), the flow-matching target u, the credit of
the sample and, if needed, the velocities v_old and v_ref of the old and the reference policy at the
same x_t: contrast two implicit policies (nft), weight |v - u|^2 by advantages (awm, ram) or rewards
(rwr, sft), or compare samples of a group (dgpo, dpo). The KL to the reference policy is
|v - v_ref|^2 or that of the Gaussian steps along both velocities.

Noise levels are `times` of those of the rollout, stratified: one random offset per sample, equal
spacing, so that all levels are equally likely and none is drawn twice. Noise and levels are seeded
by the sample's index, or by its group, so that neither world size nor batch size changes them.

Layout: B samples at T levels are (B, T, C, H, W); `loss` trains one level, (B, C, H, W), at a time.

Trade-off: any sampler works, also the ODE or a second-order solver, and T is independent of the
number of sampling steps. The flow-matching error is only a proxy of the log-likelihood, so there is
no exact importance ratio; most methods need an old policy or a KL to stay stable.

Papers: DiffusionNFT (arXiv 2509.16117), AWM (arXiv 2509.25050), DGPO (arXiv 2510.08425),
Diffusion-DPO (arXiv 2311.12908), V-GRPO (arXiv 2604.23380).
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data.seeding import Stream, numpy_rng, torch_generator
from flow_grpo.diffusion.algorithms.base import Algorithm, Batch, Loss, Setup
from flow_grpo.diffusion.algorithms.settings import ForwardSettings
from flow_grpo.diffusion.models import Schedule
from flow_grpo.diffusion.rollout import Dynamics, draw_noise, take_step
from flow_grpo.errors import UserError
from flow_grpo.losses import kl_to_reference, mean_square, root_mean_square
from flow_grpo.perf.transfer import to_device

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy, PolicyWeights


@dataclass(frozen=True)
class NoisedSamples:
    """Samples at T noise levels each; (B, T, C, H, W) unless noted."""

    steps: np.ndarray  # (B, T), indices into the schedule
    t: Tensor  # (B, T, 1, 1, 1), noise levels
    timesteps: Tensor  # (B, T), in the model's units
    x_t: Tensor
    target: Tensor  # u = e - x0
    old: Tensor | None = None  # velocities of the old policy
    reference: Tensor | None = None  # velocities of the reference policy

    def __getitem__(self, j: int) -> "NoisedSamples":
        """Return the j-th level of all samples, (B, C, H, W)."""
        at = {k: None if v is None else v[:, j] for k, v in vars(self).items()}
        return type(self)(**at)


class ForwardProcessAlgorithm(Algorithm):
    """Base of algorithms that noise final latents again; a subclass defines `objective`."""

    applies_anchors = True
    kl_setting = "kl_beta"
    shares_group_noise = False  # always share noise and levels within a group
    needed_velocities: tuple["PolicyWeights", ...] = ()  # that the objective reads

    def __init__(self, settings: ForwardSettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.kl_weight = settings.kl_beta
        self.losses_per_sample = settings.times

    def check(self) -> None:
        """Also reject too many noise levels and settings of stochastic rollouts."""
        super().check()
        skipped = self.settings.skip_first + self.settings.skip_last
        if self.settings.times > self.setup.num_steps - skipped:
            minus = f" minus {skipped} (skip_first and skip_last)" if skipped else ""
            raise UserError(
                f"must be at most sample.num_steps={self.setup.num_steps}{minus}, the number of "
                "noise levels of the rollout",
                field=f"{self.name}.times",
                value=self.settings.times,
            )
        if self.setup.window_size:
            raise UserError(
                f"is incompatible with algorithm={self.name!r}, which samples without noise",
                field="sample.sde_window_size",
                value=self.setup.window_size,
                hint="set 0",
            )
        compares_steps = self.needs_reference and self.settings.kl_type != "velocity"
        if compares_steps and self.setup.sde_type == "cps":
            raise UserError(
                "is incompatible with sample.sde_type='cps', whose last step has no variance",
                field=f"{self.name}.kl_type",
                value=self.settings.kl_type,
                hint="use sample.sde_type='flow' or 'dance'",
            )
        if self.setup.estimator == "remax":
            raise UserError(
                f"is incompatible with algorithm={self.name!r}: all samples are deterministic, so "
                "there is no separate baseline",
                field="train.advantage",
                value="remax",
                hint="use 'rloo'",
            )

    @property
    def needs_reference(self) -> bool:
        return self.is_regularized or "reference" in self.needed_velocities

    @property
    def max_guidance(self) -> float:
        return max(self.settings.train_guidance or 0.0, self.settings.kl_guidance or 0.0)

    def objective(
        self, velocity: Tensor, at: NoisedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss at one noise level without the KL, (B,), and columns to log, (B,) each.

        Args:
            velocity: v(x_t, t) of the trained weights, (B, C, H, W).
            at: Noised samples at that level.
            batch: The samples, with their credit.
        """
        raise NotImplementedError

    def prepare(self, policy: "Policy", batch: Batch) -> NoisedSamples:
        """Noise the final latents; compute the velocities of other weights there."""
        schedule, x0 = policy.dynamics.schedule, batch.trajectory.final
        seed, *rest = batch.seed
        keys, steps = self.sample_noise_levels(batch, len(schedule))
        generators = [torch_generator(seed, Stream.NOISE, *rest, key) for key in keys]
        noised = add_noise(schedule, x0, steps, generators)
        needed = set(self.needed_velocities) | ({"reference"} if self.needs_reference else set())
        if policy.behaviour is None and policy.old is not None and policy.old.is_current:
            needed -= {"old"}  # equal to the trained velocity; see `loss`
        velocities = {
            which: self.no_grad_velocities(policy, which, noised, batch) for which in sorted(needed)
        }
        return replace(noised, **velocities)

    def sample_noise_levels(self, batch: Batch, num_steps: int) -> tuple[list[int], np.ndarray]:
        """Draw the noise levels of a batch from its seed.

        Returns:
            The seed key of each sample (its index, or its group if groups share noise), and the
            indices of its schedule steps, (B, T).
        """
        s = self.settings
        shared = self.shares_group_noise or s.noise_per == "group"
        keys = (batch.group if shared else batch.index).tolist()
        seed, *rest = batch.seed
        rngs = [numpy_rng(seed, Stream.TIMES, *rest, key) for key in keys]
        span = num_steps - s.skip_first - s.skip_last
        draw = sample_stratified_steps
        if self.setup.density == "logit_normal":
            draw = sample_logit_normal_steps
        return keys, s.skip_first + np.stack([draw(rng, span, s.times) for rng in rngs])

    def no_grad_velocities(
        self, policy: "Policy", which: "PolicyWeights", at: NoisedSamples, batch: Batch
    ) -> Tensor:
        """Return velocities at all levels without gradients, (B, T, C, H, W).

        Args:
            policy: Provides the weights.
            which: "current", "reference" (with `kl_guidance` if set) or "old" (the behaviour policy
                if that is another one).
            at: Noised samples.
            batch: The samples.
        """
        s = self.settings
        guidance = s.train_guidance
        if which == "reference" and s.kl_guidance is not None:
            guidance = s.kl_guidance
        if which == "old" and policy.behaviour is not None:
            which = policy.behaviour
        return policy.no_grad_velocities(
            which, at.x_t, at.steps, batch.trajectory.conditioning, guidance=guidance
        )

    def loss(self, policy: "Policy", batch: Batch, prepared: NoisedSamples, j: int) -> Loss:
        """Return `objective` at the j-th noise level, with the KL and the anchors."""
        at = prepared[j]
        conditioning, guidance = batch.trajectory.conditioning, self.settings.train_guidance
        velocity = policy.velocity(at.x_t, at.timesteps, conditioning, guidance=guidance)
        if "old" in self.needed_velocities and at.old is None:
            at = replace(at, old=velocity.detach())
        policy_loss, columns = self.objective(velocity, at, batch)
        norm = root_mean_square(velocity)
        columns = {"policy_loss": policy_loss, "velocity_norm": norm, **columns}
        loss = Loss(policy_loss, columns)
        if at.reference is None:
            return loss
        kl = self.kl(policy.dynamics, velocity, at)
        return self.add_regularization(
            loss, batch, velocity=velocity, reference=at.reference, kl=kl
        )

    def kl(self, dynamics: Dynamics, velocity: Tensor, at: NoisedSamples) -> Tensor:
        """Return the divergence from the reference policy, (B,)."""
        difference, kind = velocity - at.reference, self.settings.kl_type
        if kind == "velocity":
            return mean_square(difference)
        # The mean of a step is linear in the velocity, so a step from 0 along the difference of the
        # velocities gives the difference of the means without cancellation.
        zero = torch.zeros_like(difference)
        step = take_step(dynamics, at.steps, zero, difference, stochastic=True, next_latents=zero)
        return kl_to_reference(
            kind,
            mean=step.mean,
            reference_mean=zero,
            std=step.std,
            rate=step.rate,
            velocity=velocity,
            reference_velocity=at.reference,
        )


def add_noise(
    schedule: Schedule, x0: Tensor, steps: np.ndarray, generators: list[torch.Generator]
) -> NoisedSamples:
    """Noise samples to the levels of T schedule steps each.

    Args:
        schedule: Noise schedule of the model.
        x0: Final latents, (B, C, H, W).
        steps: Indices into the schedule, (B, T).
        generators: One per sample.
    """
    e = draw_noise(generators, steps.shape[1], x0)
    index = torch.from_numpy(steps)
    sigmas = to_device(torch.tensor(schedule.sigmas)[index], x0.device)
    timesteps = to_device(torch.tensor(schedule.timesteps)[index], x0.device)
    t = sigmas.to(x0.dtype).reshape(*steps.shape, *[1] * (x0.ndim - 1))
    x0 = x0[:, None]
    return NoisedSamples(steps, t, timesteps, (1 - t) * x0 + t * e, e - x0)


def sample_stratified_steps(rng: np.random.Generator, steps: int, count: int) -> np.ndarray:
    """Return `count` distinct steps, one from each of `count` equal parts, with one random offset.

    Every step is equally likely.
    """
    return (np.arange(count) * steps + rng.integers(steps)) // count


def sample_logit_normal_steps(rng: np.random.Generator, steps: int, count: int) -> np.ndarray:
    """Return `count` steps whose position in the schedule is logit-normal, one per quantile range.

    The density is that of SD3 and of the DPO script of Flow-GRPO (yifan123/flow_grpo,
    scripts/train_sd3_dpo.py, `compute_density_for_timestep_sampling`: mean 0, deviation 1, of the
    index in the shifted schedule of 1,000 steps); one random offset for all quantiles.
    """
    quantiles = (np.arange(count) + max(rng.random(), 1e-12)) / count
    logits = [NormalDist().inv_cdf(min(each, 1 - 1e-12)) for each in quantiles.tolist()]
    return np.array([int(steps / (1 + math.exp(-logit))) for logit in logits])


def old_policy_decay(updates: int, *, rate: float, start: int, maximum: float) -> float:
    """Return the decay of the old policy, clip(rate * (updates - start), 0, maximum)."""
    return float(np.clip(rate * (updates - start), 0.0, maximum))
