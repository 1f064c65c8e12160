"""Rewards -> advantages: one for all tokens of an answer, or one for each with a value head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.advantages import Estimator, Scale
from flow_grpo.answer.losses import Divergence
from flow_grpo.answer.losses.base import divergence, importance_weights
from flow_grpo.answer.rollout import BASELINE, Rollout
from flow_grpo.rewards import TOTAL
from flow_grpo.run.distributed import gather_rows
from flow_grpo.run.metrics import Scored

KL = "kl"  # among rewards


@dataclass
class Fixed:
    """Per-token values of one answer that do not change while it is trained: (T,) each, on the
    CPU."""

    old: Tensor  # log-probabilities of the policy that sampled
    reference: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    importance: Tensor | None = None  # where another engine sampled


def stacked(fixed: Sequence[Fixed], name: str, mask: Tensor) -> Tensor:
    """One column of several answers, (R, T), 0 where there is no token."""
    values = torch.cat([getattr(own, name) for own in fixed]).to(mask.device)
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def reweigh(
    accelerator: Accelerator, rollout: Rollout, fixed: Mapping[int, Fixed], cap: float
) -> dict[str, float]:
    """Put importance weights into `fixed`, and measure over all processes how far the
    log-probabilities of the engine that sampled are from the policy's own."""
    off = []
    for index, own in fixed.items():
        sampled = rollout.samples[index].log_probs
        own.importance = importance_weights(own.old, sampled, cap)
        off.append((own.old - sampled).abs().double())
    every = torch.cat(off)
    sums = torch.stack([every.sum(), every.new_tensor(len(every))])
    total, count = accelerator.reduce(sums.to(accelerator.device)).tolist()
    worst = accelerator.gather(every.max()[None].to(accelerator.device)).max()
    return {"answer/engine_dev": total / count, "answer/engine_dev_max": float(worst)}


def penalties(
    fixed: Mapping[int, Fixed], kind: Divergence, beta: float, *, clamp: bool = True
) -> dict[int, Tensor]:
    """Return the KL penalty that is subtracted from the reward of each token."""
    return {
        index: beta * divergence(kind, own.old, own.reference, clamp=clamp)
        for index, own in fixed.items()
    }


def answer_advantages(
    accelerator: Accelerator,
    rollout: Rollout,
    weights: Mapping[str, float],
    judged: set[str],
    estimator: Estimator,
    scale: Scale,
    lost: Mapping[int, Tensor],
) -> np.ndarray:
    """The advantage of each answer of the epoch, (N,). `lost` has the KL penalties of this
    process's responses, which are first subtracted from the rewards; if it is empty, processes
    exchange nothing."""
    rewards = rollout.rewards
    if lost:
        index = sorted(lost)
        sums = torch.stack([lost[i].sum().double() for i in index])
        _, columns = gather_rows(accelerator, torch.tensor(index), {KL: sums})
        rewards, weights = {**rewards, KL: columns[KL].numpy()}, {**weights, KL: -1.0}
    scored = Scored(rewards, rollout.groups, weights, rollout.scores.get(BASELINE), judged)
    return scored.advantages(estimator, scale)


def token_advantages(
    accelerator: Accelerator,
    rollout: Rollout,
    fixed: Mapping[int, Fixed],
    lost: Mapping[int, Tensor],
    *,
    discount: float,
    decay: float,
) -> None:
    """PPO's, into `fixed`, whitened over all tokens of the epoch; 0 where there is no reward."""
    total = torch.zeros(3, dtype=torch.float64)
    for index, own in fixed.items():
        reward = torch.tensor([rollout.scores[TOTAL][index]], dtype=own.values.dtype)
        if not reward.isfinite():
            own.advantages, own.returns = torch.zeros_like(own.values), own.values
            continue
        mask = torch.ones(1, len(own.old), dtype=torch.bool)
        penalty = lost[index][None] if lost else None
        per_token = token_rewards(reward, penalty, mask)
        advantages, returns = generalized_advantages(
            per_token, own.values[None], mask, discount=discount, decay=decay
        )
        own.advantages, own.returns = advantages[0], returns[0]
        exact = own.advantages.double()
        total += torch.stack([exact.new_tensor(len(exact)), exact.sum(), (exact**2).sum()])
    total = accelerator.reduce(total.to(accelerator.device)).cpu()
    for own in fixed.values():
        if own.returns is not own.values:
            own.advantages = whitened(own.advantages, total)


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
