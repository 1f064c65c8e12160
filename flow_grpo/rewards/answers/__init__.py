"""Rewards of answers: called like those of pictures, with texts in the pictures' place.

`reward(answers, questions, metadata)`, where the metadata has the truth as "answer". Where an
answer cannot be checked it has no score, and a reason.
"""

import re
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.answers.equality import quick_check
from flow_grpo.rewards.answers.maths import Unreadable, unstyled
from flow_grpo.rewards.answers.statements import choice_letters, spoken_letters
from flow_grpo.rewards.calling.pool import LostWorker, PooledScorer, WorkerPool
from flow_grpo.rewards.failure import Failed, NotAsked, describe
from flow_grpo.rewards.protocol import Returned, Rows, Scorer

MAX_TEXT = 100_000  # characters of a response; a longer one is wrong, as is a longer final answer
MAX_FINAL = 2_000
_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def final_answer(text: str) -> str | None:
    """In the last answer tags, or in the last box, or in the box in the tags; None without."""
    tagged = _tagged(text)
    boxed = _boxed(text if tagged is None else tagged)
    found = tagged if boxed is None else boxed
    return None if found is None else found.strip()


def _tagged(text: str) -> str | None:
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    depth = 1
    for place in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[-1] : place]
    return None  # cut off


def is_well_formed(text: str, boxed: bool = False) -> bool:
    """<think>...</think><answer>...</answer> and nothing else; or, `boxed`, a box after the
    thinking."""
    text = text.strip()
    if not text.startswith("<think>") or any(text.count(tag) != 1 for tag in _tags(boxed)):
        return False
    _, _, said = text.partition("</think>")
    if boxed:
        return bool(_boxed(said))
    said = said.strip()
    inner = said[len(_OPEN) : -len(_CLOSE)]
    return said.startswith(_OPEN) and said.endswith(_CLOSE) and bool(inner.strip())


def _tags(boxed: bool) -> tuple[str, ...]:
    return ("<think>", "</think>") if boxed else ("<think>", "</think>", _OPEN, _CLOSE)


class AnswerScorer(Scorer):
    """Scores one answer after the other."""

    kind = "answer"
    name: str  # in the registry, for messages

    def __call__(self, answers: list[str], questions: list[str], metadata: Rows) -> Returned:
        if any(not isinstance(answer, str) for answer in answers):
            raise TypeError(f"{self.name!r} scores answers (scripts/train_vlm.py), not pictures")
        return [self.score(answer, own) for answer, own in zip(answers, metadata, strict=True)]

    def score(self, answer: str, metadata: dict) -> float:
        raise NotImplementedError


MEMORY_GIB = 2.0  # address space of a worker
SHARE = 4  # checks per worker between two looks at the clock
SHORT = 0.25, 0.02  # most and least CPU seconds of a check once the budget is used up
MAX_BUDGETS = 3.0  # budgets after which nothing is checked any more
HARD_LIMIT = 3.0  # times `timeout`, by the clock: then a worker that ignores its limit is killed


class Unread(float):
    """A zero that stands where the answer is no formula."""


@dataclass(kw_only=True, eq=False)
class MathAnswer(AnswerScorer, PooledScorer):
    """1 where the final answer equals the truth in the metadata, else 0.

    It stands in answer tags or in a box (\\boxed), or, `untagged`, is the whole answer where there
    are neither. Anything but a plain number is checked by math-verify in `workers` processes. A
    response whose check takes more than `timeout` seconds of CPU time is wrong; once the checks of
    a batch have taken `budget` seconds, each gets at most a quarter of a second. There is no score
    if the ground truth itself cannot be read in time, or after three budgets.
    Logs as `unread` the share of answers that are no formula.
    """

    name = "math_answer"

    timeout: float = 5.0
    workers: int = 1
    budget: float = 60.0
    untagged: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout", "workers", "budget"):
            if (value := getattr(self, name)) <= 0:
                raise UserError(f"math_answer's {name} is {value}: it must be more than 0")
        if find_spec("math_verify") is None or find_spec("antlr4") is None:
            raise UserError("math_answer needs math-verify: pip install -e '.[vlm]'")
        factory = "flow_grpo.rewards.answers.checker:math_checker"
        limits = {"workers": self.workers, "timeout": HARD_LIMIT * self.timeout, "max_deaths": 1}
        self.pool = WorkerPool(factory, {"memory_gib": MEMORY_GIB}, **limits)

    def __call__(self, answers: list[str], questions: list[str], metadata: Rows) -> Returned:
        found = super().__call__(answers, questions, metadata)
        checked = self._checked(dict.fromkeys(pair for pair in found if isinstance(pair, tuple)))
        scores = [checked.get(each, each) for each in found]
        return scores, {"unread": [float(isinstance(each, Unread)) for each in scores]}

    def why_not(self, question: str, metadata: dict) -> str | None:
        return None if _text(metadata.get("answer", "")) else "it has no answer to check with"

    def invalid_row(self, question: str, metadata: dict) -> str | None:
        truth = _ground_truth(metadata) if "answer" in metadata else ""
        if len(truth) <= MAX_FINAL:
            return None
        return (
            f"its ground truth {truth[:20]!r}... has {len(truth)} characters, more than the "
            f"{MAX_FINAL} that math_answer compares; correct or remove the row"
        )

    def score(self, answer: str, metadata: dict) -> float | tuple[str, str]:
        """Or a pair of formulas that take more to compare."""
        truth = _ground_truth(metadata)
        if len(answer) > MAX_TEXT:
            return Unread()
        final = final_answer(answer)
        if final is None and not self.untagged:
            return 0.0
        final = answer.strip() if final is None else final
        if len(truth) > MAX_FINAL:
            return Failed(self.invalid_row("", metadata))
        if len(final) > MAX_FINAL:
            return Unread()
        try:
            return quick_check(final, truth)
        except Unreadable:
            return Unread()
        except (ArithmeticError, ValueError) as error:  # of this row, not of the whole batch
            return Failed(f"ground truth {truth[:60]!r} cannot be compared: {describe(error)}")

    def _checked(self, pairs: dict[tuple[str, str], None]) -> dict[tuple[str, str], float]:
        start, scores, left = time.monotonic(), {}, list(pairs)
        share, most = SHARE * self.workers, MAX_BUDGETS * self.budget
        while left:
            spent = time.monotonic() - start
            if spent > most:
                late = Failed(f"not checked: other answers took {most:g} s")
                return scores | dict.fromkeys(left, late)
            limit = self.timeout
            if spent > self.budget:
                fair = (most - spent) * self.workers / len(left)
                limit = min(limit, max(min(SHORT), min(max(SHORT), fair)))
            part, left = left[:share], left[share:]
            results = self.pool.map([(*pair, limit) for pair in part])
            for pair, result in zip(part, results, strict=True):
                scores[pair] = self._as_score(pair, result, limit)
        return scores

    def _as_score(self, pair: tuple[str, str], result: Any, limit: float) -> float:
        """Score a result; a response that killed its worker is wrong, unless the truth did it."""
        if isinstance(result, LostWorker):
            [alone] = self.pool.map([(None, pair[1], limit)])
            return alone if isinstance(alone, Failed) else Unread()
        if result is None:
            return Unread()
        return result if isinstance(result, Failed) else float(result)


def _ground_truth(metadata: dict) -> str:
    """Return the ground truth; GSM8K writes it after "####"."""
    truth = _text(metadata["answer"])
    return final_answer(truth) or truth.rpartition("####")[2].strip()


def _text(value: Any) -> str:
    """Return a value as text; Python converts no integer of more than 4,300 digits to decimal."""
    huge = isinstance(value, int) and value.bit_length() > 14_000
    return hex(value) if huge else str(value).strip()


@dataclass(kw_only=True, eq=False)
class AnswerFormat(AnswerScorer):
    """1 for <think>...</think><answer>...</answer> and nothing else, or, `boxed`, for
    <think>...</think> and a \\boxed answer after it; else 0."""

    name = "answer_format"
    boxed: bool = False

    def score(self, answer: str, metadata: dict) -> float:
        return float(is_well_formed(answer, self.boxed))


class Choice(AnswerScorer):
    """1 for exactly the correct letters of a multiple-choice question, A to J, else 0.

    If several are correct (`A, C`), all are needed, in any order; a hedge (`B or C`) is wrong. The
    reward is not used for questions whose ground truth is not a letter.
    """

    name = "choice"

    def why_not(self, question: str, metadata: dict) -> str | None:
        truth = metadata.get("answer", "")
        return None if self.letters(str(truth)) else f"its answer {truth!r} is none of A to J"

    def letters(self, text: str) -> frozenset[str]:
        """In tags or a box, alone or before their text; or as in "the answer is B"."""
        if len(text) > MAX_TEXT:
            return frozenset()
        final = final_answer(text)
        if final is None:  # prose, which may begin with a letter
            said = unstyled(text)
            return spoken_letters(said) or choice_letters(said)
        said = unstyled(final)
        return choice_letters(said) or spoken_letters(said)

    def score(self, answer: str, metadata: dict) -> float:
        if self.why_not("", metadata):
            return NotAsked()
        return float(self.letters(answer) == self.letters(str(metadata["answer"])))


@dataclass(kw_only=True, eq=False)
class Overlong(AnswerScorer):
    """0 up to `limit` less `buffer` tokens, then down to -1 at the limit (DAPO's soft punishment).

    `limit`: by default what an answer may have at most; a `buffer` below 1 is a share of it.
    """

    name = "overlong"
    buffer: float = 0.2
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.buffer <= 0 or (self.limit is not None and self.limit < 1):
            raise UserError(
                f"overlong: buffer={self.buffer} and limit={self.limit} must be more than 0"
            )

    def score(self, answer: str, metadata: dict) -> float:
        limit = self.limit or metadata.get("max_new_tokens")
        tokens = metadata.get("answer_tokens")
        if limit is None or tokens is None:
            return Failed("overlong needs answer_tokens and max_new_tokens in the metadata")
        buffer = min(limit, self.buffer * limit if self.buffer < 1 else self.buffer)
        over = (tokens - (limit - buffer)) / buffer
        return -min(1.0, max(0.0, over))


class EnvironmentReward(AnswerScorer):
    """The sum of what an environment gave in an episode (docs/vlm.md); none where it failed."""

    name = "environment"

    def score(self, answer: str, metadata: dict) -> float:
        played = metadata.get("environment", {"failure": "no episode was played"})
        return Failed(played["failure"]) if "failure" in played else float(played["reward"])
