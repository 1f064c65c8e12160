"""Rewards of answers: called like those of pictures, with texts in the pictures' place.

`reward(answers, questions, metadata)`, where the metadata has the truth as "answer". Where an
answer cannot be checked it has no score, and a reason.
"""

import re
import time
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec

from flow_grpo.errors import UserError
from flow_grpo.rewards.answers.maths import (
    BASE,
    LOOSE,
    Unreadable,
    are_words,
    number,
    plain,
    refuse_costly,
    unstyled,
)
from flow_grpo.rewards.answers.units import same_unit
from flow_grpo.rewards.calling.pool import PooledScorer, WorkerPool
from flow_grpo.rewards.failure import Failed, NotAsked
from flow_grpo.rewards.protocol import Returned, Rows, Scorer

MAX_TEXT = 100_000  # characters of an answer that is looked at, and of what it says in the end
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


class Unread(float):
    """A zero that stands where the answer is no formula."""


@dataclass(kw_only=True, eq=False)
class MathAnswer(AnswerScorer, PooledScorer):
    """1 where the final answer equals the truth in the metadata, else 0.

    It stands in answer tags or in a box (\\boxed), or, `untagged`, is the whole answer where there
    are neither. What is no plain number is checked by math-verify in `workers` processes; a check
    that takes longer than `timeout` seconds, or comes after `budget` seconds of others, has none.
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
        limits = {"workers": self.workers, "timeout": self.timeout, "max_deaths": 1}
        self.pool = WorkerPool(factory, {"memory_gib": MEMORY_GIB}, **limits)

    def __call__(self, answers: list[str], questions: list[str], metadata: Rows) -> Returned:
        found = super().__call__(answers, questions, metadata)
        checked = self._checked(dict.fromkeys(pair for pair in found if isinstance(pair, tuple)))
        scores = [checked.get(each, each) for each in found]
        return scores, {"unread": [float(isinstance(each, Unread)) for each in scores]}

    def why_not(self, question: str, metadata: dict) -> str | None:
        return None if str(metadata.get("answer", "")).strip() else "it has no answer to check with"

    def score(self, answer: str, metadata: dict) -> float | tuple[str, str]:
        """Or a pair of formulas that take more to compare."""
        truth = str(metadata["answer"])
        if len(answer) > MAX_TEXT:
            return Failed(f"an answer of {len(answer)} characters is not checked")
        final = final_answer(answer)
        if final is None and not self.untagged:
            return 0.0
        final = answer.strip() if final is None else final
        if len(final) > MAX_FINAL:
            return Failed(f"a final answer of {len(final)} characters is not checked")
        try:
            # GSM8K writes its answers behind a mark
            return quick_check(final, final_answer(truth) or truth.rpartition("####")[2].strip())
        except Unreadable:
            return Unread()

    def _checked(self, pairs: dict[tuple[str, str], None]) -> dict[tuple[str, str], float]:
        start, scores, left = time.monotonic(), {}, list(pairs)
        share = SHARE * self.workers
        while left:
            part, left = left[:share], left[share:]
            for pair, result in zip(part, self.pool.map(part), strict=True):
                told = isinstance(result, bool)
                scores[pair] = float(result) if told else Unread() if result is None else result
            if time.monotonic() - start > self.budget:
                late = Failed(f"not checked: other answers took {self.budget:g} s")
                return scores | dict.fromkeys(left, late)
        return scores


def quick_check(answer: str, truth: str) -> float | tuple[str, str]:
    """1 or 0 where that is known without algebra, else the two formulas.

    Raises `Unreadable` where the answer is no formula, and the truth is one.
    """
    if _squeezed(answer) == _squeezed(truth):  # before units are looked for: 2A is 2 A
        return 1.0
    (answer, unit), (truth, wanted) = plain(answer), plain(truth)
    if _squeezed(answer) == _squeezed(truth):
        return float(same_unit(unit, wanted))
    if not same_unit(unit, wanted) or are_words(truth):
        return 0.0
    if (given := BASE.fullmatch(answer)) or BASE.fullmatch(truth):  # 17 will do for 17_8
        given, asked = given or [0, answer, 0], BASE.fullmatch(truth) or [0, truth, 0]
        return float(given[1] == asked[1] and (given[2] == asked[2] or 0 in (given[2], asked[2])))
    left, right = number(answer), number(truth)
    if left is not None and right is not None:
        percent = ("%" in answer) - ("%" in truth)  # 50 and 0.5 both count as 50%
        loose = LOOSE * abs(right) if "." in answer or "." in truth else 0
        return float(
            abs(left - right) <= loose or (percent and left * Fraction(100) ** percent == right)
        )
    try:
        refuse_costly(truth)
    except Unreadable as error:
        return Failed(f"its truth {truth[:60]!r}: {error}")
    if are_words(answer):
        raise Unreadable("these are words")
    refuse_costly(answer)
    return (answer, truth)


def _squeezed(text: str) -> str:
    """Without spaces, but for those between digits: 1 1/2 is not 11/2."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).casefold()


@dataclass(kw_only=True, eq=False)
class AnswerFormat(AnswerScorer):
    """1 for <think>...</think><answer>...</answer> and nothing else, or, `boxed`, for
    <think>...</think> and a \\boxed answer after it; else 0."""

    name = "answer_format"
    boxed: bool = False

    def score(self, answer: str, metadata: dict) -> float:
        return float(is_well_formed(answer, self.boxed))


class Choice(AnswerScorer):
    """1 where the letter of a multiple choice is right, else 0; questions whose truth is no letter
    do not ask for it."""

    name = "choice"
    _LETTER = re.compile(
        r"(?i:option |choice )?\(?([A-Ja-j])\)?[.:]?|\(?([A-J])[).:,]\s?.*", re.DOTALL
    )
    # I is a letter here, and a word in "the answer is, I think, B"
    _SPOKEN = re.compile(
        r"\b(?i:answer|option|choice)(?i: is)?:?\s*\(?([A-HJ]|I(?!,? [a-z]))\b(?!')"
    )

    def why_not(self, question: str, metadata: dict) -> str | None:
        truth = metadata.get("answer", "")
        return None if self.letter(str(truth)) else f"its answer {truth!r} is none of A to J"

    def letter(self, text: str) -> str | None:
        """In tags or a box, alone or before its text; or as in "the answer is B"."""
        if len(text) > MAX_TEXT:
            return None
        final = final_answer(text)
        said = unstyled(text if final is None else final)
        if match := self._LETTER.fullmatch(said):
            return (match[1] or match[2]).upper()
        spoken = self._SPOKEN.findall(said)
        return spoken[-1] if spoken else None

    def score(self, answer: str, metadata: dict) -> float:
        if self.why_not("", metadata):
            return NotAsked()
        if len(answer) > MAX_TEXT:
            return Failed(f"an answer of {len(answer)} characters is not checked")
        return float(self.letter(answer) == self.letter(str(metadata["answer"])))


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
