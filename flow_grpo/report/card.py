"""Compose the README.md of a published model: a YAML header for the hub, then sections."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCardData

from flow_grpo.report.comparison import SamplePairs
from flow_grpo.report.console import displayed_rewards, markdown_table
from flow_grpo.report.grid import format_score
from flow_grpo.report.redaction import redact_text
from flow_grpo.report.run_reader import Record
from flow_grpo.rewards import TOTAL

MAX_TEXT = 1500  # characters of a response in the card
Section = tuple[str, str]  # heading and Markdown; a section without text is left out


@dataclass(frozen=True)
class HubMetadata:
    """Header of a model card, which the hub reads; unknown values are None."""

    base_model: str | None
    relation: str  # "adapter" or "finetune"
    license: Mapping[str, str]  # license, license_name, license_link as the hub names them
    library: str
    task: str | None  # "text-to-image", as the hub names it
    tags: Sequence[str]
    datasets: Sequence[str] = ()

    def to_yaml(self) -> str:
        """Return the header without its delimiters."""
        relation = {"base_model_relation": self.relation} if self.base_model else {}
        data = ModelCardData(
            base_model=self.base_model,
            library_name=self.library,
            pipeline_tag=self.task,
            tags=list(self.tags),
            datasets=list(self.datasets) or None,
            **relation,
            **self.license,
        )
        return data.to_yaml(line_break="\n")


def render_card(title: str, metadata: HubMetadata, summary: str, sections: list[Section]) -> str:
    """Return the text of README.md."""
    parts = [f"---\n{metadata.to_yaml()}\n---\n", f"# {title}", summary]
    parts += [f"## {heading}\n\n{text.strip()}" for heading, text in sections if text.strip()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def code_block(text: str, language: str = "") -> str:
    """Return a fenced block that the text cannot close."""
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def code(value: Any) -> str:
    """Return a value as inline code, also inside a table."""
    text = str(value).replace("\n", "\\n").replace("|", "\\|")
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}" if text else "empty"


def results_table(rows: Sequence[Record], rewards: Iterable[str], epoch: int) -> str:
    """Return the evaluation rewards of the first and the published epoch; "" without any."""
    total = f"eval/{TOTAL}"
    evaluated = [row for row in rows if row["epoch"] <= epoch and row.get(total) is not None]
    chosen = evaluated[:1] + evaluated[1:][-1:]
    if not chosen:
        return ""
    heads = ["before training" if r["epoch"] == 0 else f"epoch {r['epoch']}" for r in chosen]
    table = [["reward", *heads]]
    for name in displayed_rewards(rewards):
        values = [row.get(f"eval/{name}") for row in chosen]
        table.append([code(name), *map(_format_result, values)])
    return markdown_table(table)


def _format_result(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def response_examples(pairs: SamplePairs, images: Mapping[int, str], count: int) -> str:
    """Return questions with the responses before and after, as Markdown.

    Args:
        pairs: Samples of a VLM run.
        images: Image file in the card by the index of its question.
        count: Number of questions.
    """
    blocks = []
    for index, (before, after) in enumerate(zip(pairs.before, pairs.after, strict=True)):
        if index == count:
            break
        lines = [f"**Question {index + 1}**"]
        if index in images:
            lines.append(f"![image of question {index + 1}]({images[index]})")
        lines.append(code_block(_shorten(before.prompt)))
        if after.truth is not None:
            lines.append(f"Reference answer: {code(redact_text(after.truth))}")
        for heading, record in zip(pairs.headings, (before, after), strict=True):
            scores = [
                f"{name} {format_score(record.scores[name])}"
                for name in displayed_rewards(record.scores)
            ]
            lines.append(f"{heading.capitalize()} ({', '.join(scores)}):")
            lines.append(code_block(_shorten(record.answer or "")))
        blocks.append("\n\n".join(lines))
    return "\n\n".join(blocks)


def _shorten(text: str) -> str:
    text = redact_text(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
