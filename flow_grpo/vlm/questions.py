"""Load the training and test questions of a run from its config."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from flow_grpo.data.columns import parse_column_names
from flow_grpo.data.eval_dataset import load_eval_dataset, name_eval_settings, parse_eval_sources
from flow_grpo.data.mixing import (
    PromptSource,
    allocate_groups,
    check_groups,
    interleave,
    parse_sources,
    tag_rows,
)
from flow_grpo.data.questions import (
    Question,
    QuestionLayout,
    check_media_columns,
    find_split,
    first_rows,
    load_questions,
    load_split,
)
from flow_grpo.data.responses import GivenResponse, ResponseLayout, load_responses
from flow_grpo.errors import UserError
from flow_grpo.rewards.drawn_names import drawn_names
from flow_grpo.vlm.fields import VlmConfig
from flow_grpo.vlm.losses import GIVEN_LOSSES
from flow_grpo.vlm.plan import VlmBatchPlan

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class QuestionSets:
    """The questions of one or several datasets."""

    plan: VlmBatchPlan
    sources: list[PromptSource]
    parts: list[list[Question]]  # training questions per source
    test: list[Question]

    def __post_init__(self) -> None:
        """Raise a UserError for a dataset with fewer questions than an epoch draws from it."""
        if len(self.sources) == 1:
            self.plan.check_num_questions(len(self.parts[0]), self.sources[0].path)
            return
        for source, part, groups in zip(self.sources, self.parts, self.groups, strict=True):
            check_groups(
                source,
                len(part),
                groups,
                self.plan.questions,
                "questions",
                setting="sample.questions_per_epoch",
            )

    @property
    def train(self) -> list[Question]:
        """Return the training questions of all sources, concatenated."""
        return [question for part in self.parts for question in part]

    @property
    def groups(self) -> list[int]:
        """Return the number of questions per epoch of each source."""
        return allocate_groups(self.plan.questions, [source.share for source in self.sources])

    @property
    def sets(self) -> list[tuple[int, Fraction]]:
        """Return each source's number of questions and its fraction of an epoch."""
        return [(len(part), s.share) for part, s in zip(self.parts, self.sources, strict=True)]

    def log_sizes(self) -> None:
        if len(self.sources) > 1:
            for source, count in zip(self.sources, self.groups, strict=True):
                logger.info("%-21s %d of %d questions", source.name, count, self.plan.questions)

    def drop_overlong(
        self, length: Callable[[Question], int], limit: int
    ) -> tuple["QuestionSets", int]:
        """Drop questions whose prompts have more than `limit` tokens and log how many.

        Args:
            length: Returns the prompt length of a question.
            limit: Maximum prompt length.

        Returns:
            The remaining questions and the length of their longest prompt.
        """
        lengths = []

        def fits(question: Question) -> bool:
            lengths.append(length(question))
            return lengths[-1] <= limit

        parts = [list(filter(fits, part)) for part in self.parts]
        test = list(filter(fits, self.test))
        dropped_train = len(self.train) - sum(map(len, parts))
        dropped_test = len(self.test) - len(test)
        if dropped_train or dropped_test:
            logger.info(
                "dropped %d of %d training and %d of %d test questions with prompts of more than "
                "%d tokens (max_prompt_length)",
                dropped_train,
                len(self.train),
                dropped_test,
                len(self.test),
                limit,
            )
        if not test:
            raise UserError(
                f"is exceeded by the prompts of all {dropped_test} test questions",
                field="max_prompt_length",
                value=limit,
                hint="raise --config.max_prompt_length",
            )
        longest = max(length for length in lengths if length <= limit)
        return replace(self, parts=parts, test=test), longest


def build_questions(
    config: VlmConfig,
    plan: VlmBatchPlan,
    change_layout: Callable[[QuestionLayout], QuestionLayout] = lambda layout: layout,
) -> QuestionSets:
    """Load the questions of all configured datasets.

    Args:
        config: The settings.
        plan: The batch arithmetic.
        change_layout: Returns the layout to read instead of that of questions.
    """
    sources = parse_sources(config.dataset)
    layout = change_layout(question_layout(config))
    if config.train.loss in GIVEN_LOSSES:
        pairs = [_load_given(config, source.path) for source in sources]
    else:
        hold_out = not config.eval_dataset
        pairs = [load_questions(s.path, config.seed, layout, hold_out=hold_out) for s in sources]
        pairs = [
            (first_rows(train, config.max_samples, source.path), test)
            for source, (train, test) in zip(sources, pairs, strict=True)
        ]
    trained = [question for train, _ in pairs for question in train]
    check_media_columns(trained, layout)
    if len(sources) > 1:
        pairs = [
            (tag_rows(train, source.name), tag_rows(test, source.name))
            for source, (train, test) in zip(sources, pairs, strict=True)
        ]
    if config.eval_dataset:
        eval_layout = change_layout(eval_question_layout(config))
        test = load_eval_questions(config.eval_dataset, eval_layout, trained)
    else:
        test = interleave(test for _, test in pairs)
    test = test[: config.eval_questions or None]
    return QuestionSets(plan, sources, [train for train, _ in pairs], test)


def _load_given(config: VlmConfig, source: str) -> tuple[list[GivenResponse], list[Question]]:
    """Load given responses, and the test questions next to them unless `eval_dataset` is set."""
    layout = question_layout(config)
    given = ResponseLayout(
        **vars(layout),
        response=config.response_key,
        kind=GIVEN_LOSSES[config.train.loss],
        all_turns=config.response_turns == "all",
    )
    train = load_responses(source, given, config.max_samples)
    return train, [] if config.eval_dataset else _load_test_split(source, layout)


def _load_test_split(source: str, layout: QuestionLayout) -> list[Question]:
    """Load the test questions next to given responses; they need no responses themselves."""
    test = find_split(source, "test", layout)
    if test is None:
        raise UserError(
            "has no test questions to evaluate on",
            field="dataset",
            value=source,
            hint="set --config.eval_dataset to questions that the rewards can score",
        )
    return test


def build_test_questions(config: VlmConfig) -> tuple[list[PromptSource], list[Question]]:
    """Load the questions that a run with this config evaluates, and return their sources too."""
    if config.eval_dataset:
        sources = parse_eval_sources(config.eval_dataset)
        test = load_eval_questions(config.eval_dataset, eval_question_layout(config))
    else:
        sources, layout = parse_sources(config.dataset), question_layout(config)
        tests = [
            _load_test_split(source.path, layout)
            if config.train.loss in GIVEN_LOSSES
            else load_questions(source.path, config.seed, layout)[1]
            for source in sources
        ]
        if len(sources) > 1:
            named = zip(sources, tests, strict=True)
            tests = [tag_rows(test, source.name) for source, test in named]
        test = interleave(tests)
    return sources, test[: config.eval_questions or None]


def load_eval_questions(
    dataset: str, layout: QuestionLayout, train: Sequence[Question] = ()
) -> list[Question]:
    """Load the questions of an `eval_dataset`; warn if some are among the training questions.

    Raises:
        UserError: Also if a media column that the config names is empty.
    """
    find = partial(find_split, layout=layout)
    load = partial(load_split, layout=layout)
    test = load_eval_dataset(dataset, train, find, load, "questions")
    with name_eval_settings():
        check_media_columns(test, layout)
    return test


def question_layout(config: VlmConfig) -> QuestionLayout:
    """Return the layout of the training questions with the columns that a config names."""
    return QuestionLayout(
        text=config.input_key,
        answer=config.answer_key,
        image=config.image_key,
        video=config.video_key,
        image_dir=config.image_dir,
        image_cache=config.image_cache,
        metadata=(*parse_column_names(config.metadata_columns), *_target_columns(config)),
    )


def _target_columns(config: VlmConfig) -> list[str]:
    """Return the columns with the prompts that drawn images are scored against."""
    options = (config.reward_options.get(name, {}) for name in drawn_names(config.reward_options))
    keys = [config.draw.prompt_key, *(each.get("prompt_key", "") for each in options)]
    return [key for key in keys if key]


def eval_question_layout(config: VlmConfig) -> QuestionLayout:
    """Return the layout of `eval_dataset`, by default that of the training questions."""
    own = {
        "text": config.eval_input_key,
        "answer": config.eval_answer_key,
        "image": config.eval_image_key,
        "video": config.eval_video_key,
    }
    return replace(question_layout(config), **{k: v for k, v in own.items() if v is not None})
