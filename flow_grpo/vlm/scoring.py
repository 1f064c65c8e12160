"""Answers, scored in the background."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from flow_grpo.rewards import TOTAL, PendingScores, WeightedReward
from flow_grpo.vlm.questions import Question
from flow_grpo.vlm.rollout import BASELINE, ENDED, LENGTH, Sample


def reward_metadata(question: Question, tokens: int, max_new_tokens: int) -> dict[str, Any]:
    """What rewards are told of an answer beside its text: the truth, and how long it is."""
    lengths = {"answer_tokens": tokens, "max_new_tokens": max_new_tokens}
    return {**question.metadata, "answer": question.answer, **lengths}


@dataclass
class PendingAnswers:
    """Scores of samples, and of a greedy answer to each of their questions, if there is one."""

    samples: list[Sample]
    greedy: list[Sample]
    scores: PendingScores

    @classmethod
    def submit(
        cls,
        reward: WeightedReward,
        questions: list[Question],
        max_new_tokens: int,
        samples: list[Sample],
        greedy: list[Sample] | None = None,
    ) -> "PendingAnswers":
        greedy = greedy or []
        both = [*samples, *greedy]
        told = [reward_metadata(questions[s.row], len(s.tokens), max_new_tokens) for s in both]
        asked = [questions[s.row].text for s in both]
        return cls(samples, greedy, reward.submit([s.text for s in both], asked, told))

    def result(self) -> dict[str, np.ndarray]:
        """Columns (samples,), their lengths and the greedy answers' rewards among them."""
        every, count = self.scores.result(), len(self.samples)
        columns = {name: column[:count] for name, column in every.items()}
        columns[LENGTH] = np.array([float(len(s.tokens)) for s in self.samples])
        columns[ENDED] = np.array([float(s.ended) for s in self.samples])
        if self.greedy:
            of_greedy = zip(self.greedy, every[TOTAL][count:], strict=True)
            by_row = {sample.row: value for sample, value in of_greedy}
            columns[BASELINE] = np.array([by_row[s.row] for s in self.samples])
        return columns
