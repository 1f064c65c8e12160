"""The questions of a run, from its config; what a user may not expect is told in a line."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from flow_grpo.answer.fields import AnswerFields
from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.data.columns import parse_names
from flow_grpo.data.mixing import PromptSource, check_groups, in_turn, parse_sources, share_out
from flow_grpo.data.questions import Keys, Question, check_keys, load_questions
from flow_grpo.errors import UserError

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class QuestionSets:
    plan: AnswerPlan
    sources: list[PromptSource]
    parts: list[list[Question]]  # to train on, of each source
    test: list[Question]

    def __post_init__(self) -> None:
        if len(self.sources) == 1:
            self.plan.check_questions(len(self.parts[0]), self.sources[0].path)
            return
        for source, part, groups in zip(self.sources, self.parts, self.groups, strict=True):
            check_groups(
                *(source, len(part), groups, self.plan.questions, "questions"),
                setting="sample.questions_per_epoch",
            )

    @property
    def train(self) -> list[Question]:
        """Those of all sources, one after the other."""
        return [question for part in self.parts for question in part]

    @property
    def groups(self) -> list[int]:
        """Questions of an epoch, of each source."""
        return share_out(self.plan.questions, [source.share for source in self.sources])

    @property
    def sets(self) -> list[tuple[int, Fraction]]:
        """How many questions each source has, and its share of those of an epoch."""
        return [(len(part), s.share) for part, s in zip(self.parts, self.sources, strict=True)]

    def tell(self) -> None:
        if len(self.sources) > 1:
            for source, count in zip(self.sources, self.groups, strict=True):
                logger.info("%-21s %d of %d questions", source.name, count, self.plan.questions)

    def without_long(
        self, length: Callable[[Question], int], most: int
    ) -> tuple["QuestionSets", int]:
        """Those whose prompts have at most so many tokens, and the most that one of these has; a
        line tells how many have more."""
        lengths = []

        def fits(question: Question) -> bool:
            lengths.append(length(question))
            return lengths[-1] <= most

        parts, test = [[*filter(fits, part)] for part in self.parts], [*filter(fits, self.test)]
        left = sum(map(len, parts)), len(test)
        lost = len(self.train) - left[0], len(self.test) - left[1]
        if any(lost):
            logger.info(
                "left out: %d of %d questions to train on and %d of %d to test on have prompts of "
                "more than %d tokens (max_prompt_length)",
                *(lost[0], left[0] + lost[0], lost[1], left[1] + lost[1], most),
            )
        if not test:
            raise UserError(
                f"none of the {lost[1]} test questions has a prompt of at most {most} tokens; "
                "raise --config.max_prompt_length"
            )
        longest = max(own for own in lengths if own <= most)
        return replace(self, parts=parts, test=test), longest


def build_questions(config: AnswerFields, plan: AnswerPlan) -> QuestionSets:
    sources = parse_sources(config.dataset)
    keys = Keys(
        config.input_key,
        config.answer_key,
        config.image_key,
        config.video_key,
        parse_names(config.metadata_columns),
    )
    pairs = [_load(config.seed, source, keys, named=len(sources) > 1) for source in sources]
    check_keys([question for train, _ in pairs for question in train], keys)
    test = in_turn(test for _, test in pairs)[: config.eval_questions or None]
    return QuestionSets(plan, sources, [train for train, _ in pairs], test)


def _load(
    seed: int, source: PromptSource, keys: Keys, *, named: bool
) -> tuple[list[Question], list[Question]]:
    train, test = load_questions(source.path, seed, keys)
    return (_named(train, source), _named(test, source)) if named else (train, test)


def _named(questions: list[Question], source: PromptSource) -> list[Question]:
    return [replace(q, metadata={**q.metadata, "dataset": source.name}) for q in questions]
