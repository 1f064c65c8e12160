"""The Flow-GRPO loss of one denoising step of a micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flow_grpo.objectives import KL, PolicyLoss, clipped_policy_loss, kl_to_reference
from flow_grpo.policy import Policy
from flow_grpo.rollout import Dynamics, Trajectory, policy_step
from flow_grpo.sde import Step


@dataclass(frozen=True)
class GrpoSettings:
    clip_low: float = 1e-4
    clip_high: float = 1e-4
    adv_clip_max: float = 5.0
    beta: float = 0.04  # weight of the KL; 0 skips the reference altogether
    kl: KL = "flow_grpo"


@dataclass(frozen=True)
class StepLoss:
    per_sample: Tensor  # (B,), with gradient; its sum over the size of the batch is the loss
    policy: PolicyLoss
    kl: Tensor  # (B,)
    approx_kl: Tensor  # (B,) half the squared log-ratio


def grpo_step_loss(
    policy: Policy,
    dynamics: Dynamics,
    trajectory: Trajectory,
    j: int,
    advantages: Tensor,
    settings: GrpoSettings,
    *,
    on_policy: bool = False,
) -> StepLoss:
    """Loss at the j-th kept step of `trajectory`; `advantages` is (B,).

    `on_policy`: the weights are still those that sampled, and so is what they gave.
    """
    i = trajectory.steps[j]
    state, landed = trajectory.latents[:, j], trajectory.latents[:, j + 1]
    known = None
    if on_policy and trajectory.unconditional is not None:
        known = trajectory.unconditional[:, j].to(state.dtype)

    def retake(
        transformer: nn.Module, *, unconditional: Tensor | None = None, in_one_pass: bool = False
    ) -> tuple[Step, Tensor]:
        return policy_step(
            policy.adapter,
            transformer,
            dynamics,
            i,
            state,
            trajectory.conditioning,
            stochastic=True,
            next_latents=landed,
            unconditional=unconditional,
            in_one_pass=in_one_pass,
        )

    if settings.beta > 0:  # first, while no activations are kept
        with policy.reference() as transformer:
            reference, reference_velocity = retake(transformer, in_one_pass=True)
    step, velocity = retake(policy.module, unconditional=known)
    old_log_prob = trajectory.log_probs[:, j]
    clipped = clipped_policy_loss(
        step.log_prob,
        old_log_prob,
        advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        adv_clip_max=settings.adv_clip_max,
    )
    loss = clipped.loss
    kl = torch.zeros_like(old_log_prob)
    if settings.beta > 0:
        kl = kl_to_reference(
            settings.kl,
            mean=step.mean,
            reference_mean=reference.mean,
            std=step.std,
            rate=step.rate,
            velocity=velocity,
            reference_velocity=reference_velocity,
        )
        loss = loss + settings.beta * kl
    log_ratio = (step.log_prob - old_log_prob).detach()
    return StepLoss(loss, clipped, kl.detach(), 0.5 * log_ratio**2)


def with_gradient(trajectory: Trajectory, advantages: Tensor) -> tuple[Trajectory, Tensor]:
    """Without those samples of advantage 0, which have no gradient where there is no KL.

    At least one is left, so that every process has its part in every update.
    """
    rows = advantages.nonzero().squeeze(1)
    if 0 < len(rows) < len(advantages):
        return trajectory[rows], advantages[rows]
    part = slice(None) if len(rows) else slice(1)
    return trajectory[part], advantages[part]
