"""GSPO: one ratio per response (Zheng et al. 2025, arXiv 2507.18071)."""

from types import MappingProxyType

from torch import Tensor

from flow_grpo.vlm.losses.clip import ClipLoss


class GspoLoss(ClipLoss):
    """Clipped surrogate with sequence-level ratios.

    These stay close to 1, so the default clip range, as in the paper and in EasyR1, is narrow.
    """

    default_settings = MappingProxyType(
        {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"}
    )
    max_clip_range = 0.1

    def log_ratio(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over a response, whose ratio is the geometric mean of token ratios."""
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        return (per_token.sum(1, keepdim=True) / lengths).expand_as(per_token)
