"""Table of scores, candidates by columns, with confidence intervals and paired differences.

A column has one score per unit (a prompt or a question), in the same order for all candidates: NaN
where scoring failed, -inf where the score does not apply. Several images of a prompt, or several
responses to a question, are averaged before, because they are not independent. With n scores of
standard deviation s,

    mean ± 1.96 * s / sqrt(n)

is a 95% confidence interval (normal approximation; too narrow for fewer than about 30 units, and
of no width if all scores are equal). Candidates are compared with the first one unit by unit: the
interval is that of the differences, which vary less than the scores.

The score of a column with groups (such as GenEval's six tasks) is the unweighted mean of the means
of its groups; the variance of that mean is the sum of those of the group means, divided by the
number of groups squared.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.report.console import format_table

Z_95 = 1.959964  # 97.5% quantile of the normal distribution
INTERVAL_NOTE = (
    "± is half the width of a 95% confidence interval (normal approximation over {units})."
)
DIFFERENCE_NOTE = (
    " In parentheses: the difference from {first} with its interval (paired by {unit}); if "
    "it contains 0, the difference is not significant."
)
CSV_HEADER = (
    "candidate",
    "column",
    "mean",
    "low",
    "high",
    "count",
    "failed",
    "difference",
    "difference_low",
    "difference_high",
    "difference_count",
)


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two means over the units that both candidates were scored on."""

    mean: float
    standard_error: float  # NaN for fewer than two units
    prompts: int  # number of those units


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and 95% confidence interval."""

    mean: float  # NaN without scores
    standard_error: float  # NaN for fewer than two scores, or a group with fewer
    count: int  # number of scores

    @property
    def low(self) -> float:
        return self.mean - Z_95 * self.standard_error

    @property
    def high(self) -> float:
        return self.mean + Z_95 * self.standard_error


def sample_means(values: np.ndarray) -> np.ndarray:
    """Return the mean over the scored samples of each unit, (units,).

    NaN if all samples failed, -inf if the scorer does not apply to the unit.

    Args:
        values: (units, samples).
    """
    finite = np.isfinite(values)
    count = finite.sum(axis=1)
    total = np.where(finite, values, 0.0).sum(axis=1)
    without = np.where(np.isneginf(values).all(axis=1), -np.inf, np.nan)
    return np.where(count > 0, total / np.maximum(count, 1), without)


def paired_difference(scores: np.ndarray, reference: np.ndarray) -> PairedDifference:
    """Compare two candidates unit by unit.

    Scores vary more between prompts than between models on one prompt, so the standard error is
    that of the paired differences, not of the scores.

    Args:
        scores: (units,); NaN where scoring failed.
        reference: Scores to subtract, (units,).
    """
    found = estimate(_differences(scores, reference))
    return PairedDifference(found.mean, found.standard_error, found.count)


def estimate(scores: np.ndarray, groups: np.ndarray | None = None) -> Estimate:
    """Return the mean of the finite scores with its standard error.

    The standard error is NaN if a group has only one finite score.

    Args:
        scores: Score of each prompt or question, (units,).
        groups: Group of each score, (units,). If given, the mean is that of the groups' means.
    """
    finite = np.isfinite(scores)
    if groups is None:
        groups = np.zeros(len(scores))
    parts = [scores[finite & (groups == group)] for group in np.unique(groups[finite])]
    if not parts:
        return Estimate(math.nan, math.nan, 0)
    mean = float(np.mean([part.mean() for part in parts]))
    standard_error = math.nan
    if min(map(len, parts)) > 1:
        variance = sum(part.var(ddof=1) / len(part) for part in parts)
        standard_error = float(math.sqrt(variance) / len(parts))
    return Estimate(mean, standard_error, int(finite.sum()))


@dataclass
class ScoreTable:
    """Scores of candidates by column.

    Attributes:
        unit: What a score belongs to, for the note below the table.
        scores: By candidate and column, (units,); the first candidate is compared with.
        groups: By column, group of each unit, (units,), for columns that are means over groups.
    """

    unit: str = "question"
    scores: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    groups: dict[str, np.ndarray] = field(default_factory=dict)

    def add(
        self,
        candidate: str,
        columns: Mapping[str, np.ndarray],
        groups: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Add columns of a candidate; `groups` as in `ScoreTable`."""
        self.scores.setdefault(candidate, {}).update(columns)
        self.groups.update(groups or {})

    @property
    def columns(self) -> list[str]:
        """Return the columns of all candidates, in order."""
        return list(dict.fromkeys(name for own in self.scores.values() for name in own))

    def score(self, candidate: str, column: str) -> Estimate:
        """Return the mean of a column; NaN if the candidate lacks it."""
        scores = self.scores[candidate].get(column, np.zeros(0))
        return estimate(scores, self.groups.get(column) if len(scores) else None)

    def failed(self, candidate: str, column: str) -> int:
        """Return how many units could not be scored."""
        return int(np.isnan(self.scores[candidate].get(column, np.zeros(0))).sum())

    def difference(self, candidate: str, column: str) -> Estimate | None:
        """Return the paired difference from the first candidate, or None if there is none."""
        first = next(iter(self.scores))
        own, reference = self.scores[candidate].get(column), self.scores[first].get(column)
        if candidate == first or own is None or reference is None:
            return None
        return estimate(_differences(own, reference), self.groups.get(column))

    def to_json(self) -> list[dict[str, Any]]:
        """Return a list of candidates, with mean, interval, count and difference by column."""
        return [
            {"name": name, "scores": {c: self._cell(name, c) for c in self.columns}}
            for name in self.scores
        ]

    def to_csv(self) -> str:
        """Return CSV with a row per candidate and column; unknown values are empty."""
        text = io.StringIO()
        writer = csv.DictWriter(text, CSV_HEADER, lineterminator="\n")
        writer.writeheader()
        for name in self.scores:
            for column in self.columns:
                cell = self._cell(name, column)
                difference = cell.pop("difference", {})
                del cell["standard_error"]
                row = {"candidate": name, "column": column, **cell}
                if difference:
                    row["difference"] = difference["mean"]
                    for key in ("low", "high", "count"):
                        row[f"difference_{key}"] = difference[key]
                writer.writerow(row)
        return text.getvalue()

    def to_markdown(self, columns: Sequence[str] | None = None) -> str:
        """Return the table of `format_rows` and the note on its intervals."""
        return f"{format_table(self.format_rows(columns))}\n\n{self.note()}"

    def format_rows(self, columns: Sequence[str] | None = None) -> list[list[str]]:
        """Return a header and a row per candidate, as text; `columns` are by default all."""
        columns = self.columns if columns is None else columns
        failed = {name: self._most_failed(name) for name in self.scores}
        rows = [["checkpoint", *columns] + (["failed"] if any(failed.values()) else [])]
        for name in self.scores:
            cells = [self.format_cell(name, column) for column in columns]
            rows.append([name, *cells] + ([str(failed[name])] if any(failed.values()) else []))
        return rows

    def note(self) -> str:
        """Return what the numbers after ± and in parentheses are."""
        note = INTERVAL_NOTE.format(units=f"{self.unit}s")
        if len(self.scores) > 1:
            note += DIFFERENCE_NOTE.format(first=next(iter(self.scores)), unit=self.unit)
        return note

    def format_cell(self, candidate: str, column: str) -> str:
        """Return `mean ± half width (difference ± half width)`, without unknown parts."""
        first = next(iter(self.scores))
        digits = num_decimals(self.score(first, column).mean)
        text = _format_estimate(self.score(candidate, column), f".{digits}f")
        difference = self.difference(candidate, column)
        if difference is None or math.isnan(difference.mean):
            return text
        return f"{text} ({_format_estimate(difference, f'+.{digits}f')})"

    def write(
        self,
        out: Path,
        settings: Mapping[str, Any],
        *,
        stem: str = "results",
        markdown: str = "",
    ) -> None:
        """Write STEM.json, STEM.csv and STEM.md to a directory.

        Args:
            out: The directory.
            settings: Further entries of STEM.json, which has the table as `candidates`.
            stem: Name of the files.
            markdown: Content of STEM.md, by default `to_markdown`.
        """
        content = {**settings, "candidates": self.to_json()}
        write_text_atomic(out / f"{stem}.json", json.dumps(content, indent=1) + "\n")
        write_text_atomic(out / f"{stem}.csv", self.to_csv())
        write_text_atomic(out / f"{stem}.md", f"{markdown or self.to_markdown()}\n")

    def _cell(self, candidate: str, column: str) -> dict[str, Any]:
        cell = _estimate_json(self.score(candidate, column))
        cell["failed"] = self.failed(candidate, column)
        difference = self.difference(candidate, column)
        return cell if difference is None else {**cell, "difference": _estimate_json(difference)}

    def _most_failed(self, candidate: str) -> int:
        return max((self.failed(candidate, column) for column in self.columns), default=0)


def num_decimals(mean: float) -> int:
    """Return 4, or more for rewards with small values."""
    if math.isnan(mean) or mean == 0:
        return 4
    return min(8, max(4, 3 - math.floor(math.log10(abs(mean)))))


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _differences(scores: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the differences (units,), NaN where one of the scores is not finite."""
    both = np.isfinite(scores) & np.isfinite(reference)
    return np.where(both, np.where(both, scores, 0) - np.where(both, reference, 0), np.nan)


def _estimate_json(found: Estimate) -> dict[str, Any]:
    values = {**asdict(found), "low": found.low, "high": found.high}
    return {name: finite_or_none(value) for name, value in values.items()}


def _format_estimate(found: Estimate, form: str) -> str:
    if math.isnan(found.mean):
        return "-"
    if math.isnan(found.standard_error):
        return f"{found.mean:{form}}"
    return f"{found.mean:{form}} ± {Z_95 * found.standard_error:{form.lstrip('+')}}"
