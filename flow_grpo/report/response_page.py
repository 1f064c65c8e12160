"""Render an evaluation of responses as one self-contained HTML page."""

import html
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.report.page import content_security_policy, fill_template, to_compact_json, truncate

SCRIPTS = ("dom.js", "responses.js")
MAX_QUESTIONS = 200  # per dataset
MAX_RESPONSES = 8  # per question and candidate
MAX_IMAGE_BYTES = 10_000_000


@dataclass(frozen=True)
class ShownQuestion:
    """A question of the page with the responses of all candidates."""

    prompt: str
    truth: str
    images: list[str]  # data URIs
    responses: list[list[dict[str, Any]]]  # by candidate: answer, scores and correct


@dataclass(frozen=True)
class ShownDataset:
    """A dataset of the page."""

    name: str
    count: int  # number of questions, of which `questions` are the first
    table: list[list[str]]  # header and a row per candidate
    columns: list[str]  # of the chart
    values: list[list[dict[str, float | None]]]  # mean, low and high by candidate and column
    questions: list[ShownQuestion]

    def to_json(self) -> dict[str, Any]:
        """Return the data that the script of the page draws; long texts are truncated."""
        header, *rows = self.table
        return {
            "name": self.name,
            "of": self.count,
            "table": {"header": header, "rows": rows},
            "chart": {"columns": self.columns, "values": self.values},
            "questions": [
                {
                    "prompt": truncate(each.prompt),
                    "truth": truncate(each.truth),
                    "images": each.images,
                    "responses": [
                        [{**r, "answer": truncate(r["answer"])} for r in own[:MAX_RESPONSES]]
                        for own in each.responses
                    ],
                }
                for each in self.questions
            ],
        }


def write_response_page(
    path: Path,
    *,
    title: str,
    model: str,
    sampling: str,
    correct: str,
    note: str,
    candidates: list[str],
    rewards: list[str],
    datasets: list[ShownDataset],
) -> None:
    """Write the page.

    Args:
        path: The file.
        title: Heading of the page.
        model: The base model.
        sampling: How responses were generated.
        correct: Which responses are marked as correct.
        note: What the intervals are.
        candidates: Names of the candidates.
        rewards: Scores to show below a response.
        datasets: The datasets.
    """
    shown = [each.to_json() for each in datasets]
    for each in shown:
        each["chart"]["candidates"] = candidates
    data = {
        "title": title,
        "model": model,
        "sampling": sampling,
        "correct": correct,
        "note": note,
        "candidates": candidates,
        "rewards": rewards,
        "datasets": shown,
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }
    here = files("flow_grpo.report")
    style = "\n".join((here / name).read_text("utf-8") for name in ("page.css", "responses.css"))
    script = "\n".join((here / "scripts" / name).read_text("utf-8") for name in SCRIPTS)
    content = {
        "POLICY": content_security_policy(style, script, live=False),
        "TITLE": html.escape(title),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": to_compact_json(data).replace("<", "\\u003c"),  # no tag can end the script block
    }
    page = fill_template("responses.html", content)
    # names of directories may be invalid UTF-8
    write_text_atomic(path, page.encode(errors="replace").decode())
