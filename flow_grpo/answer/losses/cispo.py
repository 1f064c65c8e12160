"""CISPO: clipped weights, not gradients (MiniMax 2025, arXiv 2506.13585)."""

from torch import Tensor

from flow_grpo.answer.losses.base import ClippedLoss, log_ratios
from flow_grpo.losses import PolicyLoss


class Cispo(ClippedLoss):
    """The log-probability of each token, weighted by its clipped ratio: a token beyond the clip
    range keeps its gradient."""

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        low, high = 1 - self.clip_low, 1 + self.clip_high
        ratio = self.ratio(log_ratios(log_probs, old_log_probs, mask)).detach()
        loss = -ratio.clamp(low, high) * advantages.expand_as(log_probs) * log_probs
        return PolicyLoss(loss, ratio, ratio < low, ratio > high)


LOSS = Cispo
