"""Log of the responses and scores of an evaluation, from which a killed evaluation continues.

    OUT/evaluation.json          what is evaluated and how; another evaluation is rejected
    OUT/log/responses-<rank>.jsonl

Every process appends to its own file: a line when a response is complete, and another one with its
scores. A line that was cut off when the process was killed is dropped. Scores that failed (null)
are computed again when the evaluation continues; the response is kept.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flow_grpo import atomic_io
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import flatten_fields, read_json

SETTINGS_FILE, LOG_DIR = "evaluation.json", "log"
ABSENT = "not set"


class ResponseKey(NamedTuple):
    """Identifies a response of an evaluation."""

    checkpoint: str  # name of the candidate
    dataset: str
    row: int  # of the dataset
    number: int  # of the response to this question


@dataclass
class LoggedResponse:
    """A response and its scores."""

    answer: str  # the last response of an episode
    tokens: int  # of all turns
    ended: bool  # False if truncated
    transcript: str = ""  # all turns of an episode; "" for single responses
    episode: dict[str, Any] = field(default_factory=dict)  # its metadata for rewards
    # by name: None if scoring failed; without a name if the reward does not apply
    scores: dict[str, float | None] = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        """Whether no score is missing."""
        return bool(self.scores) and None not in self.scores.values()

    @property
    def is_complete(self) -> bool:
        """Whether it need not be generated again: its environment did not fail."""
        return "failure" not in self.episode


Responses = dict[ResponseKey, LoggedResponse]


class ResponseLog:
    """Appends to the file of one process.

    Args:
        out: Directory of the evaluation.
        process: Rank of this process.
    """

    def __init__(self, out: Path, process: int) -> None:
        self.path = out / LOG_DIR / f"responses-{process:05d}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_partial_line(self.path)

    def add_responses(self, responses: Responses) -> None:
        """Append responses, without their scores."""
        names = ("answer", "tokens", "ended", "transcript", "episode")
        self._append(
            {**key._asdict(), **{name: getattr(each, name) for name in names}}
            for key, each in responses.items()
        )

    def add_scores(self, scores: Mapping[ResponseKey, dict[str, float | None]]) -> None:
        """Append the scores of responses in the log."""
        self._append({**key._asdict(), "scores": own} for key, own in scores.items())

    def _append(self, rows: Any) -> None:
        """Append rows as JSON lines and flush them to disk."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            atomic_io.fsync_path(self.path)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error


def _drop_partial_line(path: Path) -> None:
    """Remove a last line that was cut off, so that the next one does not continue it."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def read_responses(out: Path) -> Responses:
    """Return all responses in the log, of any number of processes; empty without a log.

    Raises:
        UserError: If a line of the log is invalid.
    """
    found: Responses = {}
    scores: dict[ResponseKey, dict[str, float | None]] = {}
    for path in sorted((out / LOG_DIR).glob("responses-*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # the last one is empty or cut off
            try:
                row = json.loads(line)
                key = ResponseKey(*(row.pop(name) for name in ResponseKey._fields))
                if "scores" in row:
                    old = scores.get(key, {})
                    if not old or None in old.values():
                        scores[key] = row["scores"]
                else:
                    found[key] = LoggedResponse(**row)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UserError(
                    "is not a valid line of a response log",
                    field=f"{path}:{number}",
                    hint="remove the line, or choose another --out",
                ) from error
    for key, own in scores.items():
        if key in found:
            found[key].scores = own
    return found


def open_evaluation(out: Path, settings: dict[str, Any]) -> None:
    """Create the directory of an evaluation, or check that it holds the same evaluation.

    Args:
        out: The directory.
        settings: JSON values of everything that changes the results.

    Raises:
        UserError: If `out` exists and is not an evaluation, or one with other settings.
    """
    path = out / SETTINGS_FILE
    if out.exists():
        if not path.is_file():
            raise UserError(
                "already exists and is not an evaluation of responses",
                field="--out",
                value=str(out),
                hint="choose another directory",
            )
        check_same_evaluation(out, read_json(path), settings)
        return
    try:
        out.mkdir(parents=True)
        atomic_io.write_text_atomic(path, json.dumps(settings, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot be created: {error.strerror}", field="--out", value=str(out)
        ) from error


def check_same_evaluation(out: Path, saved: Any, settings: dict[str, Any]) -> None:
    """Reject settings that differ from those of an existing evaluation."""
    given = dict(flatten_fields(settings))
    known = dict(flatten_fields(saved)) if isinstance(saved, dict) else {}
    for name in [*given, *known]:
        old, new = known.get(name, ABSENT), given.get(name, ABSENT)
        if old != new:
            raise UserError(
                f"contains an evaluation with {name}={_short(old)}, not {_short(new)}",
                field="--out",
                value=str(out),
                hint="choose another directory, or restore the setting to resume that evaluation",
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def scores_to_json(columns: Mapping[str, np.ndarray], row: int) -> dict[str, float | None]:
    """Return the scores of one response: None if scoring failed, left out if not applicable."""
    values = {name: float(column[row]) for name, column in columns.items()}
    return {
        name: value if math.isfinite(value) else None
        for name, value in values.items()
        if not (math.isinf(value) and value < 0)
    }
