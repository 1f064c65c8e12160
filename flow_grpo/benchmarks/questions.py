"""Questions of benchmarks: convert the rows of the authors' files to `Question`.

Options of the prompt source (`PromptSource.options`) name the columns:

- `text`, `answer`, `image`: the question, the ground truth, and its image or images.
- `choices`: the options of a multiple-choice question. They are lettered and appended to the text,
  and a ground truth that repeats one of them becomes its letter.
- `images`: the archive with the images on the hub, "OWNER/NAME FILE", unpacked next to the file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from flow_grpo.benchmarks.protocol import PromptSource
from flow_grpo.benchmarks.sources import PromptFiles
from flow_grpo.data.chats import IMAGE_PLACEHOLDER
from flow_grpo.data.columns import ColumnRules
from flow_grpo.data.images import find_image
from flow_grpo.data.questions import QUESTION_SUFFIXES, Question
from flow_grpo.data.rows import READERS, Row, RowLayout, to_jsonable
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import read_json

NUMBERED_PLACEHOLDER = re.compile(r"<image\s*\d*>")  # MathVision writes <image1>


@dataclass(frozen=True)
class RawLayout(RowLayout[Row]):
    """Row layout that keeps rows as they are."""

    noun: ClassVar[str] = "question"
    required: ClassVar[str] = "question and answer"
    suffixes: ClassVar[tuple[str, ...]] = QUESTION_SUFFIXES
    rules: ClassVar[ColumnRules] = ColumnRules(settings={}, reserved={})

    def parse(self, row: Row | str, folder: Path, where: str) -> Row:
        return row


def read_questions(files: PromptFiles, source: PromptSource) -> tuple[list[Question], list[str]]:
    """Read the questions of a benchmark, and the category of each ("" without categories).

    Raises:
        UserError: If there are no questions, or a column is missing.
    """
    questions, tags = [], []
    for path in files.files:
        for where, row in _rows(path):
            for column in (source.options["text"], source.options["answer"]):
                if column not in row:
                    raise UserError(f'has no column "{column}", only {", ".join(row)}', field=where)
            questions.append(_parse(row, source, path.parent, where))
            tags.append(str(row.get(source.tag, "")) if source.tag else "")
    if not questions:
        raise UserError("has no questions", field=files.files[0])
    return questions, tags


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file; a JSON object has a row per key, as in MathVista."""
    if path.suffix not in QUESTION_SUFFIXES:
        raise UserError(f"must be one of {', '.join(QUESTION_SUFFIXES)}", field=path)
    content = read_json(path) if path.suffix == ".json" else None
    if isinstance(content, dict):
        yield from ((f"{path} row {key}", row) for key, row in content.items())
    else:
        yield from READERS[path.suffix](path, RawLayout())


def _parse(row: Row, source: PromptSource, folder: Path, where: str) -> Question:
    """Convert a row to a question."""
    options = source.options
    text, truth = str(row[options["text"]]).strip(), _answer(row[options["answer"]])
    found = row.get(options.get("image", ""))
    images = [each for each in (found if isinstance(found, list) else [found]) if each]
    choices = row.get(options.get("choices", "")) or []
    if choices:
        text, truth = _with_choices(text, truth, [str(each) for each in choices])
    text = NUMBERED_PLACEHOLDER.sub(IMAGE_PLACEHOLDER, text)
    if text.count(IMAGE_PLACEHOLDER) != len(images):  # then all images come first
        text = text.replace(IMAGE_PLACEHOLDER, "").strip()
    try:
        paths = tuple(find_image(each, folder, where) for each in images)
    except UserError as error:
        if not (archive := options.get("images")):
            raise
        raise UserError(
            error.rule, field=error.field, hint=_images_hint(archive, folder)
        ) from error
    metadata = {name: to_jsonable(row[name]) for name in (source.tag,) if name in row}
    return Question(text, paths, truth, {**metadata, "question": text, "answer": truth}, where)


def _answer(value: Any) -> str:
    """Return a ground truth as text; several are joined."""
    parts = value if isinstance(value, list) else [value]
    return ", ".join(
        str(part).strip().strip("$") if len(parts) > 1 else str(part) for part in parts
    )


def _with_choices(text: str, truth: str, choices: list[str]) -> tuple[str, str]:
    """Append lettered choices, and return the letter of a ground truth that is one of them."""
    letters = list(ascii_uppercase[: len(choices)])
    if truth not in letters and truth in choices:
        truth = letters[choices.index(truth)]
    if choices == letters:  # the image shows them
        return text, truth
    lines = [f"({letter}) {choice}" for letter, choice in zip(letters, choices, strict=True)]
    return "\n".join([text, *lines]), truth


def _images_hint(archive: str, folder: Path) -> str:
    repository, _, name = archive.partition(" ")
    url = f"https://huggingface.co/datasets/{repository}/resolve/main/{name}"
    return f"run curl -L -O {url} && unzip -d {folder} {name}"
