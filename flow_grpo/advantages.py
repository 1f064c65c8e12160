"""Turn rewards into one advantage per sample, from the statistics of its group.

A group is the set of samples of one prompt. Subtracting a baseline removes how easy the prompt is
and so reduces the variance of the policy gradient without a value network. For group size G, group
mean m and standard deviation d:

grpo          (r - m) / (d + eps), d of the group, of the batch, or left out (arXiv 2402.03300)
dr_grpo       r - m: no division, which weights easy and hard prompts up (arXiv 2503.20783)
rloo          r - mean of the others = (r - m) G / (G - 1): unbiased (arXiv 2402.14740)
reinforce_pp  (r - batch mean) / (batch d + eps): also compares prompts (arXiv 2501.03262)
remax         r - b, b the reward of the deterministic sample of the prompt (arXiv 2310.10505)
gdpo          z-score of each reward in its group, weighted sum, batch scale: rewards with a small
              spread keep their influence (arXiv 2601.05242)
grpo_passk    best - second best for the best of the group, 0 for the others, then divided as grpo:
              the gradient of pass@G, the expected maximum (arXiv 2503.19595)
pairwise      r is the win rate within the group, then as grpo (Pref-GRPO, arXiv 2508.20751)

Dividing by the group's d equalizes prompts but amplifies noise where rewards are nearly equal;
dividing by the batch's does not.

Layout: rewards, group ids and advantages are (N,), float64. A NaN reward means "could not be
scored": the sample is excluded from all statistics and gets 0. A group of one and a group with
equal rewards get exactly 0 from every estimator that compares within a group. Standard deviations
are those of the population (ddof 0) by default, as in Flow-GRPO.
"""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

import numpy as np

Estimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "remax", "gdpo", "grpo_passk", "pairwise"
]
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
    """Compute one advantage per sample.

    Args:
        rewards: (N,), or {name: (N,)}, whose weighted sum is used. NaN: could not be scored.
        group_ids: Integer id of each sample's group, (N,).
        estimator: See the module docstring.
        scale: Standard deviation that grpo, grpo_passk and pairwise divide by.
        baseline: Reward of the deterministic sample of each prompt, (N,); for remax only.
        weights: Weight of each named reward, 1 by default. Rewards of weight 0 are ignored, so
            that their NaN values do not exclude samples.
        judged: Rewards that are win rates already, for pairwise.
        eps: Added to standard deviations.
        ddof: Variances divide by the number of samples minus this.

    Returns:
        Advantages, (N,), float64.

    Raises:
        ValueError: An argument is unknown or has the wrong shape.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; choose one of {', '.join(SCALES)}")
    if (baseline is not None) != (estimator == "remax"):
        raise ValueError(f"estimator={estimator!r}: 'remax' needs a baseline, others take none")

    table = _as_reward_dict(rewards)
    groups = _check_group_ids(group_ids, len(next(iter(table.values()))))
    if baseline is not None:
        baseline = np.asarray(baseline, dtype=np.float64)
        if baseline.shape != groups.shape:
            raise ValueError(
                f"baseline.shape={baseline.shape} must equal rewards.shape={groups.shape}"
            )

    if weights is not None:  # before the NaN check below: 0 * NaN is NaN
        table = {name: values for name, values in table.items() if weights[name] != 0}
        if not table:
            return np.zeros(groups.shape)
    weight = np.array([1.0 if weights is None else float(weights[name]) for name in table])
    per_reward = np.stack(list(table.values()))  # (R, N)
    # A sample that lacks any of the rewards has no total and is excluded from all statistics.
    scored = ~np.isnan(per_reward).any(axis=0)
    if baseline is not None:
        scored &= ~np.isnan(baseline)
    if estimator == "pairwise":
        per_reward = np.where(scored, per_reward, np.nan)
        for k, name in enumerate(table):
            if name not in judged:
                per_reward[k] = _group_win_rates(per_reward[k], groups)
        scored = ~np.isnan(per_reward).any(axis=0)  # a group of one has no pairs
    advantages = np.zeros(groups.shape)
    if not scored.any():
        return advantages
    r, g = weight @ per_reward[:, scored], groups[scored]

    if estimator == "gdpo":
        total = sum(
            w * _group_z_scores(values, g, "group", eps, ddof)
            for w, values in zip(weight, per_reward[:, scored], strict=True)
        )
        # The mean is 0 up to rounding; subtracting it would make exact zeros nonzero.
        value = _divide_nonzero(total, _std(total, ddof) + eps)
    elif estimator == "reinforce_pp":
        value = _group_z_scores(r, np.zeros_like(r), "batch", eps, ddof)  # one group
    elif estimator == "remax":
        value = r - baseline[scored]
    elif estimator == "rloo":
        _, inverse, size = np.unique(g, return_inverse=True, return_counts=True)
        value = _center_by_group(r, g) * (size / np.maximum(size - 1, 1))[inverse]
    elif estimator == "dr_grpo":
        value = _center_by_group(r, g)
    elif estimator == "grpo_passk":
        value = _divide_by_std(_lead_of_best(r, g), r, g, scale, eps, ddof)
    else:
        value = _group_z_scores(r, g, scale, eps, ddof)

    advantages[scored] = value
    return advantages


def _as_reward_dict(rewards: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return rewards as float64 arrays (N,) by name; reject empty dicts and other shapes."""
    named = dict(rewards) if isinstance(rewards, Mapping) else {"reward": rewards}
    if not named:
        raise ValueError("rewards is empty; pass at least one reward")
    table = {name: np.asarray(values, dtype=np.float64) for name, values in named.items()}
    shapes = {values.shape for values in table.values()}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise ValueError(f"rewards must be one-dimensional and of equal length, got {shapes}")
    return table


def _check_group_ids(group_ids: np.ndarray, count: int) -> np.ndarray:
    """Return the group ids as an array; raise ValueError unless they are `count` integers."""
    groups = np.asarray(group_ids)
    if groups.shape != (count,):
        raise ValueError(f"group_ids.shape={groups.shape} must equal rewards.shape=({count},)")
    if count and not np.issubdtype(groups.dtype, np.integer):
        raise ValueError(f"group_ids.dtype={groups.dtype} must be an integer type")
    return groups


def group_rows(groups: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each group in ascending order, sorted by group id.

    Groups are found by one sort: comparing all samples with every group would take time quadratic
    in the number of processes.

    Args:
        groups: Group ids, (N,).
    """
    if len(groups) == 0:
        return []
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def win_rates(wins: np.ndarray) -> np.ndarray:
    """Return the fraction of its comparisons that each sample wins, (N,); NaN without any.

    Args:
        wins: (N, N), 1 where the row beats the column, 0 where it loses, 1/2 for a tie, NaN where
            there is no comparison, as on the diagonal.
    """
    verdicts = (~np.isnan(wins)).sum(axis=1)
    return np.where(verdicts > 0, np.nansum(wins, axis=1) / np.maximum(verdicts, 1), np.nan)


def _group_win_rates(r: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the fraction of the other scored samples of its group that each sample beats, (N,).

    Ties count 1/2. Samples without a score or without a scored opponent get NaN.
    """
    out = np.full(len(r), np.nan)
    for members in group_rows(groups):
        scores = r[members]
        wins = (np.sign(scores[:, None] - scores) + 1) / 2
        np.fill_diagonal(wins, np.nan)
        out[members] = win_rates(wins)
    return out


def _center_by_group(r: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Subtract the group mean; exactly 0 in constant groups, regardless of rounding."""
    out = np.zeros_like(r)
    for members in group_rows(groups):
        scores = r[members]
        if scores.min() < scores.max():
            out[members] = scores - scores.mean()
    return out


def _group_z_scores(
    r: np.ndarray, groups: np.ndarray, scale: Scale, eps: float, ddof: int
) -> np.ndarray:
    """Subtract the group mean and divide by the standard deviation plus `eps`.

    Args:
        r: Rewards, (N,).
        groups: Group ids, (N,).
        scale: Samples of the standard deviation: "group", "batch" (all), or "none" not to divide.
        eps: Added to the standard deviation.
        ddof: Variances divide by the number of samples minus this.
    """
    return _divide_by_std(_center_by_group(r, groups), r, groups, scale, eps, ddof)


def _divide_by_std(
    values: np.ndarray, r: np.ndarray, groups: np.ndarray, scale: Scale, eps: float, ddof: int
) -> np.ndarray:
    """Divide values (N,) by the standard deviation of the rewards; see `_group_z_scores`."""
    if scale == "none":
        return values
    if scale == "batch":
        return _divide_nonzero(values, _std(r, ddof) + eps)
    out = values.copy()
    for members in group_rows(groups):
        out[members] = _divide_nonzero(out[members], _std(r[members], ddof) + eps)
    return out


def _lead_of_best(r: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return how far the best sample of each group is ahead of the second, and 0 for others, (N,).

    A group of one gets 0.
    """
    out = np.zeros_like(r)
    for members in group_rows(groups):
        if len(members) > 1:
            second, best = np.sort(r[members])[-2:]
            out[members[r[members].argmax()]] = best - second
    return out


def _std(r: np.ndarray, ddof: int) -> float:
    return float(r.std(ddof=ddof)) if len(r) > ddof else 0.0


def _divide_nonzero(centred: np.ndarray, by: float) -> np.ndarray:
    return centred / by if centred.any() else centred  # 0 instead of NaN for eps=0


def mark_best_and_worst(total: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return 1 for the best sample of each group, -1 for its worst and 0 otherwise, (N,).

    The first one wins ties. Groups whose scored samples are equal get 0 only.
    """
    out = np.zeros(len(total))
    for members in group_rows(groups):
        rows = members[~np.isnan(total[members])]
        if len(rows) and total[rows].min() < total[rows].max():
            out[rows[total[rows].argmax()]] = 1.0
            out[rows[total[rows].argmin()]] = -1.0
    return out


def keep_best_worst(total: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of the `count` best and `count` worst samples of each group, sorted.

    Samples without a score are chosen only where a group has too few others.
    """
    kept = []
    for rows in group_rows(groups):
        order = rows[np.argsort(total[rows], kind="stable")]  # NaN is sorted last
        scored = np.count_nonzero(~np.isnan(total[rows]))
        worst, best, unscored = np.split(order, [scored // 2, scored])
        order = np.concatenate([worst, unscored, best])
        kept.append(np.sort([*order[:count], *order[-count:]]))
    return np.concatenate(kept)


def group_softmax(total: np.ndarray, groups: np.ndarray, temperature: float) -> np.ndarray:
    """Return softmax(total / temperature) within each group, (N,), scaled to a mean of 1.

    Samples without a score get 0 and do not count in the mean.
    """
    out = np.zeros(len(total))
    for members in group_rows(groups):
        rows = members[~np.isnan(total[members])]
        if len(rows):
            weight = np.exp((total[rows] - total[rows].max()) / temperature)
            out[rows] = weight / weight.sum() * len(rows)
    return out
