"""DRPO: a divergence regularizer in place of the clip (arXiv 2606.09821).

The loss is smooth, and its gradient has the weight 1 - sign(A (r - 1)) |p - p_old| / epsilon:
tokens whose probability moved in the direction of their advantage are held back in proportion to
how far it moved. A token with a small probability may therefore change its ratio r a lot, which a
clip of the ratio prevents.

This is the formula of UniRL (Tencent-Hunyuan/UniRL@1a7b501, unirl/algorithms/drpo.py, lines 97 to
159, with the default `penalty_mu_weighted=True`).
"""

from dataclasses import dataclass

from torch import Tensor

from flow_grpo.losses import PolicyLoss
from flow_grpo.vlm.losses.base import RatioLoss, log_ratios


@dataclass(frozen=True)
class DrpoLoss(RatioLoss):
    """-A r + |A| p_old (r - 1)^2 / (2 epsilon), where r = p / p_old."""

    drpo_epsilon: float

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        """Return the regularized surrogate; see `VlmLoss.per_token`.

        Tokens at which the regularizer outweighs the advantage count as clipped.
        """
        ratio = self.ratio(log_ratios(log_probs, old_log_probs, mask))
        change = old_log_probs.exp() * (ratio - 1)  # of the probability
        penalty = advantages.abs() * change * (ratio - 1) / (2 * self.drpo_epsilon)
        too_low, too_high = change < -self.drpo_epsilon, change > self.drpo_epsilon
        return PolicyLoss(-advantages * ratio + penalty, ratio, too_low & mask, too_high & mask)
