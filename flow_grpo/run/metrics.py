"""The numbers that tell how an epoch went. docs/metrics.md says what each should look like."""

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

from flow_grpo.advantages import Estimator, Scale, compute_advantages
from flow_grpo.rewards import TOTAL, nonzero

# 0 for samples that were left out. Their KL is not: where it is logged, it is of the others.
LOSSES = ("loss", "policy_loss")
NAMES = {"ratio": "ratio_mean"}


@dataclass(frozen=True)
class Scored:
    """The rewards of all samples of an epoch, on all processes."""

    # (N,) each, NaN where there is no score, -inf where none was asked; some have no weight
    rewards: Mapping[str, np.ndarray]
    groups: np.ndarray  # (N,)
    weights: Mapping[str, float]
    baseline: np.ndarray | None = None  # (N,), of a sample without noise of the same prompt
    judged: Collection[str] = ()  # rewards that are shares of wins within the group
    apart: np.ndarray | None = None  # (N,), from the sample of the group that is most like it

    @property
    def counted(self) -> dict[str, np.ndarray]:
        """The rewards that have a weight. Where a prompt does not ask for one, its samples get that
        reward's mean over the others, so that it gives them no advantage; a baseline gets 0."""

        def counted(values: np.ndarray) -> np.ndarray:
            asked = values[np.isfinite(values)]
            filling = asked.mean() if len(asked) and self.baseline is None else 0.0
            return np.where(np.isneginf(values), filling, values)

        return {name: counted(self.rewards[name]) for name in self.weights}

    @property
    def total(self) -> np.ndarray:
        """(N,), the weighted sum. Rewards of weight 0 are excluded, whether or not they failed."""
        counted = self.counted
        parts = [weight * counted[name] for name, weight in nonzero(self.weights).items()]
        return np.sum(parts, axis=0) if parts else np.zeros(self.groups.shape)

    def advantages(self, estimator: Estimator, scale: Scale) -> np.ndarray:
        """(N,); 0 where there is no score."""
        return compute_advantages(
            self.counted,
            self.groups,
            estimator=estimator,
            scale=scale,
            weights=self.weights,
            baseline=self.baseline,
            judged=self.judged,
        )


@dataclass(frozen=True)
class Loss:
    """`columns` are logged as train/NAME, averaged over samples; "ratio" also with its extremes."""

    per_sample: Tensor  # (B,), with gradient; its mean over the samples of an update is the loss
    columns: Mapping[str, Tensor]  # (B,) each

    def of_none(self) -> "Loss":
        """The same columns, for no sample."""
        return Loss(self.per_sample[:0], {name: own[:0] for name, own in self.columns.items()})


def mean_of_scored(values: np.ndarray) -> float:
    scored = values[np.isfinite(values)]
    return float(scored.mean()) if len(scored) else math.nan


def score_metrics(
    prefix: str, scores: dict[str, np.ndarray], sets: Sequence[str] = ()
) -> dict[str, float]:
    """Mean of each column over what was scored; of each reward also its spread and failures.

    `sets`: the prompt set of each sample; rewards get a mean for each of them too.
    """
    metrics = {f"{prefix}/{name}": mean_of_scored(values) for name, values in scores.items()}
    for name, values in scores.items():
        if name != TOTAL and "/" not in name:
            scored = values[np.isfinite(values)]
            metrics[f"{prefix}/{name}/std"] = float(scored.std()) if len(scored) else math.nan
            metrics[f"{prefix}/{name}/failed"] = int(np.isnan(values).sum())
    of = np.array(sets)
    for part in dict.fromkeys(sets):  # no /failed, which a reward of the same name has
        for name in (name for name in scores if "/" not in name):
            metrics[f"{prefix}/{part}/{name}"] = mean_of_scored(scores[name][of == part])
    return {**metrics, f"{prefix}/failed": int(np.isnan(scores[TOTAL]).sum())}


def reward_metrics(rewards: dict[str, np.ndarray], groups: np.ndarray) -> dict[str, float]:
    """How an epoch's samples scored; the spread is that of the weighted sum within each group."""
    total = rewards[TOTAL]
    scored = ~np.isnan(total)
    by_group = [total[scored & (groups == g)] for g in np.unique(groups[scored])]
    return {
        **score_metrics("reward", rewards),
        "reward/samples": len(total),
        "reward/std_within_group": mean_of_scored(np.array([np.std(r) for r in by_group])),
        "reward/zero_std_ratio": mean_of_scored(np.array([np.ptp(r) == 0.0 for r in by_group])),
    }


@dataclass
class _Trained:
    """Statistics of the samples of one or more updates."""

    columns: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # (B,) each
    deviation: list[Tensor] = field(default_factory=list)  # (B,) each
    left_out: int = 0

    def add(self, other: "_Trained") -> None:
        for name, parts in other.columns.items():
            self.columns[name] += parts
        self.deviation += other.deviation
        self.left_out += other.left_out


class TrainingStats:
    """Statistics of the updates of an epoch, kept on the device until the epoch is over.

    Samples of a skipped update are excluded: their values made its gradient non-finite.
    """

    def __init__(self) -> None:
        self._applied, self._update = _Trained(), _Trained()
        self._grad_norms: list[float] = []
        self._max_grad_norm = math.inf
        self._loss_scale: float | None = None

    def leave_out(self, count: int) -> None:
        """Losses that were not computed, because they are 0."""
        self._update.left_out += count

    def add(self, loss: Loss, *, on_policy: bool) -> None:
        """`on_policy`: the weights are still those that sampled."""
        self.add_columns({"loss": loss.per_sample, **loss.columns})
        if on_policy and "ratio" in loss.columns:
            self._update.deviation.append((loss.columns["ratio"] - 1).abs())

    def add_columns(self, columns: Mapping[str, Tensor]) -> None:
        """What else was trained, (B,) each, of samples of its own."""
        for name, values in columns.items():
            self._update.columns[name].append(values.detach())

    def update_loss(self) -> Tensor:
        """The sum of this process's losses of the update in progress."""
        parts = self._update.columns["loss"]
        return torch.cat(parts).sum().double() if parts else torch.tensor(0.0, dtype=torch.float64)

    def end_update(
        self, norm: float, max_norm: float, *, applied: bool, loss_scale: float | None = None
    ) -> None:
        """Record the update; `norm` is the gradient norm before it was clipped to `max_norm`."""
        self._max_grad_norm, self._loss_scale = max_norm, loss_scale
        self._grad_norms.append(norm if applied else math.nan)
        if applied:
            self._applied.add(self._update)
        self._update = _Trained()

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Over all processes, which may have computed different numbers of samples; call it on
        all of them."""
        norms = np.array(self._grad_norms)
        of_updates = {
            "train/grad_norm": mean_of_scored(norms),
            "train/max_grad_norm": self._max_grad_norm,
            "train/skipped_updates": int(np.isnan(norms).sum()),
        }
        if self._loss_scale is not None:
            of_updates["train/loss_scale"] = self._loss_scale
        columns = {n: torch.cat(parts).double() for n, parts in self._applied.columns.items()}
        if not columns:  # on all processes: every update was skipped
            return {"train/loss": math.nan, **of_updates}
        sums = torch.stack([values.sum() for values in columns.values()])
        left_out = [self._applied.left_out if name in LOSSES else 0 for name in columns]
        counts = sums.new_tensor([len(values) for values in columns.values()])
        counts = counts + sums.new_tensor(left_out)
        sums, counts = accelerator.reduce(torch.stack([sums, counts]))
        means = zip(columns, (sums / counts).tolist(), strict=True)
        metrics = {f"train/{NAMES.get(name, name)}": mean for name, mean in means}
        if "ratio" in columns:
            ratio = columns["ratio"]
            most = {"ratio_min": _most(-ratio), "ratio_max": _most(ratio)}
            if self._applied.deviation:
                deviation = torch.cat(self._applied.deviation)
                most["first_update_ratio_dev"] = _most(deviation).double()
            # of all processes, the most of each
            values = accelerator.gather(torch.stack(list(most.values()))[None]).amax(0).tolist()
            metrics |= {f"train/{n}": v for n, v in zip(most, values, strict=True)}
            metrics["train/ratio_min"] *= -1
        return {**metrics, **of_updates}


def _most(values: Tensor) -> Tensor:
    """-inf where this process has none: another one has."""
    return values.max() if len(values) else values.new_tensor(-math.inf)


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": value for name, value in self.seconds.items()}


def peak_memory_gb(device: torch.device) -> float:
    """What the process took of the device, whether or not all of it was in use."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def now(device: torch.device) -> float:
    """The time at which all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
