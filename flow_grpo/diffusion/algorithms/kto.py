"""Diffusion-KTO (Li et al. 2024, arXiv 2404.04465): likes and dislikes of single images.

With the error e = mean((v - u)^2), g = e_ref - e is the gain of an image against the reference. The
loss is w (1 - sigmoid(+-beta (g - z0))), + for liked and - for disliked images. The reference point
z0 = max(0, mean g) is that of all images of the update: an image counts as better only by more than
images in general.

Sources: jacklishufan/diffusion-kto, train_kto_sd_v1.5.py, lines 1440 to 1493 (`halo="sigmoid"`,
`bce_offset="none"`; beta 1000, both weights 1, as the arguments' defaults). There z0 is the mean
over the batch and all processes in one forward pass; here over the update, which takes one more
pass without gradients, so that it depends neither on the batch size nor on the number of processes.
Online, a sample is liked if its reward is above the mean of its group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import reduce
from torch import Tensor

from flow_grpo.diffusion.algorithms.base import Batch, ScoredSamples
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm, NoisedSamples
from flow_grpo.diffusion.algorithms.settings import KtoSettings
from flow_grpo.losses import mean_square

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy


@dataclass(frozen=True)
class SamplesWithReferencePoint(NoisedSamples):
    """Noised samples with the reference point of the update."""

    reference_point: Tensor | None = None  # (B, T), equal values


class Kto(ForwardProcessAlgorithm):
    """Diffusion-KTO on samples above and below the mean of their group, or on rated images."""

    name = "kto"
    Settings = KtoSettings
    overrides_credit = True
    zero_loss_without_credit = True
    needed_velocities = ("reference",)
    given = "rated"

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        """Return 1 for samples above the mean of their group, -1 below it and 0 at it."""
        return np.sign(scored.advantages("grpo", "group"))

    def iter_prepared(
        self, policy: "Policy", batches: list[Batch]
    ) -> Iterator[tuple[Batch, NoisedSamples]]:
        """Yield each batch with its noised samples and the reference point of the update."""
        noised = [self.prepare(policy, batch) for batch in batches]
        totals = []
        for batch, at in zip(batches, noised, strict=True):
            velocity = self.no_grad_velocities(policy, "current", at, batch)
            gain = _errors(at.reference, at) - _errors(velocity, at)  # (B, T)
            rated = (batch.credit != 0)[:, None].expand_as(gain)
            totals.append(torch.stack([(gain * rated).sum(), rated.sum()]).double())
        gain_sum, count = reduce(torch.stack(totals).sum(0), "sum")
        point = (gain_sum / count.clamp(min=1)).clamp(min=0)
        for batch, at in zip(batches, noised, strict=True):
            points = point.to(at.target.dtype).expand(at.steps.shape)
            yield batch, SamplesWithReferencePoint(**{**vars(at), "reference_point": points})

    def objective(
        self, velocity: Tensor, at: SamplesWithReferencePoint, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weight times 1 - sigmoid(+-beta (g - z0)) of each image."""
        s, sign = self.settings, batch.credit.sign()
        error = mean_square(velocity - at.target)
        change = error - mean_square(at.reference - at.target)
        value = sign * s.beta * (-change - at.reference_point)
        liked, disliked = sign > 0, sign < 0
        weight = s.like_weight * liked + s.dislike_weight * disliked
        loss = weight * torch.sigmoid(-value)
        error, change = error.detach(), change.detach()
        return loss, {
            "accuracy": (value > 0)[sign != 0].float(),
            "reference_point": at.reference_point,
            "chosen_error": error[liked],
            "rejected_error": error[disliked],
            "chosen_change": change[liked],
            "rejected_change": change[disliked],
        }


def _errors(velocity: Tensor, at: NoisedSamples) -> Tensor:
    """Return the mean squared error of velocities at all levels, (B, T)."""
    return ((velocity - at.target) ** 2).flatten(2).mean(2)
