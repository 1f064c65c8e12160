"""Building blocks that several losses share. All of them return one value per sample, (B,)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KLType = Literal["flow_grpo", "gaussian", "velocity"]
KL_TYPES: tuple[KLType, ...] = ("flow_grpo", "gaussian", "velocity")


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped surrogate loss and what to log of it; (B,) each."""

    loss: Tensor
    ratio: Tensor  # detached
    clipped_low: Tensor  # bool: the gradient is clipped at the lower bound
    clipped_high: Tensor


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Return PPO's surrogate, max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)).

    Args:
        ratio: rho, the probability ratio to the behaviour policy, (B,).
        advantages: A, (B,).
        clip_low: Distance of the lower bound from 1.
        clip_high: Distance of the upper bound from 1.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    ratio = ratio.detach()
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(ratio < 1 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip_high) & (advantages > 0),
    )


def gaussian_step_kl(mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """Return the KL divergence of two Gaussian steps with the same `std`, per element, (B,)."""
    return ((mean - old_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)


def mean_square(difference: Tensor) -> Tensor:
    """Return the mean square over all non-batch dimensions, (B,)."""
    return (difference**2).flatten(1).mean(1)


def root_mean_square(velocity: Tensor) -> Tensor:
    """Return the detached root mean square over all non-batch dimensions in float32, (B,)."""
    return mean_square(velocity.detach().float()).sqrt()


def kl_to_reference(
    kind: KLType,
    *,
    mean: Tensor,
    reference_mean: Tensor,
    std: Tensor,
    rate: Tensor,
    velocity: Tensor,
    reference_velocity: Tensor,
) -> Tensor:
    """Return the divergence of the policy's step from that of the reference, (B,).

    Args:
        kind: "flow_grpo" divides the squared difference of the means by 2 rate^2, as Flow-GRPO
            does, which leaves dt out. "gaussian" divides it by 2 std^2, the exact KL. "velocity" is
            the mean squared difference of the velocities.
        mean: Mean of the policy's step, (B, ...).
        reference_mean: Mean of the reference's step, (B, ...).
        std: Scale of the noise; broadcasts to `mean`.
        rate: `std` without sqrt(-dt).
        velocity: Velocity of the policy, (B, ...).
        reference_velocity: Velocity of the reference, (B, ...).
    """
    if kind == "flow_grpo":
        square = (mean - reference_mean.detach()) ** 2 / (2 * rate**2)
    elif kind == "gaussian":
        square = (mean - reference_mean.detach()) ** 2 / (2 * std**2)
    elif kind == "velocity":
        square = (velocity - reference_velocity.detach()).to(mean.dtype) ** 2
    else:
        raise ValueError(f"unknown KL type {kind!r}; choose one of {', '.join(KL_TYPES)}")
    return square.flatten(1).mean(1)


def adapt_kl_weight(weight: float, kl: float, target: float) -> float:
    """Return the next weight of a KL penalty by PPO's rule (arXiv 1707.06347, section 4).

    The weight is doubled if the KL exceeds 1.5 times the target, and halved below target / 1.5.
    """
    if kl > 1.5 * target:
        return 2 * weight
    return weight / 2 if kl < target / 1.5 else weight
