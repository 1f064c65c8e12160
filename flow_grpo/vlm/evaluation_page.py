"""The report page of an evaluation of responses."""

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.data.questions import Question
from flow_grpo.data.videos import read_frames, select_frames
from flow_grpo.images import read_image
from flow_grpo.report.console import displayed_rewards
from flow_grpo.report.response_page import (
    MAX_IMAGE_BYTES,
    MAX_QUESTIONS,
    ShownDataset,
    ShownQuestion,
    write_response_page,
)
from flow_grpo.rewards import TOTAL
from flow_grpo.vlm.evaluation_questions import EvaluationSet
from flow_grpo.vlm.evaluation_results import EvaluationResults

PAGE_FILE = "report.html"
MAX_SIDE = 224  # pixels of a thumbnail
MAX_FRAMES = 4  # per video


def write_page(results: EvaluationResults, out: Path) -> None:
    """Write report.html with a table and a chart per dataset, and the first responses."""
    names = results.candidates
    budget = MAX_IMAGE_BYTES / len(results.sets)
    title = names[0] if len(names) == 1 else f"{names[0]} against {', '.join(names[1:])}"
    write_response_page(
        out / PAGE_FILE,
        title=f"Evaluation of {title}",
        model=str(results.settings["model"]),
        sampling=results.sampling.describe(),
        correct=str(results.correctness),
        note=results.note(),
        candidates=list(names),
        rewards=displayed_rewards([*results.rewards, TOTAL]),
        datasets=[_shown_dataset(results, each, budget) for each in results.sets],
    )


def _shown_dataset(results: EvaluationResults, each: EvaluationSet, budget: float) -> ShownDataset:
    """Collect the table, chart, questions and responses that the page shows of a dataset."""
    table, columns = results.tables[each.name], results.shown_columns()
    cells = {entry["name"]: entry["scores"] for entry in table.to_json()}
    questions, images = [], _Thumbnails(budget)
    for row, question in enumerate(each.questions[:MAX_QUESTIONS]):
        responses = [
            [results.sample_row(candidate, each, row, n) for n in range(results.sampling.n)]
            for candidate in results.candidates
        ]
        shown = [[_shown_response(r) for r in own] for own in responses]
        questions.append(
            ShownQuestion(question.text, str(question.answer), images.of(question), shown)
        )
    return ShownDataset(
        each.name,
        len(each.questions),
        table.format_rows(columns),
        columns,
        [
            [{key: cells[name][c][key] for key in ("mean", "low", "high")} for c in columns]
            for name in results.candidates
        ],
        questions,
    )


def _shown_response(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("answer", "scores", "correct")}


class _Thumbnails:
    """Encodes images of questions until their budget is spent; each distinct question once."""

    def __init__(self, budget: float) -> None:
        self.left = budget

    def of(self, question: Question) -> list[str]:
        """Return the images and some video frames of a question as data URIs.

        Their size is subtracted from the budget; the list is empty once it is spent.
        """
        if self.left <= 0:
            return []
        images = [read_image(source, question.where) for source in question.images]
        for video in question.videos:
            frames = select_frames(video, question.where, rate=0, max_frames=MAX_FRAMES)
            images += read_frames(video, frames, question.where)
        encoded = [_encode(image) for image in images]
        self.left -= sum(map(len, encoded))
        return encoded


def _encode(image: Image.Image) -> str:
    small, buffer = image.convert("RGB"), io.BytesIO()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    small.save(buffer, "WEBP", quality=75)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
