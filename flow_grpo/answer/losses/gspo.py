"""GSPO: one ratio for all tokens of an answer (Zheng et al. 2025, arXiv 2507.18071)."""

from types import MappingProxyType

from torch import Tensor

from flow_grpo.answer.losses.clip import Clip


class Gspo(Clip):
    """Its ratios hardly leave 1: the clip range is the paper's, and EasyR1's for it."""

    along = MappingProxyType({"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"})
    widest_clip = 0.1

    def log_ratio(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """The mean of an answer's, so that its ratio is the geometric mean of its tokens'."""
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        return (per_token.sum(1, keepdim=True) / lengths).expand_as(per_token)


LOSS = Gspo
