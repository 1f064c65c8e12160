"""Direct group preference optimization (Luo et al. 2025, arXiv 2510.08425).

Contrasts the samples of a group with positive and with negative advantages, which share noise and
noise levels. With d = mean((u - v)^2), the group is weighted by sigmoid(sum_i A_i beta (d_i -
d_ref_i) / G).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flow_grpo.diffusion.algorithms.base import Batch
from flow_grpo.diffusion.algorithms.forward_process import (
    ForwardProcessAlgorithm,
    NoisedSamples,
    old_policy_decay,
)
from flow_grpo.diffusion.algorithms.settings import DgpoSettings
from flow_grpo.losses import mean_square

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy


@dataclass(frozen=True)
class WeightedSamples(NoisedSamples):
    """Noised samples with the weight of their group."""

    weight: Tensor | None = None  # (B, T)


class Dgpo(ForwardProcessAlgorithm):
    """Direct group preference optimization on samples that share noise within a group."""

    name = "dgpo"
    Settings = DgpoSettings
    keeps_old_policy = True
    needs_whole_groups = True
    shares_group_noise = True
    needed_velocities = ("old", "reference")

    @property
    def trust_radius(self) -> float:
        return self.settings.clip_range

    def iter_prepared(
        self, policy: "Policy", batches: list[Batch]
    ) -> Iterator[tuple[Batch, NoisedSamples]]:
        """Yield each batch with its noised samples and group weights.

        All batches are prepared before the first is yielded: a group, and so its weight, may span
        several of them.
        """
        noised = [self.prepare(policy, batch) for batch in batches]
        sums: dict[int, Tensor] = {}  # (T,) by group
        for batch, at in zip(batches, noised, strict=True):
            terms = self._group_weight_terms(policy, batch, at)
            for row, group in enumerate(batch.group.tolist()):
                sums[group] = sums.get(group, 0) + terms[row]
        for batch, at in zip(batches, noised, strict=True):
            weight = torch.sigmoid(torch.stack([sums[g] for g in batch.group.tolist()]))
            yield batch, WeightedSamples(**{**vars(at), "weight": weight})

    def _group_weight_terms(self, policy: "Policy", batch: Batch, at: NoisedSamples) -> Tensor:
        """Return each sample's term of the sum in its group's weight, (B, T)."""
        velocity = self.no_grad_velocities(policy, "current", at, batch)
        d = ((at.target - velocity) ** 2).flatten(2).mean(2)
        d_reference = ((at.target - at.reference) ** 2).flatten(2).mean(2)
        scale = self.settings.beta / self.setup.group_size
        return self.clip_credit(batch.credit)[:, None] * scale * (d - d_reference)

    def objective(
        self, velocity: Tensor, at: WeightedSamples, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return group weight * A * |u - v|^2, without gradient where the ratio is out of range."""
        c, credit = self.settings.clip_range, self.clip_credit(batch.credit)
        d = mean_square(at.target - velocity)
        ratio = torch.exp(mean_square(at.target - at.old) - d).detach()
        far = ((credit > 0) & (ratio > 1 + c)) | ((credit <= 0) & (ratio < 1 - c))
        loss = at.weight * credit * torch.where(far, d.detach(), d)
        # not "ratio", which is to the behaviour policy: the old policy need not have sampled
        return loss, {"old_ratio": ratio, "masked": far, "group_weight": at.weight}

    def samples_with_old_policy(self, updates: int) -> bool:
        return updates > self.settings.old_after

    def after_epoch(self, policy: "Policy", updates: int) -> None:
        """Blend the current weights into the old policy."""
        s = self.settings
        policy.old.blend(
            old_policy_decay(updates, rate=s.old_rate, start=1, maximum=s.old_max_decay)
        )
