r"""Metrics of several sampled responses per question: avg@n, pass@k and maj@n.

With n responses to a question of which c are correct:

- avg@n of a reward is the mean of its n scores.
- pass@k = 1 - C(n - c, k) / C(n, k) is the unbiased estimator of the probability that at least one
  of k responses is correct (Chen et al. 2021, arXiv 2107.03374, section 2.1).
- maj@n is 1 if the most frequent final answer is correct (self-consistency, Wang et al. 2022, arXiv
  2203.11171). Of equally frequent answers, the one that was given first counts. A response without
  a final answer does not vote; without any vote the question counts as wrong.

A response is correct if one reward, `Correctness.reward`, is at least `Correctness.threshold`.

Scores are NaN where scoring failed and -inf where the reward does not apply. A question with such a
response has no pass@k and maj@n: NaN or -inf.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from flow_grpo.errors import UserError, did_you_mean
from flow_grpo.rewards import WeightedReward
from flow_grpo.rewards.text.equality import compare_without_algebra
from flow_grpo.rewards.text.math_answer import MAX_FINAL_ANSWER_CHARS, MathAnswer
from flow_grpo.rewards.text.math_parsing import UnparsableFormula
from flow_grpo.rewards.text.response_format import extract_final_answer
from flow_grpo.rewards.text.scorers import Choice

ROUNDING = 1e-6  # a reward server may return 0.99999994


@dataclass(frozen=True)
class Correctness:
    """Which responses count as correct: those with a score of at least `threshold`."""

    reward: str
    threshold: float = 1.0

    @classmethod
    def parse(cls, text: str, weights: Mapping[str, float]) -> "Correctness":
        """Parse --correct, "REWARD" or "REWARD:THRESHOLD"; by default the largest weight counts.

        Args:
            text: The option, possibly empty.
            weights: Weights of the rewards by name.
        """
        if not text:
            return cls(max(weights, key=lambda name: weights[name]))
        name, colon, number = text.partition(":")
        if name not in weights:
            raise UserError(
                f"must be one of the rewards {', '.join(weights)}",
                field="--correct",
                value=text,
                hint=did_you_mean(name, weights),
            )
        try:
            threshold = float(number) if colon else 1.0
        except ValueError:
            threshold = np.nan
        if not np.isfinite(threshold):
            raise UserError(
                "has a threshold that is not a number",
                field="--correct",
                value=text,
                hint=f"write it as {name}:0.5",
            )
        return cls(name, threshold)

    def of(self, scores: np.ndarray) -> np.ndarray:
        """Return 1 for correct and 0 for other scores; NaN and -inf are kept."""
        return np.where(np.isfinite(scores), scores >= self.threshold - ROUNDING, scores)

    def __str__(self) -> str:
        return f"{self.reward} >= {self.threshold:g}"


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Return pass@k of each question, (Q,).

    Args:
        correct: 1 or 0 for each response, (Q, n); NaN or -inf without a score.
        k: Number of attempts, at most n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} responses, not {n}")
    wrong = n - np.where(np.isfinite(correct), correct, 0).sum(1).astype(int)
    estimates = np.array([1 - comb(count, k) / comb(n, k) for count in wrong])
    return _keep_missing(estimates, correct)


def majority_correct(correct: np.ndarray, answers: Sequence[Sequence[str | None]]) -> np.ndarray:
    """Return maj@n of each question, (Q,): whether the most frequent answer is correct.

    Args:
        correct: As for `pass_at_k`, (Q, n).
        answers: Final answer of each response; None if it has none.
    """
    winners = [_most_frequent(own) for own in answers]
    pairs = zip(correct, winners, strict=True)
    values = np.array([0.0 if winner is None else row[winner] for row, winner in pairs])
    return _keep_missing(values, correct)


def _keep_missing(values: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return `values` (Q,), but NaN or -inf for a question with such a response."""
    values = np.where(np.isneginf(correct).any(1), -np.inf, values)
    return np.where(np.isnan(correct).any(1), np.nan, values)


def _most_frequent(answers: Sequence[str | None]) -> int | None:
    """Return the index of the first response with the most frequent answer, or None."""
    groups: dict[int, int] = {}  # first response with an answer: number of votes
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        same = (first for first in groups if same_answer(answer, answers[first]))
        first = next(same, index)
        groups[first] = groups.get(first, 0) + 1
    return max(groups, key=lambda first: groups[first]) if groups else None


def same_answer(first: str, second: str) -> bool:
    """Return whether two final answers are equal, as far as that is decided without algebra."""
    if first == second:
        return True
    if max(len(first), len(second)) > MAX_FINAL_ANSWER_CHARS:
        return False
    try:
        return compare_without_algebra(first, second) == 1.0
    except (UnparsableFormula, ArithmeticError, ValueError):
        return False


def answer_parser(reward: WeightedReward, name: str) -> Callable[[str], str | None]:
    r"""Return the function that parses the final answer of a response, for maj@n.

    The final answer is in <answer> tags or \boxed. For the reward `choice` it is the set of
    letters, and for `math_answer` with `untagged` it may be the whole response.
    """
    scorer = reward.scorers[name]
    if isinstance(scorer, Choice):
        return lambda text: ", ".join(sorted(scorer.letters(text))) or None
    if isinstance(scorer, MathAnswer) and scorer.untagged:
        return lambda text: extract_final_answer(text) or text.strip() or None
    return lambda text: extract_final_answer(text) or None
