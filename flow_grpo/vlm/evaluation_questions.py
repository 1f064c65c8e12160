"""Load the data sets of an evaluation."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from flow_grpo.config.paths import map_dataset_paths, resolve_path
from flow_grpo.data.columns import parse_column_names
from flow_grpo.data.mixing import interleave, parse_sources, short_source_names, tag_rows
from flow_grpo.data.questions import (
    Question,
    QuestionLayout,
    load_questions,
    load_test_questions,
)
from flow_grpo.errors import UserError
from flow_grpo.vlm.fields import VlmConfig

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class EvaluationSet:
    """A data set of an evaluation."""

    name: str  # short and unique
    source: str  # path or hub name
    questions: list[Question]

    def digest(self) -> str:
        """Return a checksum of the questions with their images and ground truths."""
        content = [(*q.identity, q.answer, q.system) for q in self.questions]
        return hashlib.sha256(json.dumps(content).encode(errors="replace")).hexdigest()


def load_evaluation_sets(
    config: VlmConfig, datasets: Sequence[str], *, limit: int = 0
) -> list[EvaluationSet]:
    """Load the data sets, by default the test set of the config.

    Args:
        config: Checked settings.
        datasets: Values of --dataset: paths or hub names; of each, the test split is used, or all
            questions if it has none.
        limit: Number of questions to use from the start of each of `datasets`; 0 uses all.
            `eval_questions` applies to the test set of the config.
    """
    layout = question_layout(config)
    if not datasets:
        return _own_test_sets(config, layout)
    names = short_source_names(datasets)
    for position, (name, source) in enumerate(zip(names, datasets, strict=True)):
        if name in names[:position]:
            raise UserError("is given twice", field="--dataset", value=source)
    sets = []
    for name, source in zip(names, datasets, strict=True):
        questions = _load_named(resolve_path(source), layout)
        used = questions[: limit or None]
        if len(used) < len(questions):
            logger.info("%s: the first %d of %d questions", name, len(used), len(questions))
        sets.append(EvaluationSet(name, source, used))
    return sets


def _load_named(source: str, layout: QuestionLayout) -> list[Question]:
    try:
        return load_test_questions(source, layout)
    except UserError as error:
        if error.field != "dataset":
            raise
        raise UserError(
            error.rule, field="--dataset", value=error.value, hint=error.hint
        ) from error


def _own_test_sets(config: VlmConfig, layout: QuestionLayout) -> list[EvaluationSet]:
    """Return the test questions of a run with this config, one set per source of a mixture."""
    sources = parse_sources(map_dataset_paths(config.dataset))
    tests = [load_questions(source.path, config.seed, layout)[1] for source in sources]
    if len(sources) > 1:
        tests = [tag_rows(test, source.name) for source, test in zip(sources, tests, strict=True)]
    used = {id(question) for question in interleave(tests)[: config.eval_questions or None]}
    return [
        EvaluationSet(source.name, source.path, [each for each in test if id(each) in used])
        for source, test in zip(sources, tests, strict=True)
    ]


def question_layout(config: VlmConfig) -> QuestionLayout:
    """Return the columns that a config reads."""
    return QuestionLayout(
        text=config.input_key,
        answer=config.answer_key,
        image=config.image_key,
        video=config.video_key,
        metadata=parse_column_names(config.metadata_columns),
    )
