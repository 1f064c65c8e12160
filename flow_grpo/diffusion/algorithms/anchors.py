"""Anchors against reward hacking that apply to any algorithm; see docs/reward_hacking.md.

The data anchor is in flow_grpo/diffusion/data_anchor.py.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.advantages import group_rows
from flow_grpo.diffusion.algorithms.settings import AnchorConfig
from flow_grpo.errors import UserError
from flow_grpo.losses import mean_square
from flow_grpo.training.metrics import Loss, ScoredSamples

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy

THUMBNAIL_SIZE = 8  # side of the thumbnails that diversity is measured on, in pixels
RESET_FIELDS = ("reset_kl", "reset_epochs")


class Anchors:
    """Regularization of a run by the section `anchors`: KL gate, norm guard, reference resets.

    Samples are identified by their index within the epoch.
    """

    def __init__(self, settings: AnchorConfig) -> None:
        self.settings = settings
        self.gate: Tensor | None = None  # (N,), weights of the KL in the current epoch
        self.epochs_since_reset = 0

    def check(
        self,
        method: str,
        kl_weight: float,
        *,
        kl_field: str,
        applies_anchors: bool,
        has_reference: bool,
    ) -> None:
        """Raise a UserError for anchors that have no effect with this algorithm.

        Args:
            method: Name of the algorithm.
            kl_weight: Weight of its KL.
            kl_field: Full name of the setting with that weight; empty if there is none.
            applies_anchors: Whether its loss calls `add_regularization`.
            has_reference: Whether it evaluates the reference policy.
        """
        s = self.settings
        if s.norm_guard and not applies_anchors:
            raise UserError(
                f"is not supported by algorithm={method!r}",
                field="anchors.norm_guard",
                value=s.norm_guard,
                hint="set it to 0, or call `add_regularization` in the loss of your custom "
                "algorithm and set its `applies_anchors`",
            )
        if s.kl_gate and not kl_weight:
            raise UserError(
                "has no effect with a KL weight of 0",
                field="anchors.kl_gate",
                value=s.kl_gate,
                hint=f"set {kl_field} above 0" if kl_field else "set it to 0",
            )
        for name in RESET_FIELDS:
            if getattr(s, name) and not has_reference:
                raise UserError(
                    "has no effect: the reference policy is not used",
                    field=f"anchors.{name}",
                    value=getattr(s, name),
                    hint=f"set {kl_field} or anchors.norm_guard above 0"
                    if kl_field
                    else "set it to 0",
                )

    @property
    def resets_reference(self) -> bool:
        return any(getattr(self.settings, name) for name in RESET_FIELDS)

    def reweight(self, credit: np.ndarray, scored: ScoredSamples) -> np.ndarray:
        """Return the credit of an epoch weighted by diversity, (N,), and set the gate of the KL."""
        if self.settings.kl_gate:
            gated = gardo_gate(scored, self.settings.kl_gate)
            # normalised so that the total weight of the KL does not depend on the gate
            self.gate = torch.from_numpy(gated / max(gated.mean(), 1 / len(gated)))
        if scored.apart is None:
            return credit
        return upweight_diverse(credit, scored.apart, scored.groups)

    def add_regularization(
        self,
        loss: Loss,
        index: np.ndarray,
        *,
        velocity: Tensor,
        reference: Tensor,
        kl: Tensor,
        kl_weight: float,
    ) -> Loss:
        """Add the KL and the norm guard to a loss.

        Args:
            loss: Loss of the algorithm, (B,).
            index: Position of each sample in the epoch, (B,).
            velocity: Velocity of the policy, (B, ...).
            reference: Velocity of the reference policy at the same latents, (B, ...).
            kl: Divergence of the two, (B,).
            kl_weight: Its weight.
        """
        ratio = norm_ratio(velocity, reference)
        columns = {**loss.columns, "kl": kl, "norm_ratio": ratio.detach()}
        if self.gate is not None:
            gate = self.gate[torch.from_numpy(index)].to(kl)
            columns["gated"] = gate > 0
            kl = gate * kl
        total = loss.per_sample + kl_weight * kl
        if self.settings.norm_guard:
            columns["norm_guard"] = guard = norm_guard_penalty(ratio)
            total = total + self.settings.norm_guard * guard
        return Loss(total, columns)

    def state_dict(self) -> dict[str, float]:
        """Return the position in the schedule of reference resets."""
        return {"since_reset": self.epochs_since_reset} if self.resets_reference else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.epochs_since_reset = state.get("since_reset", 0)

    def maybe_reset_reference(
        self, policy: "Policy", metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Copy the policy to the reference after an epoch if due; return whether, as a metric."""
        if not self.resets_reference:
            return {}
        max_kl, every = self.settings.reset_kl, self.settings.reset_epochs
        self.epochs_since_reset += 1
        due = 0 < max_kl < metrics.get("train/kl", 0.0) or 0 < every <= self.epochs_since_reset
        if due:
            policy.reference.blend(0)
            self.epochs_since_reset = 0
        return {"train/reference_reset": float(due)}


def norm_ratio(velocity: Tensor, reference: Tensor) -> Tensor:
    """Return |v| / |v_ref| per sample, (B,)."""
    return (mean_square(velocity) / mean_square(reference)).sqrt()


def norm_guard_penalty(ratio: Tensor) -> Tensor:
    """Return NormGuard's penalty, max(0, ratio - 1)^2, (B,) (Pan et al. 2026, arXiv 2606.27771)."""
    return (ratio - 1).clamp_min(0) ** 2


def gardo_gate(scored: ScoredSamples, share: float) -> np.ndarray:
    """Return which samples GARDO applies the KL to, (N,) bool (He et al. 2025, arXiv 2512.24138).

    Args:
        scored: Rewards of the epoch; those of weight 0 are not trained, and serve for comparison.
        share: Fraction of the samples to select at most: those that the training reward ranks
            furthest above their mean rank by the rewards of weight 0.
    """
    others = [
        values for name, values in scored.weighted_rewards.items() if scored.weights[name] == 0
    ]
    doubt = average_ranks(scored.total) - np.mean(
        [average_ranks(values) for values in others], axis=0
    )
    doubt = np.where(np.isfinite(doubt), doubt, 0.0)
    most_doubtful = np.argsort(-doubt, kind="stable")[: max(1, round(share * len(doubt)))]
    return np.isin(np.arange(len(doubt)), most_doubtful) & (doubt > 0)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 0 for the lowest value; ties share their mean rank, NaN stays NaN."""
    known = np.sort(values[~np.isnan(values)])
    low = np.searchsorted(known, values, "left")
    high = np.searchsorted(known, values, "right")
    return np.where(np.isnan(values), np.nan, (low + high - 1) / 2)


def downsample_images(images: Tensor) -> Tensor:
    """Return thumbnails as features, (B, D), of images (B, 3, H, W) or videos (B, F, 3, H, W)."""
    frames = images.float().flatten(0, -4)
    small = F.adaptive_avg_pool2d(frames, THUMBNAIL_SIZE)
    return small.reshape(len(images), -1)


def nearest_distances(features: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the RMS distance of each sample to the nearest one of its group, (N,); 0 if alone."""
    distances = np.zeros(len(features))
    for rows in group_rows(groups):
        members = features[rows]
        squares = ((members[:, None] - members) ** 2).mean(-1)
        np.fill_diagonal(squares, np.inf if len(rows) > 1 else 0.0)
        distances[rows] = np.sqrt(squares.min(1))
    return distances


def upweight_diverse(credit: np.ndarray, distances: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return credit whose positive values are scaled by diversity, (N,) (GARDO).

    Args:
        credit: (N,).
        distances: Distance of each sample to the nearest one of its group, (N,); divided by the
            group's mean distance.
        groups: Group ids, (N,).
    """
    _, inverse = np.unique(groups, return_inverse=True)
    mean = (np.bincount(inverse, distances) / np.bincount(inverse))[inverse]
    weight = np.divide(distances, mean, out=np.ones_like(distances), where=mean > 0)
    return np.where(credit > 0, credit * weight, credit)
