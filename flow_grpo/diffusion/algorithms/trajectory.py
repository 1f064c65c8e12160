"""Base of algorithms that train the noisy steps of sampled trajectories (PPO-like).

Problem: a denoising trajectory is an episode whose only reward comes with the final image. Each
noisy step x_i -> x_{i+1} is an action of a Gaussian policy with a known log-probability
(flow_grpo/sde.py), so the policy gradient applies to every step, with the advantage of the sample
as the credit of all its steps.

Formula: with rho_i = exp(log p(x_{i+1} | x_i) - log p_old(x_{i+1} | x_i)) and advantage A clamped
to +-adv_clip_max, the loss of step i is

    step_weight_i * surrogate(rho_i, A) + kl_weight * KL_i + anchors

A subclass defines the surrogate: clipped (grpo), centred (grpo_guard), masked (dppo). The KL
compares the step with that of the frozen reference policy from the same x_i. `step_weight` is 1,
1/(-dt) ("guard") or 2.25 std ("tempflow", TempFlow-GRPO, arXiv 2508.04324), because the gradient of
log p scales with the noise of the step.

Invariant: before the first update of an epoch rho is exactly 1, because sampling and training
compute the velocity with the same code on batches of the same composition.

Layout: for T noisy steps, `trajectory.latents` is (B, T + 1, C, H, W) in float32, with step j
leading from column j to column j + 1; `trajectory.log_probs` is (B, T). One call of `loss` trains
one step of all B samples, so only one step's activations are alive at a time.

Trade-off: exact importance ratios, but one forward and backward pass per trained step and
stochastic sampling. The algorithms of forward_process.py need neither.

Paper: Flow-GRPO (Liu et al. 2025, arXiv 2505.05470).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flow_grpo.diffusion.algorithms.base import Algorithm, Batch, Loss, Setup, select_sde_steps
from flow_grpo.diffusion.algorithms.settings import TrajectorySettings
from flow_grpo.diffusion.rollout import Trajectory, take_step
from flow_grpo.errors import UserError
from flow_grpo.losses import KLType, kl_to_reference, root_mean_square
from flow_grpo.sde import Step

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy, PolicyWeights

TEMPFLOW_SCALE = 2.25  # TempFlow-GRPO's constant for SD3


@dataclass(frozen=True)
class PreparedBatch:
    """Tensors that the losses of a batch need and that are computed once, without gradients."""

    reference: Tensor | None  # velocities of the reference policy, (B, T, C, H, W)
    log_ratio: Tensor | None = None  # (B,), of whole trajectories


@dataclass(frozen=True)
class PolicyStep:
    """A noisy step recomputed with the current weights."""

    step: Step
    log_ratio: Tensor  # (B,), to the behaviour policy; of the trajectory with ratio="trajectory"
    old_mean: Tensor | None  # mean under the behaviour policy if `records_step_means`, (B, C, H, W)
    credit: Tensor  # (B,), clamped to +-adv_clip_max
    dt: float


class TrajectoryAlgorithm(Algorithm):
    """Base of algorithms that train noisy steps; a subclass defines `surrogate`."""

    applies_anchors = True
    kl_setting = "beta"
    zero_loss_without_credit = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reset `linear_in_credit` in subclasses that override a part of the loss."""
        super().__init_subclass__(**kwargs)
        # A subclass that overrides part of the loss does not inherit `linear_in_credit`.
        parts = {"loss", "surrogate", "policy_loss", "add_regularization", "_step_weight"}
        if not parts.isdisjoint(vars(cls)):
            cls.linear_in_credit = vars(cls).get("linear_in_credit", False)

    def __init__(self, settings: TrajectorySettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.kl_weight = settings.beta
        self.losses_per_sample = len(self.noisy_steps(np.random.default_rng(0), 0))

    def check(self) -> None:
        """Also reject `ratio="trajectory"` for algorithms that compare single steps."""
        super().check()
        if self.settings.ratio == "trajectory" and self.records_step_means:
            raise UserError(
                f"is incompatible with algorithm={self.name!r}, which compares single steps",
                field=f"{self.name}.ratio",
                value="trajectory",
                hint="use 'step'",
            )

    def noisy_steps(self, rng: np.random.Generator, epoch: int) -> range:
        return select_sde_steps(self.setup, rng)

    def surrogate(self, policy_step: PolicyStep) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a step before its weight and columns to log, (B,) each."""
        raise NotImplementedError

    def prepare(self, policy: "Policy", batch: Batch) -> PreparedBatch:
        """Compute the reference velocities and, for ratios of trajectories, their log-ratios."""
        trajectory = batch.trajectory
        steps = np.tile(trajectory.steps, (len(batch), 1))

        def velocities(which: "PolicyWeights") -> Tensor:
            latents = trajectory.latents[:, :-1]
            return policy.no_grad_velocities(which, latents, steps, trajectory.conditioning)

        reference = velocities("reference") if self.needs_reference else None
        if self.settings.ratio == "step":
            return PreparedBatch(reference)
        return PreparedBatch(
            reference, trajectory_log_ratios(policy, trajectory, velocities("current"))
        )

    def loss(self, policy: "Policy", batch: Batch, prepared: PreparedBatch, j: int) -> Loss:
        """Recompute the j-th noisy step; return its surrogate with the KL and the anchors."""
        trajectory = batch.trajectory
        i = trajectory.steps[j]
        latents, next_latents = trajectory.latents[:, j], trajectory.latents[:, j + 1]
        step, velocity = policy.step(i, latents, next_latents, trajectory.conditioning)
        log_ratio = step.log_prob - trajectory.log_probs[:, j]
        if prepared.log_ratio is not None:  # the trajectory's value with this step's gradient
            log_ratio = prepared.log_ratio + log_ratio - log_ratio.detach()
        policy_step = PolicyStep(
            step,
            log_ratio,
            old_mean=None if trajectory.means is None else trajectory.means[:, j],
            credit=self.clip_credit(batch.credit),
            dt=policy.dynamics.schedule.dt(i),
        )
        loss = self.policy_loss(policy_step, velocity)
        if prepared.reference is None:
            return loss
        reference = prepared.reference[:, j]
        kl = step_kl(self.settings.kl_type, policy, i, latents, (step, velocity), reference)
        return self.add_regularization(loss, batch, velocity=velocity, reference=reference, kl=kl)

    def policy_loss(self, policy_step: PolicyStep, velocity: Tensor) -> Loss:
        """Return the loss of a step along `velocity`, without the KL and the anchors."""
        loss, columns = self.surrogate(policy_step)
        loss = loss * self._step_weight(policy_step)
        half_square = 0.5 * policy_step.log_ratio.detach() ** 2
        columns = {"policy_loss": loss, "approx_kl": half_square, **columns}
        columns["velocity_norm"] = root_mean_square(velocity)
        return Loss(loss, columns)

    def _step_weight(self, policy_step: PolicyStep) -> float | Tensor:
        """Return the factor of a step's loss by `step_weight`, a number or (B,)."""
        if self.settings.step_weight == "guard":
            return -1 / policy_step.dt
        if self.settings.step_weight == "tempflow":
            return TEMPFLOW_SCALE * policy_step.step.std.flatten()
        return 1.0


def step_kl(
    kind: KLType,
    policy: "Policy",
    i: int,
    latents: Tensor,
    taken: tuple[Step, Tensor],
    reference: Tensor,
) -> Tensor:
    """Return the divergence of a taken step from the step along another velocity, (B,).

    Args:
        kind: Definition of the divergence; see `kl_to_reference`.
        policy: Provides the step rule.
        i: Step of the schedule.
        latents: Latents before the step, (B, C, H, W).
        taken: The step and its velocity, (B, C, H, W).
        reference: The other velocity, (B, C, H, W).
    """
    step, velocity = taken
    reference_step = take_step(
        policy.dynamics, i, latents, reference, stochastic=True, next_latents=step.next_sample
    )
    return kl_to_reference(
        kind,
        mean=step.mean,
        reference_mean=reference_step.mean,
        std=step.std,
        rate=step.rate,
        velocity=velocity,
        reference_velocity=reference,
    )


def trajectory_log_ratios(policy: "Policy", trajectory: Trajectory, velocities: Tensor) -> Tensor:
    """Return the log-ratios of whole trajectories, current to behaviour policy, (B,).

    Args:
        policy: Provides the step rule.
        trajectory: Noisy steps of the rollout.
        velocities: Velocities of the current weights along it, (B, T, C, H, W).
    """
    total = torch.zeros_like(trajectory.log_probs[:, 0])
    for j, i in enumerate(trajectory.steps):
        latents, next_latents = trajectory.latents[:, j], trajectory.latents[:, j + 1]
        step = take_step(
            policy.dynamics,
            i,
            latents,
            velocities[:, j],
            stochastic=True,
            next_latents=next_latents,
        )
        total = total + step.log_prob - trajectory.log_probs[:, j]
    return total
