"""What the page shows of a run folder, also of one that is being written."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.files import lies_in, parse_json, read_json
from flow_grpo.show.console import Record

WEIGHTS = tuple(  # folders of a checkpoint
    f"{prefix}{name}" for prefix in ("", "ema_") for name in ("lora", "transformer", "model")
)
LARGEST = 1e300  # what is larger, or infinite, no curve can show
logger = logging.getLogger("flow_grpo")
SAMPLES = re.compile(r"(eval|train)-(\d+)")
NOT_SCORES = ("file", "still", "sources", "prompt", "answer", "truth", "advantage", "group")


def short_names(paths: list[Path]) -> list[str]:
    """What tells the paths apart: without the folders that all of them begin or end with."""
    whole = [path.parts[1:] if path.is_absolute() else path.parts for path in paths]
    shorter = [_without_usual(each) for each in whole]
    parts = [list(each) for each in (shorter if len({*shorter}) == len(whole) else whole)]
    if len(parts) == 1:
        parts = [parts[0][-1:]]
    for end in (-1, 0):
        while parts and min(map(len, parts)) > 1 and len({each[end] for each in parts}) == 1:
            for each in parts:
                each.pop(end)
    return ["/".join(each) for each in parts]


def _without_usual(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The folders of a run have the same names in each."""
    kept = [part for part in parts if part != "checkpoints"]
    return tuple(kept[:-1] if len(kept) > 1 and kept[-1] in WEIGHTS else kept)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """A row per epoch; `run` is a run folder or a metrics.jsonl file."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(f"no metrics at {path}: name a run folder or a metrics file")
    rows, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, str(path))
            row |= {"epoch": int(row["epoch"])}
        except (UserError, ValueError, KeyError, TypeError, OverflowError) as error:
            if number < len(lines):  # the last one is cut where a run was killed
                raise UserError(
                    f"line {number} of {path} is no JSON with an epoch; mend or remove it"
                ) from error
            continue
        for name, value in row.items():
            if value is not None and not (isinstance(value, int | float) and abs(value) <= LARGEST):
                raise UserError(
                    f"line {number} of {path} has {name}={value!r:.40}, which is no number; mend "
                    "or remove it"
                )
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Shot:
    """A line of samples.jsonl."""

    prompt: str
    picture: Path | None  # an answer may stand in its place
    sources: tuple[Path, ...]  # what the picture was made from
    answer: str | None
    truth: str | None  # what the answer should have been
    scores: dict[str, float | None]  # None: it failed
    advantage: float | None
    group: int | None


@dataclass(frozen=True)
class RunFolder:
    name: str
    folder: Path
    rows: list[Record]
    config: dict[str, Any]
    shots: dict[str, dict[int, Path]]  # of "eval" and "train": folder of samples, by epoch


def read_runs(folders: list[Path]) -> list[RunFolder]:
    where = [folder.resolve() for folder in folders]
    if len({*where}) < len(where):
        raise UserError("a run is named twice; name each once")
    return [
        read_run(folder, name) for folder, name in zip(folders, short_names(where), strict=True)
    ]


def read_run(folder: Path, name: str = "") -> RunFolder:
    if not folder.is_dir():
        raise UserError(f"no run at {folder}: name the folder of a run, like logs/RUN")
    rows = read_metrics(folder)
    if not rows:
        raise UserError(f"no metrics in {folder} yet: wait for the run's first evaluation")
    return RunFolder(name or folder.name, folder, rows, _read_config(folder), _find_shots(folder))


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
        match = SAMPLES.fullmatch(path.parent.name)
        if match and path.is_file():
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
        sources = row.get("sources")
        # by their names alone: a file that says otherwise does not lead out of the folder
        picture, *made_from = [
            folder / Path(str(name)).name if name else None
            for name in (file, *(sources if isinstance(sources, list) else ()))
        ]
        yield Shot(
            str(row.get("prompt", "")),
            picture,
            tuple(filter(None, made_from)),
            None if answer is None else str(answer),
            None if truth is None else str(truth),
            {str(name): value for name, value in row.items() if name not in NOT_SCORES},
            row.get("advantage"),
            row["group"] if isinstance(row.get("group"), int) else None,
        )
