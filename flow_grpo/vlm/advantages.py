"""Compute advantages from rewards: one per response, or one per token with a value head (GAE)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.advantages import Estimator, Scale
from flow_grpo.rewards import TOTAL
from flow_grpo.training.distributed import gather_rows
from flow_grpo.training.metrics import ScoredSamples
from flow_grpo.vlm.losses import KLEstimator
from flow_grpo.vlm.losses.base import estimate_kl, importance_weights
from flow_grpo.vlm.packing import scatter_to_mask
from flow_grpo.vlm.rollout import BASELINE, Rollout

KL_PENALTY = "kl"  # name of the penalty's column among the rewards


@dataclass
class ResponseTensors:
    """Per-token tensors (T,) of one response, on the CPU; constant during an epoch's updates."""

    # of the behaviour policy; None until the forward pass that computes them
    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    importance: Tensor | None = None  # importance weights, if the engine is not exact
    liked: bool = True  # label of a given response


def stack_padded(tensors: Sequence[ResponseTensors], name: str, mask: Tensor) -> Tensor:
    """Return the field `name` of R responses as a tensor (R, T), 0 where `mask` (R, T) is False."""
    values = torch.cat([getattr(response, name) for response in tensors]).to(mask.device)
    return scatter_to_mask(values, mask)


def set_old_log_probs(
    response: ResponseTensors, log_probs: Tensor, sampled: Tensor, cap: float | None
) -> None:
    """Set old log-probabilities (T,) and, if the engine is not exact, the importance weights.

    Args:
        response: The response to change.
        log_probs: Log-probabilities under the policy.
        sampled: Log-probabilities under the engine.
        cap: Maximum importance weight; 0 sets all weights to 1. None if the engine is exact.
    """
    response.old_log_probs = log_probs
    if cap is not None:
        response.importance = importance_weights(log_probs, sampled, cap)


def engine_deviation(
    accelerator: Accelerator, rollout: Rollout, tensors: Mapping[int, ResponseTensors]
) -> dict[str, float]:
    """Return how far log-probabilities of the engine are from those of the policy.

    Args:
        accelerator: Reduces the metrics over the processes.
        rollout: The samples, with the engine's log-probabilities.
        tensors: Per-token tensors by sample index, of the responses with a gradient: the old
            log-probabilities of others may be those of weights that were already updated. Those of
            responses that no update contains are missing.

    Returns:
        Mean and maximum absolute difference over the tokens of all processes; 0 without any.
    """
    differences = [torch.zeros(0, dtype=torch.float64)]
    for index, response in tensors.items():
        if response.old_log_probs is not None:
            sampled = rollout.samples[index].log_probs
            differences.append((response.old_log_probs - sampled).abs().double())
    all_tokens = torch.cat(differences)
    sums = torch.stack([all_tokens.sum(), all_tokens.new_tensor(len(all_tokens))])
    total, count = accelerator.reduce(sums.to(accelerator.device)).tolist()
    own = all_tokens.max() if len(all_tokens) else all_tokens.new_tensor(0.0)
    largest = accelerator.gather(own[None].to(accelerator.device)).max()
    return {"answer/engine_dev": total / max(count, 1), "answer/engine_dev_max": float(largest)}


def compute_kl_penalties(
    tensors: Mapping[int, ResponseTensors], kind: KLEstimator, beta: float, *, clamp: bool = True
) -> dict[int, Tensor]:
    """Return the KL penalties (T,) to subtract from the token rewards, by sample index."""
    return {
        index: beta * estimate_kl(kind, r.old_log_probs, r.reference_log_probs, clamp=clamp)
        for index, r in tensors.items()
    }


def compute_response_advantages(
    accelerator: Accelerator,
    rollout: Rollout,
    weights: Mapping[str, float],
    pairwise_rewards: set[str],
    estimator: Estimator,
    scale: Scale,
    kl_penalties: Mapping[int, Tensor],
) -> np.ndarray:
    """Compute the advantage of each response of the epoch.

    Args:
        accelerator: Gathers the penalties of all processes.
        rollout: The scored samples.
        weights: Weight of each reward.
        pairwise_rewards: Rewards that come from pairwise comparisons.
        estimator: Advantage estimator.
        scale: Which standard deviation advantages are divided by.
        kl_penalties: KL penalties (T,) of this process's responses, subtracted from the rewards.
            If empty, processes do not communicate.

    Returns:
        Advantages, (N,), the same on all processes.
    """
    rewards = rollout.rewards
    if kl_penalties:
        index = sorted(kl_penalties)
        sums = torch.stack([kl_penalties[i].sum().double() for i in index])
        _, columns = gather_rows(accelerator, torch.tensor(index), {KL_PENALTY: sums})
        rewards = {**rewards, KL_PENALTY: columns[KL_PENALTY].numpy()}
        weights = {**weights, KL_PENALTY: -1.0}
    baseline = rollout.scores.get(BASELINE)
    scored = ScoredSamples(rewards, rollout.groups, weights, baseline, pairwise_rewards)
    return scored.advantages(estimator, scale)


def compute_token_advantages(
    accelerator: Accelerator,
    rollout: Rollout,
    tensors: Mapping[int, ResponseTensors],
    kl_penalties: Mapping[int, Tensor],
    *,
    discount: float,
    decay: float,
    environment_weight: float = 0.0,
) -> None:
    """Set GAE advantages and returns in `tensors`.

    Advantages are whitened over all tokens of the epoch, and 0 for responses without a reward.

    Args:
        accelerator: Reduces sums over the processes.
        rollout: The scored samples.
        tensors: Per-token tensors by sample index, including values; changed in place.
        kl_penalties: KL penalties (T,) by sample index, subtracted from the token rewards.
        discount: Discount factor.
        decay: GAE's lambda.
        environment_weight: Weight of the environment's step rewards. Each is placed at the last
            token of its response; all other rewards are placed at the last token of the episode.
    """
    total = torch.zeros(3, dtype=torch.float64)
    for index, response in tensors.items():
        reward = torch.tensor(rollout.scores[TOTAL][index], dtype=response.values.dtype)
        if not reward.isfinite():
            response.advantages = torch.zeros_like(response.values)
            response.returns = response.values
            continue
        turns, episode = None, rollout.samples[index].episode if environment_weight else None
        if episode is not None:
            turns = environment_weight * episode.token_rewards().to(reward.dtype)
        rewards = compute_token_rewards(
            reward, len(response.values), kl_penalties.get(index), turns
        )
        response.advantages, response.returns = compute_gae(
            rewards, response.values, discount=discount, decay=decay
        )
        exact = response.advantages.double()
        total += torch.stack([exact.new_tensor(len(exact)), exact.sum(), (exact**2).sum()])
    total = accelerator.reduce(total.to(accelerator.device)).cpu()
    for response in tensors.values():
        if response.returns is not response.values:
            response.advantages = whiten(response.advantages, total)


def compute_token_rewards(
    reward: Tensor, length: int, penalty: Tensor | None = None, turns: Tensor | None = None
) -> Tensor:
    """Return token rewards (length,) whose sum is `reward`, minus `penalty` (length,).

    The part of the reward that `turns` (length,) does not contain is placed at the last token.
    """
    rewards = reward.new_zeros(length)
    rewards[-1] = reward
    if turns is not None:
        rewards[-1] -= turns.sum()
        rewards += turns
    return rewards if penalty is None else rewards - penalty


def compute_gae(
    rewards: Tensor, values: Tensor, *, discount: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates (Schulman et al. 2016, arXiv 1506.02438).

        delta_t = r_t + discount * V_{t+1} - V_t
        A_t = delta_t + discount * decay * A_{t+1}

    The value after the last token of a response is 0.

    Args:
        rewards: Token rewards of a response, (T,).
        values: Predicted values, (T,).
        discount: Discount factor (gamma).
        decay: GAE's lambda.

    Returns:
        Advantages and returns (the targets of the value head), (T,) each.
    """
    next_values = torch.cat([values[1:], values.new_zeros(1)])
    delta = rewards + discount * next_values - values
    advantages, running = torch.zeros_like(values), values.new_zeros(())
    for t in reversed(range(len(values))):
        running = delta[t] + discount * decay * running
        advantages[t] = running
    return advantages, advantages + values


def whiten(values: Tensor, total: Tensor) -> Tensor:
    """Normalize to mean 0 and variance 1, given `total` (3,): count, sum and sum of squares."""
    count, first, second = total.tolist()
    mean = first / count
    deviation = max(second / count - mean**2, 0.0) ** 0.5
    return (values - mean) / (deviation + 1e-8)
