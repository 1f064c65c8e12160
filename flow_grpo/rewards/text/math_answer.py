"""The `math_answer` reward: does the final answer equal the ground truth?"""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed, describe_error
from flow_grpo.rewards.protocol import MetadataRows, ScorerOutput
from flow_grpo.rewards.text.equality import compare_without_algebra
from flow_grpo.rewards.text.math_parsing import UnparsableFormula
from flow_grpo.rewards.text.response_format import extract_final_answer
from flow_grpo.rewards.text.scorers import MAX_RESPONSE_CHARS, ResponseScorer
from flow_grpo.rewards.workers.pool import PooledScorer, WorkerDied, WorkerPool

MAX_FINAL_ANSWER_CHARS = 2_000  # longer final answers are wrong
WORKER_MEMORY_GIB = 2.0  # address space of a worker
CHECKS_PER_WORKER = 4  # between two checks of the elapsed time
MAX_LATE_CHECK_SECONDS = 0.25  # CPU time of a check once the budget is spent
MIN_LATE_CHECK_SECONDS = 0.02
MAX_BUDGET_FACTOR = 3.0  # multiple of the budget after which nothing is checked
HARD_TIMEOUT_FACTOR = 3.0  # multiple of `timeout`, in wall time, after which a worker is killed


class UnparsedResponse(float):
    """Score 0 of a response whose final answer cannot be parsed."""


@dataclass(kw_only=True, eq=False)
class MathAnswer(ResponseScorer, PooledScorer):
    r"""Score 1 if the final answer equals the ground truth in the metadata, else 0.

    The final answer is in <answer> tags or \boxed. Anything but a plain number is checked by
    math-verify in worker processes. Logs the fraction of unparsable responses as `unread`.

    Args:
        timeout: CPU seconds per check. A response that takes longer is wrong; a ground truth that
            takes longer gives no score.
        workers: Number of worker processes.
        budget: Seconds per batch. Once they are spent, each check gets at most 0.25 s; after three
            budgets the remaining responses have no score.
        untagged: Whether a response without tags and box is a final answer as a whole.
    """

    name = "math_answer"

    timeout: float = 5.0
    workers: int = 1
    budget: float = 60.0
    untagged: bool = False

    def __post_init__(self) -> None:
        """Check the options and create the pool of math-verify workers."""
        for name in ("timeout", "workers", "budget"):
            if (value := getattr(self, name)) <= 0:
                field = f"reward_options.math_answer.{name}"
                raise UserError("must be above 0", field=field, value=value)
        if find_spec("math_verify") is None or find_spec("antlr4") is None:
            raise UserError("math_answer needs math-verify", hint="pip install -e '.[vlm]'")
        self.pool = WorkerPool(
            "flow_grpo.rewards.text.sympy_checker:build_math_checker",
            {"memory_gib": WORKER_MEMORY_GIB},
            workers=self.workers,
            timeout=HARD_TIMEOUT_FACTOR * self.timeout,
            max_deaths=1,
        )

    def __call__(
        self, responses: list[str], questions: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Return the scores, (N,), and `unread`; equal pairs of formulas are checked once."""
        results = super().__call__(responses, questions, metadata)
        pairs = dict.fromkeys(pair for pair in results if isinstance(pair, tuple))
        checked = self._check_pairs(pairs)
        scores = [checked.get(each, each) for each in results]
        return scores, {"unread": [float(isinstance(each, UnparsedResponse)) for each in scores]}

    def skip_reason(self, question: str, metadata: dict) -> str | None:
        return None if _to_text(metadata.get("answer", "")) else "it has no ground truth"

    def invalid_row(self, question: str, metadata: dict) -> str | None:
        """Return why a ground truth is too long to compare, or None."""
        truth = _ground_truth(metadata) if "answer" in metadata else ""
        if len(truth) <= MAX_FINAL_ANSWER_CHARS:
            return None
        return (
            f"its ground truth {truth[:20]!r}... has {len(truth)} characters, more than the "
            f"{MAX_FINAL_ANSWER_CHARS} that math_answer compares; correct or remove the row"
        )

    def score(self, response: str, metadata: dict) -> float | tuple[str, str]:
        """Return the score, or the pair of formulas that a worker has to compare."""
        truth = _ground_truth(metadata)
        if len(response) > MAX_RESPONSE_CHARS:
            return UnparsedResponse()
        final = extract_final_answer(response)
        if final is None and not self.untagged:
            return 0.0
        final = response.strip() if final is None else final
        if len(truth) > MAX_FINAL_ANSWER_CHARS:
            return Failed(self.invalid_row("", metadata))
        if len(final) > MAX_FINAL_ANSWER_CHARS:
            return UnparsedResponse()
        try:
            return compare_without_algebra(final, truth)
        except UnparsableFormula:
            return UnparsedResponse()
        except (ArithmeticError, ValueError) as error:  # fails this row, not the batch
            return Failed(
                f"ground truth {truth[:60]!r} cannot be compared: {describe_error(error)}"
            )

    def _check_pairs(self, pairs: dict[tuple[str, str], None]) -> dict[tuple[str, str], float]:
        """Return the score of each (final answer, ground truth), within the time budget."""
        start = time.monotonic()
        chunk_size = CHECKS_PER_WORKER * self.workers
        max_seconds = MAX_BUDGET_FACTOR * self.budget
        scores: dict[tuple[str, str], float] = {}
        remaining = list(pairs)
        while remaining:
            spent = time.monotonic() - start
            if spent > max_seconds:
                late = Failed(f"not checked: other responses took {max_seconds:g} s")
                return scores | dict.fromkeys(remaining, late)
            limit = self.timeout
            if spent > self.budget:
                equal_share = (max_seconds - spent) * self.workers / len(remaining)
                late_limit = max(MIN_LATE_CHECK_SECONDS, min(MAX_LATE_CHECK_SECONDS, equal_share))
                limit = min(limit, late_limit)
            part, remaining = remaining[:chunk_size], remaining[chunk_size:]
            results = self.pool.map([(*pair, limit) for pair in part])
            for pair, result in zip(part, results, strict=True):
                scores[pair] = self._as_score(pair, result, limit)
        return scores

    def _as_score(self, pair: tuple[str, str], result: Any, limit: float) -> float:
        """Return the score for a worker's result.

        A response that killed its worker is wrong, unless parsing the ground truth alone fails too.

        Args:
            pair: Final answer and ground truth.
            result: What the worker returned, or `Failed`.
            limit: CPU seconds of the check.
        """
        if isinstance(result, WorkerDied):
            [truth_result] = self.pool.map([(None, pair[1], limit)])
            return truth_result if isinstance(truth_result, Failed) else UnparsedResponse()
        if result is None:
            return UnparsedResponse()
        return result if isinstance(result, Failed) else float(result)


def _ground_truth(metadata: dict) -> str:
    """Return the ground truth; GSM8K writes it after "####"."""
    truth = _to_text(metadata["answer"])
    return extract_final_answer(truth) or truth.rpartition("####")[2].strip()


def _to_text(value: Any) -> str:
    """Return a value as text; Python refuses to convert integers beyond 4,300 digits to decimal."""
    huge = isinstance(value, int) and value.bit_length() > 14_000
    return hex(value) if huge else str(value).strip()
