"""CISPO: clip importance weights instead of gradients (MiniMax 2025, arXiv 2506.13585)."""

from torch import Tensor

from flow_grpo.losses import PolicyLoss
from flow_grpo.vlm.losses.base import ClippedLoss, log_ratios


class CispoLoss(ClippedLoss):
    """Policy gradient weighted by the clipped ratio; tokens outside the range keep a gradient."""

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        """Return -sg(clip(ratio)) A log p; see `VlmLoss.per_token`."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        ratio = self.ratio(log_ratios(log_probs, old_log_probs, mask)).detach()
        loss = -ratio.clamp(low, high) * advantages.expand_as(log_probs) * log_probs
        return PolicyLoss(loss, ratio, ratio < low, ratio > high)
