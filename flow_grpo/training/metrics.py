"""The numbers that tell how an epoch went. docs/metrics.md says what each should look like."""

import math
from collections import defaultdict

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.algorithms.grpo import StepLoss
from flow_grpo.rewards import TOTAL
from flow_grpo.training.shards import whole

LOSSES = ("loss", "policy_loss", "kl")


def mean_of_scored(values: np.ndarray) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else math.nan


def score_metrics(prefix: str, scores: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean of each column over what was scored; of each reward also its spread and failures."""
    metrics = {f"{prefix}/{name}": mean_of_scored(values) for name, values in scores.items()}
    for name, values in scores.items():
        if name != TOTAL and "/" not in name:
            scored = values[~np.isnan(values)]
            metrics[f"{prefix}/{name}/std"] = float(scored.std()) if len(scored) else math.nan
            metrics[f"{prefix}/{name}/failed"] = len(values) - len(scored)
    return {**metrics, f"{prefix}/failed": int(np.isnan(scores[TOTAL]).sum())}


def reward_metrics(rewards: dict[str, np.ndarray], groups: np.ndarray) -> dict[str, float]:
    """Of an epoch's samples; the spread is that of the weighted sum within each group."""
    total = rewards[TOTAL]
    scored = ~np.isnan(total)
    by_group = [total[scored & (groups == g)] for g in np.unique(groups[scored])]
    return {
        **score_metrics("reward", rewards),
        "reward/std_within_group": mean_of_scored(np.array([np.std(r) for r in by_group])),
        "reward/zero_std_ratio": mean_of_scored(np.array([np.ptp(r) == 0.0 for r in by_group])),
    }


def off_policy_warning(deviation: float, clip: float) -> str | None:
    """Ratios before the first update are 1 but for rounding; near the clip range it matters."""
    if deviation <= clip / 10:
        return None
    return (
        f"on-policy ratios are off 1 by {deviation:.1e}, more than a tenth of the clip range "
        f"{clip:.1e}: rounding decides what is clipped; docs/metrics.md says what helps"
    )


class TrainingStats:
    """Statistics of every trained step, kept on the device until the epoch is over."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Tensor]] = defaultdict(list)  # of one value per sample
        self._deviation: list[Tensor] = []
        self._grad_norms: list[Tensor] = []
        self._left_out = 0

    def add(self, loss: StepLoss, *, on_policy: bool, left_out: int = 0) -> None:
        """`on_policy`: the weights are still those that sampled. `left_out`: samples of the batch
        that were not computed, because their loss is 0."""
        columns = {
            "loss": loss.per_sample,
            "policy_loss": loss.policy.loss,
            "kl": loss.kl,
            "approx_kl": loss.approx_kl,
            "clip_low": loss.policy.clipped_low,
            "clip_high": loss.policy.clipped_high,
            "ratio_mean": loss.policy.ratio,
        }
        for name, values in columns.items():
            self._columns[name].append(values.detach())
        self._left_out += left_out
        if on_policy:
            self._deviation.append((loss.policy.ratio - 1).abs())

    def add_grad_norm(self, norm: Tensor | float) -> None:
        norm = whole(torch.as_tensor(norm))
        self._grad_norms.append(torch.where(norm.isfinite(), norm, torch.nan))

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Over all processes, which may have computed different numbers of samples; call it on
        all of them."""
        columns = {name: torch.cat(parts).double() for name, parts in self._columns.items()}
        ratio, deviation = columns["ratio_mean"], torch.cat(self._deviation)
        sums = torch.stack([values.sum() for values in columns.values()])
        left_out = [self._left_out if name in LOSSES else 0 for name in columns]
        counts = torch.full_like(sums, len(ratio)) + sums.new_tensor(left_out)
        sums, counts = accelerator.reduce(torch.stack([sums, counts]))
        # of all processes, the most of each
        most = torch.stack([-ratio.min(), ratio.max(), deviation.max()])
        most = accelerator.gather(most[None]).amax(0)
        means = zip(columns, (sums / counts).tolist(), strict=True)
        return {
            **{f"train/{name}": mean for name, mean in means},
            "train/ratio_min": -float(most[0]),
            "train/ratio_max": float(most[1]),
            "train/first_update_ratio_dev": float(most[2]),
            # fp16 loss scaling starts with updates that overflow and are skipped
            "train/grad_norm": mean_of_scored(torch.stack(self._grad_norms).cpu().numpy()),
        }
