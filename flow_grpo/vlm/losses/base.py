"""Interface of policy losses, and the token-level functions they share.

Tensors are (R, T): R responses of up to T tokens, with a bool mask that is False for padding.
Advantages may be (R, 1), one for all tokens of a response.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flow_grpo.config.custom import as_user_error
from flow_grpo.errors import UserError
from flow_grpo.losses import PolicyLoss
from flow_grpo.vlm.losses import AGGREGATIONS, KL_ESTIMATORS, Aggregation, KLEstimator

# Bounds of EasyR1 and verl (core_algos.py of both); train.clamp_log_ratios=False disables them.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


@dataclass(frozen=True)
class TrainLoss:
    """Base class of all losses; its fields are the `train` settings that it reads."""

    # values of `train` settings that are unset
    default_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    max_clip_range: ClassVar[float] = math.inf  # a wider range never clips

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        """Build the loss from the attributes of `settings` that are named like its fields.

        A field with a default need not exist in the settings.
        """
        names = [
            each.name
            for each in fields(cls)
            if each.default is MISSING or hasattr(settings, each.name)
        ]
        return cls(**{name: getattr(settings, name) for name in names})


@dataclass(frozen=True)
class VlmLoss(TrainLoss):
    """Base class of policy losses."""

    @property
    def clip_range(self) -> float | None:
        """Maximum distance of a ratio from 1 before it is clipped; None without clipping."""
        return None

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        """Compute the loss of every token.

        Args:
            log_probs: Log-probabilities under the current policy, (R, T).
            old_log_probs: Log-probabilities under the behaviour policy, (R, T).
            advantages: (R, T) or (R, 1).
            mask: False for padding, (R, T) bool.

        Returns:
            A `PolicyLoss` of (R, T) tensors. Values for padding are multiplied by 0, so they must
            be finite.
        """
        raise NotImplementedError


def smoke_test_loss(loss: VlmLoss, field: str) -> None:
    """Run a user-defined loss on two responses of up to three tokens to find errors early."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    log_probs, old, advantages = (
        torch.randn(mask.shape, generator=generator, requires_grad=i == 0) for i in range(3)
    )
    with as_user_error(field, type(loss)):
        found = loss.per_token(log_probs, old, advantages, mask).loss
        if found.shape != mask.shape or not found.requires_grad:
            raise UserError(
                f"is invalid: `per_token` must return a loss of shape {tuple(mask.shape)} that "
                f"requires grad, but it has shape {tuple(found.shape)} and "
                f"requires_grad={found.requires_grad}",
                field=field,
            )


@dataclass(frozen=True)
class RatioLoss(VlmLoss):
    """Base class of losses that exponentiate log-ratios."""

    clamp_log_ratios: bool = field(default=True, kw_only=True)

    def ratio(self, log_ratio: Tensor) -> Tensor:
        """Return exp(log_ratio), clamped unless `train.clamp_log_ratios` is False.

        In float32, exp and its gradient overflow at 89.
        """
        return clamp_log_ratio(log_ratio, self.clamp_log_ratios).exp()


@dataclass(frozen=True)
class ClippedLoss(RatioLoss):
    """Base class of losses that clip ratios to [1 - clip_low, 1 + clip_high]."""

    clip_low: float
    clip_high: float

    @property
    def clip_range(self) -> float:
        return min(self.clip_low, self.clip_high)


def clamp_log_ratio(log_ratio: Tensor, clamp: bool) -> Tensor:
    """Clamp log-ratios of any shape to +-MAX_LOG_RATIO if `clamp`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if clamp else log_ratio


def log_ratios(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the log-ratio of every token, (R, T); 0 for padding."""
    return torch.where(mask, log_probs - old_log_probs, 0.0)


@dataclass(frozen=True)
class UpdateCounts:
    """Numbers of an update, over all processes."""

    tokens: float
    responses: float
    mismatched_kl: float = 0.0  # KTO's estimate of the KL; see kto.py


def token_weights(
    aggregation: Aggregation, mask: Tensor, counts: UpdateCounts, max_new_tokens: int
) -> Tensor:
    """Return the weight of each token in the loss of an update, (R, T); 0 for padding.

    token     equal weight per token of the update, so that long responses count more (DAPO)
    sequence  equal weight per response, shared equally by its tokens (GRPO)
    constant  the same weight for every token, 1 / (responses * max_new_tokens) (Dr. GRPO)
    """
    if aggregation == "token":
        return mask / counts.tokens
    if aggregation == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / counts.responses
    if aggregation == "constant":
        return mask / (counts.responses * max_new_tokens)
    known = ", ".join(AGGREGATIONS)
    raise ValueError(f"unknown aggregation {aggregation!r}; choose one of {known}")


def importance_weights(old_log_probs: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """Return min(p_policy / p_engine, cap) per token, or 1 if `cap` is 0.

    With truncated importance sampling (Yao et al. 2025), a weighted mean over the engine's tokens
    estimates the mean over the policy's tokens, biased only where the cap is reached.

    Args:
        old_log_probs: Log-probabilities under the policy.
        sampled: Log-probabilities under the engine that sampled, same shape.
        cap: Maximum weight; 0 disables weighting.
    """
    if not cap:
        return torch.ones_like(old_log_probs)
    return (old_log_probs - sampled).exp().clamp(max=cap).detach()


def estimate_kl(
    kind: KLEstimator, log_probs: Tensor, reference: Tensor, *, clamp: bool = True
) -> Tensor:
    """Estimate KL(policy, reference) per token (Schulman 2020, "Approximating KL Divergence").

    k1  log-ratio. Unbiased. As a reward, E[k1 grad log p] is the gradient of the KL; in the loss,
        its gradient grad log p is 0 on average.
    k2  half the squared log-ratio. Biased, but its gradient in the loss is unbiased.
    k3  unbiased and never negative. Its gradient in the loss is that of KL(reference, policy). As a
        reward, its gradient is that of KL(policy, reference) - KL(reference, policy), which
        vanishes near the reference.

    `clamp` bounds the exponent of k3 to +-20 and its value to +-10, as EasyR1 and verl do; beyond
    these bounds it has no gradient.
    """
    difference = log_probs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        difference = clamp_log_ratio(difference, clamp)
        value = torch.exp(-difference) + difference - 1
        return value.clamp(-MAX_K3, MAX_K3) if clamp else value
    raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_ESTIMATORS)}")


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return PPO's value loss per token, (R, T), with values clipped to old_values +- clip."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
