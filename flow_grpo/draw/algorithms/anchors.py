"""What keeps a policy from hacking its reward, beside the loss of any method: docs/hacking.md. The
anchor of pictures is in flow_grpo/draw/data_anchor.py."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.draw.fields import DrawAnchors
from flow_grpo.losses import mean_square
from flow_grpo.run.metrics import Loss, Scored

if TYPE_CHECKING:
    from flow_grpo.draw.policy import Policy

SIDE = 8  # pixels of the thumbnails that are compared
RESETS = ("reset_kl", "reset_epochs")


class Anchors:
    """The anchors of one run. They know the samples of an epoch by their index."""

    def __init__(self, settings: DrawAnchors) -> None:
        self.settings = settings
        self.gate: Tensor | None = None  # (N,), of the epoch that is trained
        self.epochs = 0  # since the reference was reset

    def check(self, method: str, kl_weight: float, *, holds: bool, has_reference: bool) -> None:
        """Raise a ValueError of one line for what cannot work with this method."""
        s = self.settings
        if s.norm_guard and not holds:
            raise ValueError(
                f"anchors.norm_guard={s.norm_guard} does not go with algorithm={method!r}, whose "
                "loss does not call `hold`; leave it at 0"
            )
        if s.kl_gate and not kl_weight:
            raise ValueError(
                f"anchors.kl_gate={s.kl_gate} needs a KL to gate: set its weight above 0"
            )
        for name in RESETS:
            if getattr(s, name) and not has_reference:
                raise ValueError(
                    f"anchors.{name}={getattr(s, name)} needs a reference to reset: set the weight "
                    "of the KL or anchors.norm_guard above 0"
                )

    @property
    def resets(self) -> bool:
        return any(getattr(self.settings, name) for name in RESETS)

    def shape(self, credit: np.ndarray, scored: Scored) -> np.ndarray:
        """The credit (N,) of an epoch, with more for good samples unlike the others; and which of
        the samples the KL will hold."""
        if self.settings.kl_gate:
            doubtful = doubted(scored, self.settings.kl_gate)
            # the KL's whole weight falls on these
            self.gate = torch.from_numpy(doubtful / max(doubtful.mean(), 1 / len(doubtful)))
        return credit if scored.apart is None else rarer_first(credit, scored.apart, scored.groups)

    def hold(
        self,
        loss: Loss,
        index: np.ndarray,
        *,
        velocity: Tensor,
        reference: Tensor,
        kl: Tensor,
        kl_weight: float,
    ) -> Loss:
        """A loss with what holds its samples, which have this index, to the reference."""
        ratio = norm_ratio(velocity, reference)
        columns = {**loss.columns, "kl": kl, "norm_ratio": ratio.detach()}
        if self.gate is not None:
            gate = self.gate[torch.from_numpy(index)].to(kl)
            columns["gated"] = gate > 0
            kl = gate * kl
        total = loss.per_sample + kl_weight * kl
        if self.settings.norm_guard:
            columns["norm_guard"] = guard = hinge(ratio)
            total = total + self.settings.norm_guard * guard
        return Loss(total, columns)

    def state_dict(self) -> dict[str, float]:
        return {"since_reset": self.epochs} if self.resets else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.epochs = state.get("since_reset", 0)

    def renew_reference(self, policy: "Policy", metrics: Mapping[str, float]) -> dict[str, float]:
        """After an epoch: let the reference be the policy where that is due. What to log of it."""
        if not self.resets:
            return {}
        most, every = (getattr(self.settings, name) for name in RESETS)
        self.epochs += 1
        due = 0 < most < metrics.get("train/kl", 0.0) or 0 < every <= self.epochs
        if due:
            policy.reference.blend(0)
            self.epochs = 0
        return {"train/reference_reset": float(due)}


def norm_ratio(velocity: Tensor, reference: Tensor) -> Tensor:
    """|v| / |v_ref| of each sample, (B,)."""
    return (mean_square(velocity) / mean_square(reference)).sqrt()


def hinge(ratio: Tensor) -> Tensor:
    """NormGuard (Pan et al. 2026, arXiv 2606.27771): the squared part above 1."""
    return (ratio - 1).clamp_min(0) ** 2


def doubted(scored: Scored, share: float) -> np.ndarray:
    """GARDO's gate (He et al. 2025, arXiv 2512.24138): (N,) bool, at most this share of the
    samples, those that the reward ranks furthest above where rewards of weight 0 rank them."""
    others = [values for name, values in scored.counted.items() if scored.weights[name] == 0]
    doubt = ranks(scored.total) - np.mean([ranks(values) for values in others], axis=0)
    doubt = np.where(np.isfinite(doubt), doubt, 0.0)
    most = np.argsort(-doubt, kind="stable")[: max(1, round(share * len(doubt)))]
    return np.isin(np.arange(len(doubt)), most) & (doubt > 0)


def ranks(values: np.ndarray) -> np.ndarray:
    """From 0 for the lowest; those that are equal share the mean of theirs; NaN has none."""
    known = np.sort(values[~np.isnan(values)])
    low, high = (np.searchsorted(known, values, side) for side in ("left", "right"))
    return np.where(np.isnan(values), np.nan, (low + high - 1) / 2)


def thumbnails(images: Tensor) -> Tensor:
    """(B, numbers), of pictures (B, 3, H, W) or clips (B, F, 3, H, W): layout and colours."""
    frames = images.float().flatten(0, -4)
    small = F.adaptive_avg_pool2d(frames, SIDE)
    return small.reshape(len(images), -1)


def nearest(features: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """How far each sample is from the one of its group that is most like it, (N,), root mean
    square over its features; 0 where it is alone."""
    apart = np.zeros(len(features))
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        own = features[rows]
        squares = ((own[:, None] - own) ** 2).mean(-1)
        np.fill_diagonal(squares, np.inf if len(rows) > 1 else 0.0)
        apart[rows] = np.sqrt(squares.min(1))
    return apart


def rarer_first(credit: np.ndarray, apart: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """GARDO's advantages: those above 0 times how far a sample is from its nearest, over the mean
    of that in its group."""
    _, inverse = np.unique(groups, return_inverse=True)
    mean = (np.bincount(inverse, apart) / np.bincount(inverse))[inverse]
    weight = np.divide(apart, mean, out=np.ones_like(apart), where=mean > 0)
    return np.where(credit > 0, credit * weight, credit)
