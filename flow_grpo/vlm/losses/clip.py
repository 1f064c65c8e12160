"""PPO's clipped surrogate with token-level ratios (Schulman et al. 2017), as used by GRPO."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flow_grpo.losses import PolicyLoss, clipped_policy_loss
from flow_grpo.vlm.losses.base import ClippedLoss, log_ratios


@dataclass(frozen=True)
class ClipLoss(ClippedLoss):
    """Clipped surrogate with an optional dual clip.

    PPO's loss is unbounded for negative advantages and large ratios; `dual_clip` > 1 bounds it by
    its value at that ratio (Ye et al. 2020, arXiv 1912.09729).
    """

    dual_clip: float

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        """Return the clipped surrogate; see `VlmLoss.per_token`."""
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
        """Return the log-ratios to clip, given those of the tokens, (R, T)."""
        return per_token
