"""The base class of rewards for responses, and those that need neither algebra nor a model."""

from dataclasses import dataclass
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed, NotApplicable
from flow_grpo.rewards.protocol import MetadataRows, Scorer, ScorerOutput
from flow_grpo.rewards.text.choices import choice_letters, stated_letters
from flow_grpo.rewards.text.math_parsing import strip_styles
from flow_grpo.rewards.text.response_format import extract_final_answer, has_answer_format

MAX_RESPONSE_CHARS = 100_000  # final answers in longer responses are wrong


class ResponseScorer(Scorer):
    """Base class of rewards that score each response by itself."""

    kind = "answer"
    name: str  # in the registry, for messages

    def __call__(
        self, responses: list[str], questions: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        check_responses(self.name, responses)
        return [self.score(text, row) for text, row in zip(responses, metadata, strict=True)]

    def score(self, response: str, metadata: dict) -> float:
        """Return the score of one response, or `Failed` or `NotApplicable`.

        `metadata` is its dataset row.
        """
        raise NotImplementedError


def check_responses(name: str, responses: list[Any]) -> None:
    """Raise a TypeError if a text reward is called with images."""
    if any(not isinstance(each, str) for each in responses):
        raise TypeError(f"{name!r} scores text responses (scripts/train_vlm.py), not images")


@dataclass(kw_only=True, eq=False)
class AnswerFormat(ResponseScorer):
    """Score 1 if a response has the format of `has_answer_format`, else 0."""

    name = "answer_format"
    boxed: bool = False

    def score(self, response: str, metadata: dict) -> float:
        return float(has_answer_format(response, self.boxed))


class Choice(ResponseScorer):
    """Score 1 for exactly the correct letters (A to J) of a multiple-choice question, else 0.

    If several are correct (`A, C`), all are required, in any order; a hedge (`B or C`) is wrong.
    Questions whose ground truth is not a letter are skipped.
    """

    name = "choice"

    def skip_reason(self, question: str, metadata: dict) -> str | None:
        """Return why a question has no score (its ground truth is no letter), or None."""
        truth = metadata.get("answer", "")
        if self.letters(str(truth)):
            return None
        return f"its ground truth {truth!r} is not a letter from A to J"

    def letters(self, text: str) -> frozenset[str]:
        """Return the chosen letters: in tags or a box, or stated as in "the answer is B"."""
        if len(text) > MAX_RESPONSE_CHARS:
            return frozenset()
        final = extract_final_answer(text)
        if final is None:  # prose, which may begin with a letter
            plain = strip_styles(text)
            return stated_letters(plain) or choice_letters(plain)
        plain = strip_styles(final)
        return choice_letters(plain) or stated_letters(plain)

    def score(self, response: str, metadata: dict) -> float:
        if self.skip_reason("", metadata):
            return NotApplicable()
        return float(self.letters(response) == self.letters(str(metadata["answer"])))


@dataclass(kw_only=True, eq=False)
class Overlong(ResponseScorer):
    """Soft overlong punishment of DAPO (arXiv 2503.14476).

    Score 0 up to `limit - buffer` tokens, then linearly down to -1 at the limit.

    Args:
        buffer: Tokens, or a fraction of the limit if below 1.
        limit: Tokens; None for the maximum response length of the run.
    """

    name = "overlong"
    buffer: float = 0.2
    limit: int | None = None

    def __post_init__(self) -> None:
        """Raise a UserError for a `buffer` or `limit` that is not positive."""
        if self.buffer <= 0:
            raise UserError(
                "must be above 0", field="reward_options.overlong.buffer", value=self.buffer
            )
        if self.limit is not None and self.limit < 1:
            raise UserError(
                "must be at least 1", field="reward_options.overlong.limit", value=self.limit
            )

    def score(self, response: str, metadata: dict) -> float:
        """Return the score of a response with `metadata["answer_tokens"]` tokens, from -1 to 0."""
        limit = self.limit or metadata.get("max_new_tokens")
        tokens = metadata.get("answer_tokens")
        if limit is None or tokens is None:
            return Failed("overlong needs answer_tokens and max_new_tokens in the metadata")
        buffer = min(limit, self.buffer * limit if self.buffer < 1 else self.buffer)
        over = (tokens - (limit - buffer)) / buffer
        return -min(1.0, max(0.0, over))


class EnvironmentReward(ResponseScorer):
    """The return of an episode (docs/vlm/environments.md), or `Failed` if the episode failed."""

    name = "environment"

    def score(self, response: str, metadata: dict) -> float:
        episode = metadata.get("environment", {"failure": "no episode was played"})
        return Failed(episode["failure"]) if "failure" in episode else float(episode["reward"])
