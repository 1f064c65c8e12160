"""Results of a benchmark: results.json, results.csv and results.md, and reading them again.

The files contain neither times nor paths of the output, so that two runs of the same benchmark can
be compared byte for byte.
"""

import csv
import io
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from flow_grpo import __version__
from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.benchmarks.formulas import apply_formula
from flow_grpo.benchmarks.protocol import Deviation, Protocol
from flow_grpo.errors import UserError
from flow_grpo.report.score_table import ScoreTable, finite_or_none
from flow_grpo.untrusted_files import read_json

RESULTS = "results"  # stem of the files
FORMAT = 1
NOT_APPLICABLE = "not applicable"  # in JSON, a score that its prompt does not request
CELL_KEYS = ("mean", "low", "high", "count", "failed")
PACKAGES = ("torch", "diffusers", "transformers", "peft", "numpy")
# packages that compute the scores of a scorer
SCORER_PACKAGES = {
    "ocr": ("rapidocr", "rapidocr-onnxruntime", "paddleocr", "onnxruntime"),
    "geneval": ("opencv-python-headless", "scipy"),
    "math_answer": ("math-verify", "sympy"),
}


@dataclass(frozen=True)
class CandidateResult:
    """Scores of a candidate.

    Attributes:
        name: Its name in the tables.
        weights: Path or hub id of its weights; "" for the base model.
        sha256: Checksum of its weights; "" for the base model.
        scores: By column: mean, standard_error, low, high, count, failed, and `difference` from the
            first candidate. None where unknown.
        samples: One per image or response: prompt, tag, number and score by scorer.
    """

    name: str
    weights: str
    sha256: str
    scores: dict[str, dict[str, Any]]
    samples: list[dict[str, Any]]

    def mean(self, column: str) -> float | None:
        """Return the mean of a column; None if nothing could be scored."""
        return self.scores[column]["mean"]


@dataclass(frozen=True)
class BenchmarkResults:
    """Results of a benchmark for one or several candidates."""

    benchmark: str
    title: str
    model: str  # the base model
    protocol: dict[str, Any]
    settings: dict[str, Any]  # those that were used
    deviations: list[Deviation]
    versions: dict[str, str]
    table: str  # Markdown, with a note on the intervals
    candidates: list[CandidateResult]

    @property
    def headline(self) -> str:
        """The first column of the table."""
        return next(iter(self.candidates[0].scores))

    def to_markdown(self) -> str:
        """Return the title, the table, and the protocol with its deviations."""
        used = {name: value for name, value in self.settings.items() if name != "scorers"}
        lines = [
            f"# {self.benchmark}: {self.title}",
            self.table.strip(),
            f"Model: `{self.model}`. {describe_settings(used)}",
            f"Scorers: {describe_scorers(self.protocol, self.settings)}. "
            f"Formula: {self.protocol['formula']}. Protocol: {self.protocol['settings_from']}.",
        ]
        if self.deviations:
            lines.append("Deviations from the protocol:")
            lines.append("\n".join(f"- {each}" for each in self.deviations))
        else:
            lines.append("No deviations from the protocol.")
        return "\n\n".join(lines) + "\n"


def describe_settings(used: Mapping[str, Any]) -> str:
    """Return settings as a sentence: "prompts 192, samples 2, ..."."""
    shown = {
        n: v[:12] if n == "prompts_sha256" else v for n, v in used.items() if v not in ("", {})
    }
    return "Settings: " + ", ".join(f"{name} {value}" for name, value in shown.items()) + "."


def describe_scorers(protocol: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the scorers with their weights and options."""
    weights = protocol["scorer_weights"]
    return "; ".join(
        f"{name} ({weights.get(name, 'custom')})" + (f" with {options}" if options else "")
        for name, options in settings["scorers"].items()
    )


def package_versions(scorers: Iterable[str]) -> dict[str, str]:
    """Return the versions of this project, of Python, and of the libraries that are involved."""
    names = [*PACKAGES, *(p for each in scorers for p in SCORER_PACKAGES.get(each, ()))]
    found = {"flow_grpo": __version__, "python": platform.python_version()}
    for name in dict.fromkeys(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class RawScores:
    """Raw scores of a candidate.

    Attributes:
        scores: By scorer, (prompts, samples); NaN where scoring failed, -inf where the scorer does
            not apply. Names with a slash are further values of a scorer.
    """

    name: str
    weights: str
    sha256: str
    scores: dict[str, np.ndarray]


def collect_results(
    protocol: Protocol,
    *,
    model: str,
    settings: dict[str, Any],
    deviations: list[Deviation],
    prompts: Sequence[str],
    tags: Sequence[str],
    candidates: Sequence[RawScores],
    responses: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> BenchmarkResults:
    """Apply the formula of a benchmark to the raw scores of its candidates.

    Args:
        protocol: The benchmark.
        model: The base model.
        settings: Settings that were used, with `scorers`.
        deviations: How they differ from the protocol.
        prompts: Text of each prompt.
        tags: Category of each prompt.
        candidates: Scores of each candidate; the others are compared with the first.
        responses: Texts to store with the samples, by candidate, (prompts, samples).
    """
    table = ScoreTable(unit="prompt" if protocol.trainer == "diffusion" else "question")
    scorers, categories = settings["scorers"], np.array(tags)
    for each in candidates:
        named = {name: each.scores[name] for name in scorers}
        columns = apply_formula(protocol.formula, named, categories)
        table.add(each.name, columns.values, columns.groups)
    cells = {each["name"]: each["scores"] for each in table.to_json()}
    return BenchmarkResults(
        benchmark=protocol.name,
        title=protocol.title,
        model=model,
        protocol=protocol.to_json(),
        settings=settings,
        deviations=deviations,
        versions=package_versions(scorers),
        table=table.to_markdown(),
        candidates=[
            CandidateResult(
                each.name,
                each.weights,
                each.sha256,
                cells[each.name],
                list(_samples(each, prompts, tags, (responses or {}).get(each.name))),
            )
            for each in candidates
        ],
    )


def _samples(
    candidate: RawScores,
    prompts: Sequence[str],
    tags: Sequence[str],
    responses: Sequence[Sequence[str]] | None,
) -> Iterable[dict[str, Any]]:
    """Yield the samples of a candidate as stored in results.json."""
    for row, (prompt, tag) in enumerate(zip(prompts, tags, strict=True)):
        for number in range(next(iter(candidate.scores.values())).shape[1]):
            sample: dict[str, Any] = {"prompt": prompt, **({"tag": tag} if tag else {})}
            sample["number"] = number
            if responses is not None:
                sample["response"] = responses[row][number]
            for name, values in candidate.scores.items():
                sample[name] = score_to_json(float(values[row, number]))
            yield sample


def score_to_json(score: float) -> float | str | None:
    """Return a score for JSON, which has neither NaN (failed) nor -inf (not applicable)."""
    return NOT_APPLICABLE if score == -np.inf else finite_or_none(score)


def score_from_json(value: float | str | None) -> float:
    """Invert `score_to_json`."""
    if value == NOT_APPLICABLE:
        return -np.inf
    return np.nan if value is None else float(value)


def write_results(out: Path, results: BenchmarkResults) -> None:
    """Write results.json, results.md and results.csv."""
    content = {"format": FORMAT, **asdict(results)}
    write_text_atomic(out / f"{RESULTS}.json", json.dumps(content, indent=1) + "\n")
    write_text_atomic(out / f"{RESULTS}.md", results.to_markdown())
    write_text_atomic(out / f"{RESULTS}.csv", to_csv(results))


def to_csv(results: BenchmarkResults) -> str:
    """Return the results as CSV, with a row per candidate and column."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["benchmark", "candidate", "column", *CELL_KEYS, "difference", "deviations"])
    deviations = " | ".join(map(str, results.deviations))
    for each in results.candidates:
        for column, cell in each.scores.items():
            difference = (cell.get("difference") or {}).get("mean")
            values = [cell[key] for key in CELL_KEYS]
            row = [results.benchmark, each.name, column, *values, difference, deviations]
            writer.writerow(row)
    return text.getvalue()


def read_results(path: str | Path) -> BenchmarkResults:
    """Read the results of a benchmark from its output directory or its results.json.

    Raises:
        UserError: If the file is missing, or not written by `write_results`.
    """
    file = Path(path)
    file = file / f"{RESULTS}.json" if file.is_dir() else file
    try:
        content = read_json(file)
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}",
            field=file,
            hint="pass an output directory of flow-grpo bench",
        ) from error
    try:
        if content.pop("format") != FORMAT:
            raise ValueError("unknown format")
        deviations = [Deviation(**each) for each in content.pop("deviations")]
        candidates = [CandidateResult(**each) for each in content.pop("candidates")]
        return BenchmarkResults(**content, deviations=deviations, candidates=candidates)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError("is not a results file of flow-grpo bench", field=file) from error
