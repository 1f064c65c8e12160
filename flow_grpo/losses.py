"""What the losses of several algorithms are made of. All return tensors of shape (B,)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KL = Literal["flow_grpo", "gaussian", "velocity"]
KLS: tuple[KL, ...] = ("flow_grpo", "gaussian", "velocity")


@dataclass(frozen=True)
class PolicyLoss:
    loss: Tensor  # (B,)
    ratio: Tensor  # (B,), no gradient
    clipped_low: Tensor  # (B,) bool: the ratio left the trust region below and is held
    clipped_high: Tensor


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """PPO's pessimistic surrogate; the trust region is [1 - clip_low, 1 + clip_high]."""
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * held)
    ratio = ratio.detach()
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(ratio < 1 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip_high) & (advantages > 0),
    )


def drift(mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """KL of two Gaussian steps of one scale: how far the mean has moved, in units of noise."""
    return ((mean - old_mean) ** 2 / (2 * std**2)).flatten(1).mean(1)


def mean_square(difference: Tensor) -> Tensor:
    """Per sample, (B,)."""
    return (difference**2).flatten(1).mean(1)


def root_mean_square(velocity: Tensor) -> Tensor:
    """Per sample, (B,), without a gradient: to log."""
    return mean_square(velocity.detach().float()).sqrt()


def kl_to_reference(
    kind: KL,
    *,
    mean: Tensor,
    reference_mean: Tensor,
    std: Tensor,
    rate: Tensor,
    velocity: Tensor,
    reference_velocity: Tensor,
) -> Tensor:
    """How far the policy's step is from the reference's, (B,).

    flow_grpo  squared mean difference over 2 rate^2, as Flow-GRPO has it: leaves dt out
    gaussian   the exact KL of the two Gaussians, over 2 std^2
    velocity   mean squared difference of the velocities
    """
    if kind == "flow_grpo":
        square = (mean - reference_mean.detach()) ** 2 / (2 * rate**2)
    elif kind == "gaussian":
        square = (mean - reference_mean.detach()) ** 2 / (2 * std**2)
    elif kind == "velocity":
        square = (velocity - reference_velocity.detach()).to(mean.dtype) ** 2
    else:
        raise ValueError(f"unknown KL {kind!r}; choose one of {', '.join(KLS)}")
    return square.flatten(1).mean(1)


def adapted_weight(weight: float, kl: float, target: float) -> float:
    """PPO's rule for a KL penalty: twice the weight where the KL is more than 1.5 times the target,
    half of it where it is less than the target over 1.5."""
    if kl > 1.5 * target:
        return 2 * weight
    return weight / 2 if kl < target / 1.5 else weight
