"""PPO: what a token was worth, from a value head. Tensors are (R, T), padded."""

import torch
from torch import Tensor


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
