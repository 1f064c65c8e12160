"""What the page shows of a run folder, also of one that is being written."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.files import lies_in, parse_json, read_json
from flow_grpo.run.console import Record
from flow_grpo.run.naming import short_names
from flow_grpo.run.reading import read_metrics

logger = logging.getLogger("flow_grpo")
SAMPLES = re.compile(r"(eval|train)-(\d+)")
NOT_SCORES = ("file", "still", "prompt", "answer", "truth", "advantage", "group")


@dataclass(frozen=True)
class Shot:
    """A line of samples.jsonl."""

    prompt: str
    picture: Path | None  # an answer may stand in its place
    answer: str | None
    truth: str | None  # what the answer should have been
    scores: dict[str, float | None]  # None: it failed
    advantage: float | None
    group: int | None


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    rows: list[Record]
    config: dict[str, Any]
    shots: dict[str, dict[int, Path]]  # of "eval" and "train": folder of samples, by epoch


def read_runs(folders: list[Path]) -> list[Run]:
    where = [folder.resolve() for folder in folders]
    if len({*where}) < len(where):
        raise UserError("a run is named twice; name each once")
    return [
        read_run(folder, name) for folder, name in zip(folders, short_names(where), strict=True)
    ]


def read_run(folder: Path, name: str = "") -> Run:
    if not folder.is_dir():
        raise UserError(f"no run at {folder}: name the folder of a run, like logs/RUN")
    rows = read_metrics(folder)
    if not rows:
        raise UserError(f"no metrics in {folder} yet: wait for the run's first evaluation")
    return Run(name or folder.name, folder, rows, _read_config(folder), _find_shots(folder))


def _read_config(folder: Path) -> dict[str, Any]:
    """Empty where it was left out of a copy, or is a link to another file: the page can do
    without."""
    try:
        config = read_json(folder / "config.json", parse_constant=str)
    except (UserError, OSError):
        return {}
    own = isinstance(config, dict) and lies_in(folder, folder / "config.json")
    return config if own else {}


def _find_shots(folder: Path) -> dict[str, dict[int, Path]]:
    found: dict[str, dict[int, Path]] = {"eval": {}, "train": {}}
    for path in sorted(folder.glob("samples/*/samples.jsonl")):
        if match := SAMPLES.fullmatch(path.parent.name):
            if lies_in(folder, path):
                found[match[1]][int(match[2])] = path.parent
            else:
                logger.warning("%s is not shown: a link leads out of the run", path.parent)
    return {kind: dict(sorted(folders.items())) for kind, folders in found.items()}


def read_shots(folder: Path, most: int) -> list[Shot]:
    """The first ones; lines that are still being written are left out."""
    lines = (folder / "samples.jsonl").read_text("utf-8", errors="replace").split("\n")
    return list(_parse(folder, lines[:most]))


def _parse(folder: Path, lines: list[str]) -> Iterator[Shot]:
    for line in lines:
        try:
            row = parse_json(line, str(folder))
        except UserError:
            continue
        if not isinstance(row, dict):
            continue
        file, answer, truth = (row.get(name) for name in ("file", "answer", "truth"))
        yield Shot(
            str(row.get("prompt", "")),
            # by its name alone: a file that says otherwise does not lead out of the folder
            folder / Path(str(file)).name if file else None,
            None if answer is None else str(answer),
            None if truth is None else str(truth),
            {str(name): value for name, value in row.items() if name not in NOT_SCORES},
            row.get("advantage"),
            row["group"] if isinstance(row.get("group"), int) else None,
        )
