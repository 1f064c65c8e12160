"""What answers are trained with. Tensors are (R, T): R answers of up to T tokens, and a mask that
says which tokens are there; advantages may be (R, 1), one for all tokens of an answer."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from flow_grpo.losses import PolicyLoss, clipped_policy_loss

Kind = Literal["clip", "gspo", "cispo"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Aggregation = Literal["token", "sequence", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
Divergence = Literal["k1", "k2", "k3"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


@dataclass(frozen=True)
class Counts:
    """Of an update, over all processes."""

    tokens: float
    answers: float


def policy_loss(
    kind: Kind,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """The loss of every token.

    clip   PPO's, on the ratio of each token. With `dual_clip` (above 1) the loss of a negative
           advantage is at most as large as at that ratio, where PPO's has no bound.
    gspo   the same on one ratio for all tokens of an answer: the geometric mean of theirs.
    cispo  the log-probability of each token, weighted by its clipped ratio: a token beyond the
           clip range keeps its gradient.
    """
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    advantages = advantages.expand_as(log_probs)
    if kind == "cispo":
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - clip_low, 1 + clip_high)
        low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
        return PolicyLoss(-weight * advantages * log_probs, ratio, low, high)
    if kind == "gspo":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(1, keepdim=True) / lengths).expand_as(log_ratio)
    elif kind != "clip":
        raise ValueError(f"unknown loss {kind!r}; choose one of {', '.join(KINDS)}")
    ratio = log_ratio.exp()
    result = clipped_policy_loss(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    if not dual_clip:
        return result
    bounded = torch.minimum(result.loss, -advantages * dual_clip)
    loss = torch.where(advantages < 0, bounded, result.loss)
    return PolicyLoss(loss, result.ratio, result.clipped_low, result.clipped_high)


def importance_weights(old_log_probs: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """By how much the policy makes a token likelier than the engine that sampled it did, at most
    `cap` (truncated importance sampling, Yao et al. 2025); 1 without a cap.

    A mean over the engine's tokens with these weights is one over the policy's own, as far as no
    weight is held at the cap.
    """
    if not cap:
        return torch.ones_like(old_log_probs)
    return (old_log_probs - sampled).exp().clamp(max=cap).detach()


def divergence(kind: Divergence, log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimates of KL(policy, reference) from one sampled token each: k1 is unbiased, k3 too and
    never negative; of k2 the gradient is unbiased. (Of k1 it is 0 on average: it is for the
    reward.)"""
    difference = log_probs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        return torch.exp(-difference) + difference - 1
    raise ValueError(f"unknown KL {kind!r}; choose one of {', '.join(DIVERGENCES)}")


def token_weights(
    aggregation: Aggregation, mask: Tensor, counts: Counts, max_new_tokens: int
) -> Tensor:
    """By which the losses of tokens are summed, (R, T); 0 where there is no token.

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


def token_rewards(rewards: Tensor, penalty: Tensor | None, mask: Tensor) -> Tensor:
    """The reward (R,) of an answer comes with its last token; a penalty (R, T) with each."""
    last = mask.sum(1) - 1
    per_token = torch.zeros(mask.shape, dtype=rewards.dtype)
    per_token[torch.arange(len(rewards)), last] = rewards
    return per_token if penalty is None else per_token - torch.where(mask, penalty, 0.0)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, decay: float
) -> tuple[Tensor, Tensor]:
    """GAE (Schulman et al. 2016): advantages, and the returns that the values should have been.

    After the last token of an answer there is nothing more to come.
    """
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    following = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
    surprise = rewards + discount * following - values
    advantages, later = torch.zeros_like(values), values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        later = torch.where(mask[:, t], surprise[:, t] + discount * decay * later, 0.0)
        advantages[:, t] = later
    return advantages, advantages + values


def whitened(values: Tensor, total: Tensor) -> Tensor:
    """With mean 0 and variance 1 over all processes, whose count, sum and sum of squares are
    `total` (3,)."""
    count, first, second = total.tolist()
    mean = first / count
    deviation = max(second / count - mean**2, 0.0) ** 0.5
    return (values - mean) / (deviation + 1e-8)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Of every token; values that moved further than `clip` from the old ones gain nothing."""
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (held - returns) ** 2)
