"""SAPO: a smooth gate in place of the clip (Qwen team 2025, arXiv 2511.20347).

PPO's clip drops the gradient of a token as soon as its ratio r leaves the clip range. SAPO replaces
r by f(r) = 4 / tau * sigmoid(tau (r - 1)), whose derivative is 1 at r = 1 and decays smoothly on
both sides. Negative advantages raise the logits of all tokens that were not sampled, which is less
stable, so they get a larger temperature tau and their gradients decay faster.

This is the formula of EasyR1 (hiyouga/EasyR1@b44b311, verl/trainer/core_algos.py, lines 490 to 495)
and TRL (huggingface/trl@f2cd577, trl/trainer/grpo_trainer.py, lines 3092 to 3095).
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from flow_grpo.losses import PolicyLoss
from flow_grpo.vlm.losses.base import RatioLoss, log_ratios


@dataclass(frozen=True)
class SapoLoss(RatioLoss):
    """-A f(r), with one temperature for positive and one for negative advantages."""

    default_settings = MappingProxyType({"aggregation": "sequence"})  # as in the paper

    tau_positive: float
    tau_negative: float

    def per_token(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> PolicyLoss:
        """Return the gated surrogate; see `VlmLoss.per_token`."""
        advantages = advantages.expand_as(log_probs)
        ratio = self.ratio(log_ratios(log_probs, old_log_probs, mask))
        tau = torch.full_like(ratio, self.tau_positive)
        tau = tau.masked_fill(advantages < 0, self.tau_negative)
        gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
        never = torch.zeros_like(mask)
        return PolicyLoss(-advantages * gate, ratio, never, never)
