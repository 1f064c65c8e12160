"""CPPO: a trust region on the divergence accumulated over the prefix of a response.

A token is trained only while the response up to it is still close to the one that was sampled:
errors of early tokens change the context of all later ones. With the change of probability
D_t = |p_t - p_old,t| of token t of T (the total variation of a binary distribution), weights
w_t = 1 - (1 - min_weight) (t - 1) / (T - 1) and Z_t = w_t D_t, the gradient of a token is dropped
if its update moves the ratio further away from 1 and

    Z_t > min(delta, delta + budget * sum_{s < t} w_s - sum_{s < t} Z_s)

where the budget per token is the 90 % quantile of D in the response, limited to
[budget, 2 budget].

This is the formula of UniRL (Tencent-Hunyuan/UniRL@30899fc, unirl/algorithms/cppo.py, lines 39 to
114).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flow_grpo.losses import PolicyLoss
from flow_grpo.vlm.losses.base import RatioLoss, log_ratios

QUANTILE = 0.9


@dataclass(frozen=True)
class CppoLoss(RatioLoss):
    """-A r for tokens within the trust region, 0 for others."""

    cppo_delta: float
    cppo_min_weight: float
    cppo_budget: float

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        """Return the masked surrogate; see `VlmLoss.per_token`."""
        ratio = self.ratio(log_ratios(log_probs, old_log_probs, mask))
        change = torch.where(mask, log_probs.detach().exp() - old_log_probs.exp(), 0.0)
        moves_away = advantages * (ratio.detach() - 1) > 0
        dropped = moves_away & ~self._within_trust_region(change.abs(), mask) & mask
        loss = torch.where(dropped, 0.0, -advantages * ratio)
        return PolicyLoss(loss, ratio, dropped & (change < 0), dropped & (change > 0))

    def _within_trust_region(self, divergence: Tensor, mask: Tensor) -> Tensor:
        """Return whether the prefix up to each token is close to the sampled one, (R, T) bool."""
        position = mask.cumsum(1) - 1  # from 0
        length = mask.sum(1, keepdim=True)
        decay = (1 - self.cppo_min_weight) / (length - 1).clamp(min=1)
        weight = torch.where(mask, 1 - decay * position, 0.0).to(divergence.dtype)
        weighted = weight * divergence
        before = weighted.cumsum(1) - weighted
        budget = masked_quantile(divergence, mask, QUANTILE)
        budget = budget.clamp(self.cppo_budget, 2 * self.cppo_budget)
        allowed = self.cppo_delta + budget * (weight.cumsum(1) - weight) - before
        return weighted <= allowed.clamp(max=self.cppo_delta)


def masked_quantile(values: Tensor, mask: Tensor, q: float) -> Tensor:
    """Return the linearly interpolated quantile of each row of (R, T), (R, 1); 0 for empty rows."""
    ordered = torch.where(mask, values, torch.inf).sort(1).values
    last = (mask.sum(1, keepdim=True) - 1).clamp(min=0)
    place = q * last.to(values.dtype)
    below = place.floor()
    low = ordered.gather(1, below.long())
    high = ordered.gather(1, torch.minimum(below.long() + 1, last))
    found = torch.lerp(low, high, place - below)
    return torch.where(mask.any(1, keepdim=True), found, 0.0)
