"""What the loop asks of a loss of answers, and what all of them share.

A new loss is a new file in this folder, which ends with `LOSS = ...`. Tensors are (R, T): R answers
of up to T tokens, and a mask that says which tokens are there; advantages may be (R, 1), one for
all tokens of an answer.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flow_grpo.answer.losses import AGGREGATIONS, DIVERGENCES, Aggregation, Divergence
from flow_grpo.config.custom import told_in_one_line
from flow_grpo.errors import UserError
from flow_grpo.losses import PolicyLoss

# The bounds of EasyR1 and verl (core_algos.py of both); train.clamp_log_ratios=False lifts them.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


@dataclass(frozen=True)
class AnswerLoss:
    """A policy loss. Its fields are the settings that it reads, under their names in `train`."""

    # settings of `train` that go with it, where the run does not say otherwise
    along: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token"}
    )
    widest_clip: ClassVar[float] = math.inf  # that ever holds a ratio

    @classmethod
    def read(cls, settings: Any) -> Self:
        """Build the loss; a field that the settings lack keeps its default."""
        names = [each.name for each in fields(cls)]
        optional = {each.name for each in fields(cls) if each.default is not MISSING}
        read = [name for name in names if name not in optional or hasattr(settings, name)]
        return cls(**{name: getattr(settings, name) for name in read})

    @property
    def trust(self) -> float | None:
        """How far a ratio may be from 1 until a clip acts, where there is one."""
        return None

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        """The loss of every token; old log-probabilities are of the policy that sampled. Where
        there is no token, anything finite whose gradient is 0 once it is multiplied by 0."""
        raise NotImplementedError


def try_loss(loss: AnswerLoss, field: str) -> None:
    """Tell a mistake in a loss of the user's own, by two answers of up to three tokens."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    log_probs, old, advantages = (
        torch.randn(mask.shape, generator=generator, requires_grad=i == 0) for i in range(3)
    )
    with told_in_one_line(field, type(loss)):
        found = loss.per_token(log_probs, old, advantages, mask).loss
        if found.shape != mask.shape or not found.requires_grad:
            raise UserError(
                f"{field}: per_token must give a PolicyLoss whose loss has the shape of its "
                f"arguments, {tuple(mask.shape)} here, and a gradient; it has {tuple(found.shape)}"
            )


@dataclass(frozen=True)
class ClippedLoss(AnswerLoss):
    """A loss that trusts ratios from 1 - clip_low to 1 + clip_high."""

    clip_low: float
    clip_high: float
    clamp_log_ratios: bool = field(default=True, kw_only=True)

    @property
    def trust(self) -> float:
        return min(self.clip_low, self.clip_high)

    def ratio(self, log_ratio: Tensor) -> Tensor:
        """Return the exponential of a log-ratio, which is clamped first unless
        `train.clamp_log_ratios` is False: exp and its gradient overflow at 89 in float32."""
        return clamped(log_ratio, self.clamp_log_ratios).exp()


def clamped(log_ratio: Tensor, clamp: bool = True) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if clamp else log_ratio


def log_ratios(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Logarithms of every token's ratio; 0 where there is no token."""
    return torch.where(mask, log_probs - old_log_probs, 0.0)


@dataclass(frozen=True)
class Counts:
    """How much an update trains, over all processes."""

    tokens: float
    answers: float


def token_weights(
    aggregation: Aggregation, mask: Tensor, counts: Counts, max_new_tokens: int
) -> Tensor:
    """The weights (R, T) by which losses of tokens are summed; 0 where there is no token.

    token     all tokens of the update count alike, so long answers count more
    sequence  all answers count alike
    constant  tokens count alike, whatever the lengths of answers are now (Dr. GRPO)
    """
    if aggregation == "token":
        return mask / counts.tokens
    if aggregation == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / counts.answers
    if aggregation == "constant":
        return mask / (counts.answers * max_new_tokens)
    known = ", ".join(AGGREGATIONS)
    raise ValueError(f"unknown aggregation {aggregation!r}; choose one of {known}")


def importance_weights(old_log_probs: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """By how much the policy makes a token likelier than the engine that sampled it did, at most
    `cap` (truncated importance sampling, Yao et al. 2025); 1 without a cap.

    A mean over the engine's tokens with these weights is one over the policy's own, as far as no
    weight is held at the cap.
    """
    if not cap:
        return torch.ones_like(old_log_probs)
    return (old_log_probs - sampled).exp().clamp(max=cap).detach()


def divergence(
    kind: Divergence, log_probs: Tensor, reference: Tensor, *, clamp: bool = True
) -> Tensor:
    """Estimate KL(policy, reference) of each sampled token (Schulman 2020, "Approximating KL
    Divergence").

    k1  log-ratio. Unbiased. As a reward, E[k1 grad log p] is the gradient of the KL; in the loss,
        its gradient grad log p is 0 on average.
    k2  half of its square. Biased, but its gradient in the loss is unbiased.
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
        difference = clamped(difference, clamp)
        value = torch.exp(-difference) + difference - 1
        return value.clamp(-MAX_K3, MAX_K3) if clamp else value
    raise ValueError(f"unknown KL {kind!r}; choose one of {', '.join(DIVERGENCES)}")


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """PPO's, of every token; values that moved further than `clip` from the old ones gain
    nothing."""
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (held - returns) ** 2)
