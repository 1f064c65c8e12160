"""Formulas of benchmarks: columns of the score table from the scores of all samples.

A column has one value per prompt, the mean over its samples, because samples of one prompt are not
independent; `flow_grpo.report.score_table` averages it over the prompts, or over the means of
groups. NaN: no sample could be scored; -inf: the column does not apply to the prompt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from flow_grpo.report.score_table import sample_means

SCORE = "score"  # the column of a benchmark with one headline number


@dataclass(frozen=True)
class Columns:
    """Columns of the score table, (prompts,) each, the headline first."""

    values: dict[str, np.ndarray]
    groups: dict[str, np.ndarray] = field(default_factory=dict)  # as in `ScoreTable.groups`


Formula = Callable[[Mapping[str, np.ndarray], np.ndarray], Columns]


def apply_formula(name: str, scores: Mapping[str, np.ndarray], tags: np.ndarray) -> Columns:
    """Return the columns of a benchmark.

    Args:
        name: A key of `FORMULAS`.
        scores: By scorer, (prompts, samples); NaN where scoring failed.
        tags: Category of each prompt, (prompts,); empty strings without categories.
    """
    return FORMULAS[name](scores, tags)


def mean(scores: Mapping[str, np.ndarray], tags: np.ndarray) -> Columns:
    """Return the mean of each scorer."""
    return Columns({name: sample_means(values) for name, values in scores.items()})


def percent(scores: Mapping[str, np.ndarray], tags: np.ndarray) -> Columns:
    """Return the mean of each scorer times 100."""
    return Columns({name: 100 * sample_means(values) for name, values in scores.items()})


def mean_of_tags(scores: Mapping[str, np.ndarray], tags: np.ndarray) -> Columns:
    """Return GenEval's score: the unweighted mean of the means by tag.

    Other columns are each tag; "samples", the mean over all images, which some report instead; and
    "any of N", the fraction of prompts with at least one correct image among N.
    """
    [values] = scores.values()
    own = sample_means(values)
    columns = {SCORE: own}
    for tag in dict.fromkeys(tags.tolist()):
        columns[tag] = np.where(tags == tag, own, -np.inf)
    columns["samples"] = own
    if values.shape[1] > 1:
        failed = np.isnan(values)
        best = np.where(failed, -np.inf, values).max(axis=1)
        # the best is unknown if an unscored sample could be better
        columns[f"any of {values.shape[1]}"] = np.where(
            failed.any(axis=1) & (best < 1), np.nan, best
        )
    return Columns(columns, {SCORE: tags})


FORMULAS: dict[str, Formula] = {
    "mean": mean,
    "percent": percent,
    "mean_of_tags": mean_of_tags,
}
