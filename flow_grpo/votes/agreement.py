"""Measure how often a reward prefers the image that people prefer, on a preference set.

- *accuracy*: fraction of pairs whose preferred image has the higher score; a tie counts half.
- *AUC*: probability that a preferred image of any pair scores higher than a rejected image of any
  pair (Mann-Whitney). Below the accuracy, scores of different prompts are not comparable: the
  reward ranks the images of a prompt, but a high score does not mean a good image.
- The 95 % interval of the accuracy is Wilson's, with the effective number of pairs: pairs of one
  prompt are not independent (Korn and Graubard 1998: n divided by the design effect).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from flow_grpo.data.preferences import ComparedImages, PreferenceSet
from flow_grpo.data.prompts import Prompt
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource, read_image
from flow_grpo.rewards.builder import build_scorers, guard_scorers
from flow_grpo.rewards.failure import DEFAULT_POLICY
from flow_grpo.rewards.protocol import MASK, SOURCE
from flow_grpo.rewards.weighted_reward import WeightedReward
from flow_grpo.votes.summary import wilson_interval

ALL_CATEGORIES = "all"
NO_CATEGORY = "-"


@dataclass(frozen=True)
class PairScore:
    """Scores of a pair; NaN if the reward failed, -inf if it does not apply."""

    prompt: str
    category: str
    chosen: float
    rejected: float
    probability: float  # that people prefer `chosen`

    @property
    def is_scored(self) -> bool:
        return math.isfinite(self.chosen) and math.isfinite(self.rejected)

    @property
    def credit(self) -> float:
        """Return 1 if the preferred image scores higher, 0 if lower, and 1/2 for a tie."""
        return (1 + np.sign(self.chosen - self.rejected)) / 2


@dataclass(frozen=True)
class RewardAgreement:
    """Agreement of a reward with the pairs of one category, or all."""

    reward: str
    category: str
    pairs: int  # with scores
    missing: int  # without
    ties: int
    accuracy: float
    interval: tuple[float, float]  # 95 %
    auc: float


def measure_agreement(reward: str, category: str, pairs: Sequence[PairScore]) -> RewardAgreement:
    """Return the agreement with some pairs; the numbers are NaN if none has scores."""
    scored = [pair for pair in pairs if pair.is_scored]
    missing = len(pairs) - len(scored)
    if not scored:
        nan = math.nan
        return RewardAgreement(reward, category, 0, missing, 0, nan, (nan, nan), nan)
    credits = np.array([pair.credit for pair in scored])
    accuracy = float(credits.mean())
    count = effective_count(credits, [pair.prompt for pair in scored])
    chosen, rejected = (
        np.array([getattr(pair, name) for pair in scored]) for name in ("chosen", "rejected")
    )
    return RewardAgreement(
        reward,
        category,
        len(scored),
        missing,
        int((credits == 0.5).sum()),
        accuracy,
        wilson_interval(accuracy, count),
        area_under_curve(chosen, rejected),
    )


def effective_count(values: np.ndarray, clusters: Sequence[str]) -> float:
    """Return the number of independent values with the same variance of the mean.

    Args:
        values: Values from 0 to 1, (N,).
        clusters: Cluster of each; only values of different clusters are independent.

    Returns:
        N divided by the design effect, the ratio of the variance of the mean between clusters to
        that of independent coins, which is at least 1. If all values are equal or there is a single
        cluster, it cannot be estimated, and the number of clusters is returned.
    """
    sums: dict[str, float] = defaultdict(float)
    mean = float(values.mean())
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += float(value) - mean
    coin = mean * (1 - mean) / len(values)
    if len(sums) == 1 or coin == 0:
        return len(sums)
    variance = sum(s * s for s in sums.values()) / len(values) ** 2 * len(sums) / (len(sums) - 1)
    return len(values) / max(1.0, variance / coin)


def area_under_curve(positive: np.ndarray, negative: np.ndarray) -> float:
    """Return the probability that a positive value exceeds a negative one; a tie counts half."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left")
    not_above = np.searchsorted(ordered, positive, "right")
    return float((below + not_above).mean() / 2 / len(negative))


def agreement_by_category(reward: str, pairs: Sequence[PairScore]) -> list[RewardAgreement]:
    """Return the agreement with all pairs, and with each category if there are several."""
    by_category: dict[str, list[PairScore]] = defaultdict(list)
    for pair in pairs:
        by_category[pair.category].append(pair)
    found = [measure_agreement(reward, ALL_CATEGORIES, pairs)]
    if len(by_category) > 1:
        found += [
            measure_agreement(reward, name, by_category[name]) for name in sorted(by_category)
        ]
    return found


def choose_pairs(found: PreferenceSet, limit: int | None, source: str) -> list[ComparedImages]:
    """Return the pairs of a set, or `limit` random ones that are the same in every call.

    Raises:
        UserError: It has no pairs.
    """
    if not found.pairs:
        raise UserError(
            f"has no pairs, only {len(found.images)} single images",
            field=source,
            hint="docs/preferences.md lists the formats of pairs",
        )
    if limit is None or limit >= len(found.pairs):
        return found.pairs
    kept = sorted(Random(0).sample(range(len(found.pairs)), limit))
    return [found.pairs[i] for i in kept]


@dataclass(frozen=True)
class _Task:
    """Images of one call of a reward: keys of the samples, and what is needed to load them."""

    keys: list[tuple]
    prompts: list[Prompt]
    images: list[ImageSource]


def score_pairs(
    pairs: Sequence[ComparedImages],
    reward: str,
    *,
    category: str,
    batch: int,
    follow: Callable[[Iterable, str, int], Iterable],
    **settings: Any,
) -> list[PairScore]:
    """Score both images of each pair; an image in several pairs is scored once.

    Args:
        pairs: The pairs.
        reward: Name of the reward.
        category: Column with the category of a pair.
        batch: Images per call.
        follow: Wraps the batches in a progress bar, given its label and length.
        **settings: Arguments of `build_scorers`.
    """
    [scorer] = build_scorers([reward], policy=DEFAULT_POLICY, **settings).values()
    try:
        scorer.check_servers()
        guarded = WeightedReward(guard_scorers({reward: scorer}), {reward: 1.0})
        tasks = _group_tasks(pairs) if scorer.compares_groups else _single_tasks(pairs, batch)
        scores: dict[tuple, float] = {}
        for task in follow(tasks, reward, len(tasks)):
            images = [
                read_image(image, prompt.where)
                for image, prompt in zip(task.images, task.prompts, strict=True)
            ]
            rows = [_metadata(prompt) for prompt in task.prompts]
            values = guarded(images, [prompt.prompt for prompt in task.prompts], rows)[reward]
            scores.update(zip(task.keys, map(float, values), strict=True))
        if not any(map(math.isfinite, scores.values())):
            reason = guarded.last_errors.get(reward, "it does not apply to these prompts")
            raise UserError(f"gave no score: {reason}", field=f"reward {reward!r}")
    finally:
        scorer.close()
    keys = [_keys(pair, index, scorer.compares_groups) for index, pair in enumerate(pairs)]
    return [
        PairScore(
            pair.prompt.prompt,
            str(pair.prompt.metadata.get(category, NO_CATEGORY)),
            scores[chosen],
            scores[rejected],
            pair.probability,
        )
        for pair, (chosen, rejected) in zip(pairs, keys, strict=True)
    ]


def _keys(pair: ComparedImages, index: int, by_pair: bool) -> tuple[tuple, tuple]:
    """Return the keys of both images; scores of a group-wise reward depend on the pair."""
    context = (index,) if by_pair else pair.prompt.identity
    return (*context, pair.chosen), (*context, pair.rejected)


def _group_tasks(pairs: Sequence[ComparedImages]) -> list[_Task]:
    """Return a task per pair."""
    return [
        _Task([*_keys(pair, index, True)], [pair.prompt] * 2, [pair.chosen, pair.rejected])
        for index, pair in enumerate(pairs)
    ]


def _single_tasks(pairs: Sequence[ComparedImages], batch: int) -> list[_Task]:
    """Return tasks of `batch` different images."""
    samples = {}
    for index, pair in enumerate(pairs):
        images = (pair.chosen, pair.rejected)
        for key, image in zip(_keys(pair, index, False), images, strict=True):
            samples.setdefault(key, (pair.prompt, image))
    items = [(key, *sample) for key, sample in samples.items()]
    parts = [items[i : i + batch] for i in range(0, len(items), batch)]
    return [_Task(*map(list, zip(*part, strict=True))) for part in parts]


def _metadata(prompt: Prompt) -> dict[str, Any]:
    """Return the metadata of a prompt with its source images and mask."""
    row = dict(prompt.metadata)
    sources = [read_image(image, prompt.where) for image in prompt.images]
    if sources:
        row[SOURCE] = sources if sources[1:] else sources[0]
    if prompt.mask:
        row[MASK] = read_image(prompt.mask, prompt.where).convert("L")
    return row
