"""Rewards -> one advantage per sample, from the statistics of its group.

A NaN reward means "could not be scored": that sample leaves the statistics and gets 0.
A group of one and a group whose rewards are all equal get exactly 0 from the estimators that
compare within a group. Standard deviations are the population's (ddof 0) by default, as in
Flow-GRPO.
"""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

import numpy as np

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "remax", "gdpo", "pairwise"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
Scale = Literal["group", "batch", "none"]
SCALES: tuple[Scale, ...] = ("group", "batch", "none")


def compute_advantages(
    rewards: np.ndarray | Mapping[str, np.ndarray],
    group_ids: np.ndarray,
    *,
    estimator: Estimator = "grpo",
    scale: Scale = "batch",
    baseline: np.ndarray | None = None,
    weights: Mapping[str, float] | None = None,
    judged: Collection[str] = (),
    eps: float = 1e-4,
    ddof: int = 0,
) -> np.ndarray:
    """Advantages (N,), float64.

    `rewards` is (N,) or {name: (N,)}, then summed with `weights` (1 each by default). A reward of
    weight 0 is ignored: its NaN values do not remove samples from the statistics.
    `scale` is what grpo divides by: the standard deviation of the group or of the batch, or
    nothing. `baseline` (N,) is remax's: the reward of the deterministic sample of each prompt.
    pairwise takes the share of wins within the group, where the higher score wins; rewards named
    in `judged` are such shares already. Variances divide by the number of samples minus `ddof`.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; choose one of {', '.join(SCALES)}")
    if (baseline is not None) != (estimator == "remax"):
        raise ValueError(f"baseline goes with estimator='remax' and only there, not {estimator!r}")

    table = _as_table(rewards)
    groups = _as_groups(group_ids, len(next(iter(table.values()))))
    if baseline is not None:
        baseline = np.asarray(baseline, dtype=np.float64)
        if baseline.shape != groups.shape:
            raise ValueError(f"baseline has shape {baseline.shape}, rewards {groups.shape}")

    if weights is not None:  # before the search for NaN: 0 * NaN is NaN
        table = {name: values for name, values in table.items() if weights[name] != 0}
        if not table:
            return np.zeros(groups.shape)
    weight = np.array([1.0 if weights is None else float(weights[name]) for name in table])
    per_reward = np.stack(list(table.values()))  # (R, N)
    # A sample with any part missing has no total; it must not shift any statistic.
    scored = ~np.isnan(per_reward).any(axis=0)
    if baseline is not None:
        scored &= ~np.isnan(baseline)
    if estimator == "pairwise":
        per_reward = np.where(scored, per_reward, np.nan)
        for k, name in enumerate(table):
            if name not in judged:
                per_reward[k] = _group_wins(per_reward[k], groups)
        scored = ~np.isnan(per_reward).any(axis=0)  # a group of one has no pairs
    advantages = np.zeros(groups.shape)
    if not scored.any():
        return advantages
    r, g = weight @ per_reward[:, scored], groups[scored]

    if estimator == "gdpo":
        parts = per_reward[:, scored]
        total = sum(
            w * _group_z(p, g, "group", eps, ddof) for w, p in zip(weight, parts, strict=True)
        )
        # its mean is 0 already; subtracting the rounded mean would move it off 0
        value = _divided(total, _std(total, ddof) + eps)
    elif estimator == "reinforce_pp":
        value = _z(r, eps, ddof)
    elif estimator == "remax":
        value = r - baseline[scored]
    elif estimator == "rloo":
        _, inverse, size = np.unique(g, return_inverse=True, return_counts=True)
        value = _centred(r, g) * (size / np.maximum(size - 1, 1))[inverse]
    elif estimator == "dr_grpo":
        value = _centred(r, g)
    else:
        value = _group_z(r, g, scale, eps, ddof)

    advantages[scored] = value
    return advantages


def _as_table(rewards: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    named = dict(rewards) if isinstance(rewards, Mapping) else {"reward": rewards}
    if not named:
        raise ValueError("rewards is empty; give at least one")
    # float64 also keeps integer rewards from truncating the result
    table = {name: np.asarray(values, dtype=np.float64) for name, values in named.items()}
    shapes = {values.shape for values in table.values()}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise ValueError(f"rewards must be one-dimensional and of one length, got {shapes}")
    return table


def _as_groups(group_ids: np.ndarray, count: int) -> np.ndarray:
    groups = np.asarray(group_ids)
    if groups.shape != (count,):
        raise ValueError(f"group_ids has shape {groups.shape}, rewards ({count},)")
    if count and not np.issubdtype(groups.dtype, np.integer):
        raise ValueError(f"group_ids must be integers (rows of the dataset), got {groups.dtype}")
    return groups


def win_shares(wins: np.ndarray) -> np.ndarray:
    """The share of its pairs that each of N samples wins (N,); NaN where it has none.

    `wins` (N, N) is 1 where the row beats the column, 0 where it loses, 1/2 for a tie, and NaN
    where there is no verdict, as on the diagonal.
    """
    verdicts = (~np.isnan(wins)).sum(axis=1)
    return np.where(verdicts > 0, np.nansum(wins, axis=1) / np.maximum(verdicts, 1), np.nan)


def _group_wins(r: np.ndarray, groups: np.ndarray) -> np.ndarray:
    out = np.full(len(r), np.nan)
    for group in np.unique(groups):
        of_group = groups == group
        members = r[of_group]
        wins = (np.sign(members[:, None] - members) + 1) / 2
        np.fill_diagonal(wins, np.nan)
        out[of_group] = win_shares(wins)
    return out


def _centred(r: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """r minus its group's mean; exactly 0 where the group is constant, whatever the rounding."""
    out = np.zeros_like(r)
    for group in np.unique(groups):
        of_group = groups == group
        members = r[of_group]
        if members.min() < members.max():
            out[of_group] = members - members.mean()
    return out


def _group_z(r: np.ndarray, groups: np.ndarray, scale: Scale, eps: float, ddof: int) -> np.ndarray:
    out = _centred(r, groups)
    if scale == "none":
        return out
    if scale == "batch":
        return _divided(out, _std(r, ddof) + eps)
    for group in np.unique(groups):
        of_group = groups == group
        out[of_group] = _divided(out[of_group], _std(r[of_group], ddof) + eps)
    return out


def _z(r: np.ndarray, eps: float, ddof: int) -> np.ndarray:
    return _divided(_centred(r, np.zeros_like(r)), _std(r, ddof) + eps)


def _std(r: np.ndarray, ddof: int) -> float:
    return float(r.std(ddof=ddof)) if len(r) > ddof else 0.0


def _divided(centred: np.ndarray, by: float) -> np.ndarray:
    return centred / by if centred.any() else centred  # eps=0 and a constant group: 0, not NaN


def best_and_worst(total: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """1 for the first best of each group, -1 for its first worst, else 0; all 0 where the scored
    samples of a group are alike."""
    out = np.zeros(len(total))
    for group in np.unique(groups):
        rows = np.flatnonzero((groups == group) & ~np.isnan(total))
        if len(rows) and total[rows].min() < total[rows].max():
            out[rows[total[rows].argmax()]] = 1.0
            out[rows[total[rows].argmin()]] = -1.0
    return out


def keep_best_worst(total: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """The rows of the `count` best and the `count` worst of each group, in their order; those
    without a score only where too few have one."""
    kept = []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        order = rows[np.argsort(total[rows], kind="stable")]  # those without a score are last
        scored = np.count_nonzero(~np.isnan(total[rows]))
        worst, best, unscored = np.split(order, [scored // 2, scored])
        order = np.concatenate([worst, unscored, best])
        kept.append(np.sort([*order[:count], *order[-count:]]))
    return np.concatenate(kept)


def group_softmax(total: np.ndarray, groups: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(total / temperature) within each group, times the number of its scored samples."""
    out = np.zeros(len(total))
    for group in np.unique(groups):
        rows = np.flatnonzero((groups == group) & ~np.isnan(total))
        if len(rows):
            weight = np.exp((total[rows] - total[rows].max()) / temperature)
            out[rows] = weight / weight.sum() * len(rows)
    return out
