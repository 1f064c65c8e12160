"""Direct group preference optimization: the good half of a group against the bad half, with one
noise for all (Luo et al. 2025, arXiv 2510.08425)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Batch
from flow_grpo.draw.algorithms.forward import ForwardProcess, ForwardSettings, Noised, decay_at
from flow_grpo.losses import mean_square

if TYPE_CHECKING:
    from flow_grpo.draw.policy import Policy


@dataclass(frozen=True)
class DgpoSettings(ForwardSettings):
    kl_beta: float = setting(
        0.02, "Weight of the KL to the model as training began; this is for OCR.", at_least=0
    )
    beta: float = setting(100.0, "How soon a group that is told apart counts less.", above=0)
    clip_range: float = setting(
        1e-2, "A sample has no gradient once its error has moved further than this.", above=0
    )
    adv_clip_max: float = setting(
        5.0, "Advantages beyond +-this are cut: one success in 1,152 samples has 32.", above=0
    )
    old_rate: float = setting(
        0.001,
        "The old weights, which the clip compares with, are a moving average, which keeps "
        "min(old_rate * (updates - 1), old_most) of itself once an epoch.",
        at_least=0,
    )
    old_most: float = setting(
        0.3, "0: the old weights are those of the last epoch.", at_least=0, below=1
    )
    old_after: int = setting(200, "Updates after which the old weights sample.", at_least=0)


@dataclass(frozen=True)
class Weighted(Noised):
    weight: Tensor | None = None  # (B, T): of the group, sigmoid of how well it is told apart


class Dgpo(ForwardProcess):
    name = "dgpo"
    Settings = DgpoSettings
    keeps_old = whole_groups = shares_noise = True
    fixed = ("old", "reference")

    @property
    def trust(self) -> float:
        return self.settings.clip_range

    def prepared(self, policy: "Policy", batches: list[Batch]) -> Iterator[tuple[Batch, Noised]]:
        """A group may lie in several batches, so its weight is found before any is trained."""
        noised = [self.prepare(policy, batch) for batch in batches]
        sums: dict[int, Tensor] = {}  # of each group, (T,)
        for batch, at in zip(batches, noised, strict=True):
            gain = self._gain(policy, batch, at)
            for row, group in enumerate(batch.group.tolist()):
                sums[group] = sums.get(group, 0) + gain[row]
        for batch, at in zip(batches, noised, strict=True):
            weight = torch.sigmoid(torch.stack([sums[g] for g in batch.group.tolist()]))
            yield batch, Weighted(**{**vars(at), "weight": weight})

    def _gain(self, policy: "Policy", batch: Batch, at: Noised) -> Tensor:
        """(B, T): what each sample adds to its group's sum."""
        velocity = self.fixed_velocities(policy, "current", at, batch)
        d, d_reference = (
            ((at.target - v) ** 2).flatten(2).mean(2) for v in (velocity, at.reference)
        )
        scale = self.settings.beta / self.setup.group_size
        return self._cut(batch.credit)[:, None] * scale * (d - d_reference)

    def _cut(self, credit: Tensor) -> Tensor:
        return credit.clamp(-self.settings.adv_clip_max, self.settings.adv_clip_max)

    def objective(
        self, velocity: Tensor, at: Weighted, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c, credit = self.settings.clip_range, self._cut(batch.credit)
        d = mean_square(at.target - velocity)
        ratio = torch.exp(mean_square(at.target - at.old) - d).detach()
        far = ((credit > 0) & (ratio > 1 + c)) | ((credit <= 0) & (ratio < 1 - c))
        loss = at.weight * credit * torch.where(far, d.detach(), d)
        # not "ratio": the old weights need not be those that sampled
        return loss, {"old_ratio": ratio, "masked": far, "group_weight": at.weight}

    def samples_with_old(self, updates: int) -> bool:
        return updates > self.settings.old_after

    def after_epoch(self, policy: "Policy", updates: int) -> None:
        s = self.settings
        policy.old.blend(decay_at(updates, rate=s.old_rate, start=1, most=s.old_most))
