"""The score table of an evaluation of responses, and its files."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.report.console import displayed_rewards, format_table
from flow_grpo.report.score_table import ScoreTable, sample_means
from flow_grpo.rewards import TOTAL
from flow_grpo.vlm.evaluation_questions import EvaluationSet
from flow_grpo.vlm.response_generation import Sampling
from flow_grpo.vlm.response_log import LoggedResponse, ResponseKey, Responses
from flow_grpo.vlm.response_metrics import (
    Correctness,
    majority_correct,
    pass_at_k,
)

TOTAL_LABEL = "reward"  # of the weighted sum, as "avg avg@4" would be confusing
LENGTH, CUT_OFF = "tokens", "cut_off"


@dataclass(frozen=True)
class EvaluationResults:
    """All responses of an evaluation with their scores.

    Attributes:
        settings: What is evaluated and how, as in evaluation.json.
        candidates: Names of the candidates.
        sets: The datasets.
        sampling: How responses were generated.
        correctness: Which responses count as correct.
        rewards: Names of the rewards.
        parse_answer: Returns the final answer of a response, or None.
        responses: All responses.
    """

    settings: dict[str, Any]
    candidates: Sequence[str]
    sets: Sequence[EvaluationSet]
    sampling: Sampling
    correctness: Correctness
    rewards: Sequence[str]
    parse_answer: Callable[[str], str | None]
    responses: Responses

    def responses_to(self, candidate: str, dataset: str, row: int) -> list[LoggedResponse]:
        """Return the n responses to a question."""
        return [
            self.responses[ResponseKey(candidate, dataset, row, number)]
            for number in range(self.sampling.n)
        ]

    def scores(self, candidate: str, each: EvaluationSet) -> dict[str, np.ndarray]:
        """Return the scores (Q, n) by name; NaN where scoring failed, -inf if not applicable."""
        rows = [self.responses_to(candidate, each.name, row) for row in range(len(each.questions))]
        found = dict.fromkeys(name for row in rows for r in row for name in r.scores)
        names = dict.fromkeys([*self.rewards, TOTAL, *found])
        return {name: np.array([[_score(r, name) for r in row] for row in rows]) for name in names}

    def columns(self, candidate: str, each: EvaluationSet) -> dict[str, np.ndarray]:
        """Return the columns of the table for one dataset, (Q,) each."""
        scores, n = self.scores(candidate, each), self.sampling.n
        rows = [self.responses_to(candidate, each.name, row) for row in range(len(each.questions))]
        columns = {self.label(name): sample_means(values) for name, values in scores.items()}
        if n > 1:
            correct = self.correctness.of(scores[self.correctness.reward])
            for k in attempts(n):
                columns[f"pass@{k}"] = pass_at_k(correct, k)
            answers = [[self.parse_answer(r.answer) for r in row] for row in rows]
            columns[f"maj@{n}"] = majority_correct(correct, answers)
        columns[LENGTH] = np.array([np.mean([r.tokens for r in row]) for row in rows])
        columns[CUT_OFF] = np.array([np.mean([not r.ended for r in row]) for row in rows])
        return columns

    def label(self, name: str) -> str:
        """Return the column name of a reward: "math_answer", or "math_answer avg@4"."""
        if self.sampling.n == 1:
            return name
        return f"{TOTAL_LABEL if name == TOTAL else name} avg@{self.sampling.n}"

    @cached_property
    def tables(self) -> dict[str, ScoreTable]:
        """Return the table of all candidates for each dataset."""
        found = {each.name: ScoreTable() for each in self.sets}
        for each in self.sets:
            for candidate in self.candidates:
                found[each.name].add(candidate, self.columns(candidate, each))
        return found

    def table(self) -> ScoreTable:
        """Return the table of all datasets; with several, the columns start with their names."""
        if len(self.tables) == 1:
            return next(iter(self.tables.values()))
        table = ScoreTable()
        for dataset, part in self.tables.items():
            for candidate, columns in part.scores.items():
                table.add(candidate, {f"{dataset}/{k}": values for k, values in columns.items()})
        return table

    def shown_columns(self) -> list[str]:
        """Return the columns of results.md for a dataset; results.csv and .json have all."""
        names = [self.label(name) for name in displayed_rewards([*self.rewards, TOTAL])]
        if self.sampling.n > 1:
            names += [f"pass@{self.sampling.n}", f"maj@{self.sampling.n}"]
        return names

    def markdown(self) -> str:
        """Return a table per dataset, and the note on their intervals."""
        parts = []
        for each in self.sets:
            table = self.tables[each.name]
            title = f"{each.name}, {len(each.questions)} questions, {self.sampling.describe()}"
            parts += [title, format_table(table.format_rows(self.shown_columns()))]
        return "\n\n".join([*parts, self.note()])

    def note(self) -> str:
        """Return what is correct, and what the numbers after ± and in parentheses are."""
        note = next(iter(self.tables.values())).note()
        if self.sampling.n == 1:
            return note
        return f"pass@n and maj@n: a response is correct if {self.correctness}. {note}"

    def sample_rows(self) -> list[dict[str, Any]]:
        """Return the lines of samples.jsonl: all responses by candidate, dataset and question."""
        return [
            self.sample_row(candidate, each, row, number)
            for candidate in self.candidates
            for each in self.sets
            for row in range(len(each.questions))
            for number in range(self.sampling.n)
        ]

    def sample_row(
        self, candidate: str, each: EvaluationSet, row: int, number: int
    ) -> dict[str, Any]:
        """Return the line of samples.jsonl of one response."""
        question = each.questions[row]
        response = self.responses[ResponseKey(candidate, each.name, row, number)]
        score = response.scores.get(self.correctness.reward)
        return {
            "checkpoint": candidate,
            "dataset": each.name,
            "row": row,
            "number": number,
            "prompt": question.text,
            "answer": response.transcript or response.answer,
            "truth": str(question.answer),
            "scores": response.scores,
            "correct": None if score is None else bool(self.correctness.of(np.array(score))),
            "tokens": response.tokens,
            "ended": response.ended,
        }

    def write(self, out: Path) -> ScoreTable:
        """Write results.json, results.csv, results.md and samples.jsonl; return the table."""
        table = self.table()
        table.write(out, self.settings, markdown=self.markdown())
        lines = "".join(json.dumps(row) + "\n" for row in self.sample_rows())
        write_text_atomic(out / "samples.jsonl", lines)
        return table


def attempts(n: int) -> list[int]:
    """Return the k of pass@k: powers of two up to n, and n."""
    powers = [2**i for i in range(n.bit_length())]
    return sorted({*(k for k in powers if k <= n), n})


def _score(response: LoggedResponse, name: str) -> float:
    value = response.scores.get(name, -math.inf)
    return math.nan if value is None else value
