"""Interface of losses on given responses, which need no rollout.

Tensors are (R, T) as in base.py. The loss of an update is the mean over its terms, which are tokens
(SFT), pairs (DPO) or responses (KTO) of all processes and micro-batches.
"""

from dataclasses import dataclass

from torch import Tensor

from flow_grpo.training.metrics import Loss
from flow_grpo.vlm.losses.base import TrainLoss, UpdateCounts


@dataclass(frozen=True)
class GivenBatch:
    """R responses of a micro-batch; those of a pair are adjacent, the preferred one first."""

    log_probs: Tensor  # (R, T), with gradient; 0 for padding
    mask: Tensor  # (R, T) bool
    counts: UpdateCounts
    max_new_tokens: int
    reference: Tensor | None = None  # (R, T), log-probabilities of the reference policy
    liked: Tensor | None = None  # (R,) bool
    is_top1: Tensor | None = None  # (R, T) bool: the most likely token

    @property
    def log_ratios(self) -> Tensor:
        """Log-ratio of each response to the reference policy, (R,)."""
        return self.log_probs.sum(1) - self.reference.sum(1)


@dataclass(frozen=True)
class GivenLoss(TrainLoss):
    """Base class of losses on given responses."""

    needs_mismatched_kl = False  # whether it reads `UpdateCounts.mismatched_kl`

    def num_terms(self, counts: UpdateCounts) -> float:
        """Return the number of terms of an update."""
        return counts.responses

    def terms(self, batch: GivenBatch) -> Loss:
        """Return the terms of a micro-batch, and the columns to log."""
        raise NotImplementedError
