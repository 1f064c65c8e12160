"""Load the datasets of an evaluation."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flow_grpo.config.paths import map_dataset_paths
from flow_grpo.data.eval_dataset import parse_eval_sources
from flow_grpo.data.mixing import PromptSource, short_source_names
from flow_grpo.data.questions import Question, QuestionLayout
from flow_grpo.errors import UserError
from flow_grpo.vlm.questions import load_eval_questions

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class EvaluationSet:
    """A dataset of an evaluation."""

    name: str  # short and unique
    source: str  # path or hub name
    questions: list[Question]

    def digest(self) -> str:
        """Return a checksum of the questions with their images and ground truths."""
        content = [(*q.identity, q.answer, q.system) for q in self.questions]
        return hashlib.sha256(json.dumps(content).encode(errors="replace")).hexdigest()


def load_evaluation_sets(
    datasets: Sequence[str], layout: QuestionLayout, *, limit: int = 0
) -> list[EvaluationSet]:
    """Load the datasets of --dataset, with a set for each source.

    Args:
        datasets: Values of --dataset, like those of `eval_dataset`.
        layout: Layout of the datasets.
        limit: Number of questions to use from the start of each dataset; 0 uses all.
    """
    with _name_option():
        sources = [source for each in datasets for source in _parse_option(each)]
        paths = [source.path.rstrip("/") or "/" for source in sources]
        for position, path in enumerate(paths):
            if path in paths[:position]:
                raise UserError("is given twice", field="--dataset", value=path)
        sets = []
        for name, path in zip(short_source_names(paths), paths, strict=True):
            questions = load_eval_questions(path, layout)
            used = questions[: limit or None]
            if len(used) < len(questions):
                logger.info("%s: the first %d of %d questions", name, len(used), len(questions))
            sets.append(EvaluationSet(name, path, used))
    return sets


@contextmanager
def _name_option() -> Iterator[None]:
    """Make errors about a dataset name --dataset, not the setting."""
    try:
        yield
    except UserError as error:
        if error.field not in ("dataset", "eval_dataset"):
            raise
        raise UserError(
            error.rule, field="--dataset", value=error.value, hint=error.hint
        ) from error


def _parse_option(value: str) -> list[PromptSource]:
    """Parse a value of --dataset, of which all questions are used."""
    if not value.strip():
        raise UserError("is empty", field="--dataset", value=value, hint="pass a path or hub name")
    sources = parse_eval_sources(map_dataset_paths(value))
    if any(source.share != 1 for source in sources):
        raise UserError(
            "has a share, but all questions are evaluated",
            field="--dataset",
            value=value,
            hint="omit the share; --config.eval_questions limits the questions",
        )
    return sources


def split_sources(
    sources: Sequence[PromptSource], questions: list[Question]
) -> list[EvaluationSet]:
    """Return a set per source of a test set; tagged questions name it in their metadata."""
    if len(sources) == 1:
        return [EvaluationSet(sources[0].name, sources[0].path, questions)]
    parts = {
        source: [q for q in questions if q.metadata["dataset"] == source.name] for source in sources
    }
    return [EvaluationSet(s.name, s.path, part) for s, part in parts.items() if part]
