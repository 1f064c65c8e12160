"""Compute the metrics of an epoch; docs/metrics.md describes their expected values."""

import math
import resource
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.advantages import Estimator, Scale, compute_advantages, group_rows
from flow_grpo.rewards import TOTAL, nonzero_weights

# Averaged over all samples; a loss that was not computed is 0. Others: over computed samples only.
LOSS_COLUMNS = ("loss", "policy_loss")
METRIC_NAMES = {"ratio": "ratio_mean"}


@dataclass(frozen=True)
class ScoredSamples:
    """Rewards of all samples of an epoch, over all processes."""

    # (N,) each; NaN: failed, -inf: not requested by the prompt. Some may have no weight.
    rewards: Mapping[str, np.ndarray]
    groups: np.ndarray  # (N,)
    weights: Mapping[str, float]
    baseline: np.ndarray | None = None  # (N,), reward of an ODE sample of the same prompt
    judged: Collection[str] = ()  # names of rewards that are win rates within the group
    apart: np.ndarray | None = None  # (N,), distance to the most similar sample of the group

    @property
    def weighted_rewards(self) -> dict[str, np.ndarray]:
        """The rewards that have a weight, (N,) each.

        Samples whose prompt does not request a reward get the mean of the other samples, so that
        it gives no advantage; with a baseline they get 0.
        """

        def fill_unrequested(values: np.ndarray) -> np.ndarray:
            requested = values[np.isfinite(values)]
            fill = requested.mean() if len(requested) and self.baseline is None else 0.0
            return np.where(np.isneginf(values), fill, values)

        return {name: fill_unrequested(self.rewards[name]) for name in self.weights}

    @property
    def total(self) -> np.ndarray:
        """Weighted sum of rewards, (N,). Rewards of weight 0 are excluded, even if they failed."""
        rewards = self.weighted_rewards
        parts = [weight * rewards[name] for name, weight in nonzero_weights(self.weights).items()]
        return np.sum(parts, axis=0) if parts else np.zeros(self.groups.shape)

    def advantages(self, estimator: Estimator, scale: Scale) -> np.ndarray:
        """Return the advantages, (N,); 0 for samples without a score."""
        return compute_advantages(
            self.weighted_rewards,
            self.groups,
            estimator=estimator,
            scale=scale,
            weights=self.weights,
            baseline=self.baseline,
            judged=self.judged,
        )


@dataclass(frozen=True)
class Loss:
    """Loss of a micro-batch and its logged columns.

    The mean of each column is logged as train/NAME, and the extremes of "ratio" as well.
    """

    per_sample: Tensor  # (B,), with gradient; its mean over the update's samples is the loss
    columns: Mapping[str, Tensor]  # (B,) each

    def without_samples(self) -> "Loss":
        """Return a loss of zero samples with the same columns."""
        return Loss(self.per_sample[:0], {name: own[:0] for name, own in self.columns.items()})


def finite_mean(values: np.ndarray) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    scored = values[np.isfinite(values)]
    return float(scored.mean()) if len(scored) else math.nan


def score_metrics(
    prefix: str, scores: dict[str, np.ndarray], sets: Sequence[str] = ()
) -> dict[str, float]:
    """Return the mean of each column over scored samples, its spread and the number of failures.

    Args:
        prefix: "reward" or "eval".
        scores: Scores by column, (N,) each; NaN where scoring failed.
        sets: Prompt set of each sample; each set gets its own means.
    """
    metrics = {f"{prefix}/{name}": finite_mean(values) for name, values in scores.items()}
    for name, values in scores.items():
        if name != TOTAL and "/" not in name:
            scored = values[np.isfinite(values)]
            metrics[f"{prefix}/{name}/std"] = float(scored.std()) if len(scored) else math.nan
            metrics[f"{prefix}/{name}/failed"] = int(np.isnan(values).sum())
    set_of_sample = np.array(sets)
    for part in dict.fromkeys(sets):  # without /failed, which a reward of that name would have
        for name in (name for name in scores if "/" not in name):
            metrics[f"{prefix}/{part}/{name}"] = finite_mean(scores[name][set_of_sample == part])
    return {**metrics, f"{prefix}/failed": int(np.isnan(scores[TOTAL]).sum())}


def reward_metrics(rewards: dict[str, np.ndarray], groups: np.ndarray) -> dict[str, float]:
    """Return the reward metrics of an epoch, with the spread of the total within each group."""
    total = rewards[TOTAL]
    scored = ~np.isnan(total)
    values = total[scored]
    by_group = [values[rows] for rows in group_rows(groups[scored])]
    return {
        **score_metrics("reward", rewards),
        "reward/samples": len(total),
        "reward/std_within_group": finite_mean(np.array([np.std(r) for r in by_group])),
        "reward/zero_std_ratio": finite_mean(np.array([np.ptp(r) == 0.0 for r in by_group])),
    }


@dataclass
class _UpdateStats:
    """Statistics of the samples of one or more updates."""

    columns: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # (B,) each
    deviation: list[Tensor] = field(default_factory=list)  # (B,) each
    zero_losses: int = 0

    def add(self, other: "_UpdateStats") -> None:
        """Add the statistics of another update to these."""
        for name, parts in other.columns.items():
            self.columns[name] += parts
        self.deviation += other.deviation
        self.zero_losses += other.zero_losses


class TrainingStats:
    """Statistics of the updates of an epoch, kept on the device until the epoch ends.

    Samples of a skipped update are excluded: their values made its gradient non-finite.
    """

    def __init__(self) -> None:
        self._applied, self._update = _UpdateStats(), _UpdateStats()
        self._grad_norms: list[float] = []
        self._max_grad_norm = math.inf
        self._loss_scale: float | None = None

    def count_zero_losses(self, count: int) -> None:
        """Count losses that were not computed because they are 0."""
        self._update.zero_losses += count

    def add(self, loss: Loss, *, on_policy: bool) -> None:
        """Add a micro-batch.

        Args:
            loss: Loss of the micro-batch.
            on_policy: Whether the weights are still those that sampled it.
        """
        self.add_columns({"loss": loss.per_sample, **loss.columns})
        if on_policy and "ratio" in loss.columns:
            self._update.deviation.append((loss.columns["ratio"] - 1).abs())

    def add_columns(self, columns: Mapping[str, Tensor]) -> None:
        """Add columns, (B,) each, of samples without a policy loss."""
        for name, values in columns.items():
            self._update.columns[name].append(values.detach())

    def update_loss(self) -> Tensor:
        """Return the sum of this process's losses in the current update, a float64 scalar."""
        parts = self._update.columns["loss"]
        return torch.cat(parts).sum().double() if parts else torch.tensor(0.0, dtype=torch.float64)

    def end_update(
        self, norm: float, max_norm: float, *, applied: bool, loss_scale: float | None = None
    ) -> None:
        """End the current update; `norm` is the gradient norm before clipping to `max_norm`."""
        self._max_grad_norm, self._loss_scale = max_norm, loss_scale
        self._grad_norms.append(norm if applied else math.nan)
        if applied:
            self._applied.add(self._update)
        self._update = _UpdateStats()

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the `train/` metrics over all processes. Call it on all processes."""
        norms = np.array(self._grad_norms)
        update_metrics = {
            "train/grad_norm": finite_mean(norms),
            "train/max_grad_norm": self._max_grad_norm,
            "train/skipped_updates": int(np.isnan(norms).sum()),
        }
        if self._loss_scale is not None:
            update_metrics["train/loss_scale"] = self._loss_scale
        columns = {n: torch.cat(parts).double() for n, parts in self._applied.columns.items()}
        if not columns:  # every update was skipped, on all processes
            return {"train/loss": math.nan, **update_metrics}
        sums = torch.stack([values.sum() for values in columns.values()])
        zeros = [self._applied.zero_losses if name in LOSS_COLUMNS else 0 for name in columns]
        counts = sums.new_tensor([len(values) for values in columns.values()])
        counts = counts + sums.new_tensor(zeros)
        sums, counts = accelerator.reduce(torch.stack([sums, counts]))
        means = zip(columns, (sums / counts).tolist(), strict=True)
        metrics = {f"train/{METRIC_NAMES.get(name, name)}": mean for name, mean in means}
        if "ratio" in columns:
            ratio = columns["ratio"]
            extremes = {"ratio_min": _local_max(-ratio), "ratio_max": _local_max(ratio)}
            if self._applied.deviation:
                deviation = torch.cat(self._applied.deviation)
                extremes["first_update_ratio_dev"] = _local_max(deviation).double()
            stacked = torch.stack(list(extremes.values()))[None]
            values = accelerator.gather(stacked).amax(0).tolist()
            metrics |= {f"train/{n}": v for n, v in zip(extremes, values, strict=True)}
            metrics["train/ratio_min"] *= -1
        return {**metrics, **update_metrics}


def _local_max(values: Tensor) -> Tensor:
    """Return the maximum; -inf if this process has no samples (another one has)."""
    return values.max() if len(values) else values.new_tensor(-math.inf)


class Timer:
    """Accumulates seconds by name: `with timer("sample"): ...`.

    Args:
        device: Device whose queued work is waited for at both ends, so that GPU time is attributed
            exactly. By default nothing is waited for.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device or torch.device("cpu")

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds spent in the context to `seconds[name]`."""
        start = synchronized_time(self._device)
        try:
            yield
        finally:
            self.seconds[name] += synchronized_time(self._device) - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": value for name, value in self.seconds.items()}


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak of reserved GPU memory, or of the process's memory on the CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def synchronized_time(device: torch.device) -> float:
    """Return the time after all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
