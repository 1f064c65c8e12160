"""PPO's clipped surrogate on the ratio of each token (Schulman et al. 2017), as GRPO takes it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flow_grpo.answer.losses.base import ClippedLoss, log_ratios
from flow_grpo.losses import PolicyLoss, clipped_policy_loss


@dataclass(frozen=True)
class Clip(ClippedLoss):
    """With `dual_clip` (above 1) the loss of a negative advantage is at most as large as at that
    ratio, where PPO's has no bound."""

    dual_clip: float

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        advantages = advantages.expand_as(log_probs)
        log_ratio = self.log_ratio(log_ratios(log_probs, old_log_probs, mask), mask)
        ratio = self.ratio(log_ratio)
        result = clipped_policy_loss(
            ratio, advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
        if not self.dual_clip:
            return result
        bounded = torch.minimum(result.loss, -advantages * self.dual_clip)
        return replace(result, loss=torch.where(advantages < 0, bounded, result.loss))

    def log_ratio(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """What the clip acts on, made from the log-ratios of the tokens."""
        return per_token


LOSS = Clip
