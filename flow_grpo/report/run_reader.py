"""Read the data of a run directory for the report, also while the run writes to it."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.report.console import Record
from flow_grpo.untrusted_files import is_inside, parse_json, read_json

WEIGHT_FOLDERS = tuple(  # directories of weights in a checkpoint
    f"{prefix}{name}" for prefix in ("", "ema_") for name in ("lora", "transformer", "model")
)
MAX_METRIC = 1e300  # larger or infinite values cannot be plotted
logger = logging.getLogger("flow_grpo")
SAMPLES_PATTERN = re.compile(r"(eval|train)-(\d+)")
NON_SCORE_KEYS = (
    "file",
    "still",
    "audio",
    "sources",
    "prompt",
    "answer",
    "truth",
    "advantage",
    "group",
)


def short_names(paths: list[Path]) -> list[str]:
    """Return short distinct names: the paths without the leading and trailing parts they share."""
    full = [path.parts[1:] if path.is_absolute() else path.parts for path in paths]
    shorter = [_strip_run_folders(each) for each in full]
    parts = [list(each) for each in (shorter if len({*shorter}) == len(full) else full)]
    if len(parts) == 1:
        parts = [parts[0][-1:]]
    for end in (-1, 0):
        while parts and min(map(len, parts)) > 1 and len({each[end] for each in parts}) == 1:
            for each in parts:
                each.pop(end)
    return ["/".join(each) for each in parts]


def _strip_run_folders(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Remove the parts of a path inside a run directory, which are the same in each run."""
    kept = [part for part in parts if part != "checkpoints"]
    return tuple(kept[:-1] if len(kept) > 1 and kept[-1] in WEIGHT_FOLDERS else kept)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, one per epoch; a truncated last line is skipped.

    Args:
        run: A run directory or a metrics.jsonl file.

    Raises:
        UserError: If the file is missing, or a line is not an object of finite numbers.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError("does not exist", field=path, hint="pass a run directory or a metrics file")
    rows, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, str(path))
            row |= {"epoch": int(row["epoch"])}
        except (UserError, ValueError, KeyError, TypeError, OverflowError) as error:
            if number < len(lines):  # the last line may be cut off if the run was killed
                raise UserError(
                    "is not a JSON object with an epoch",
                    field=f"{path}:{number}",
                    hint="correct or remove the line",
                ) from error
            continue
        for name, value in row.items():
            if value is not None and not (
                isinstance(value, int | float) and abs(value) <= MAX_METRIC
            ):
                raise UserError(
                    f"has {name}={value!r:.40}, which is not a finite number",
                    field=f"{path}:{number}",
                    hint="correct or remove the line",
                )
        rows.append(row)
    return rows


@dataclass(frozen=True)
class SampleRecord:
    """A line of samples.jsonl."""

    prompt: str
    image: Path | None  # the image, or the one that a question is about
    sources: tuple[Path, ...]  # input images of an edit
    answer: str | None
    truth: str | None  # reference answer
    scores: dict[str, float | None]  # None: scoring failed
    advantage: float | None
    group: int | None
    audio: Path | None = None  # sound of a video


@dataclass(frozen=True)
class RunData:
    """The data of a run directory that the report shows."""

    name: str
    folder: Path
    rows: list[Record]
    config: dict[str, Any]
    samples: dict[str, dict[int, Path]]  # by "eval" and "train": directory of samples by epoch


def read_runs(folders: list[Path]) -> list[RunData]:
    """Read runs, named by what distinguishes their paths.

    Raises:
        UserError: If a run is passed twice.
    """
    paths = [folder.resolve() for folder in folders]
    if len({*paths}) < len(paths):
        raise UserError("the same run was passed twice", hint="pass each run once")
    names = short_names(paths)
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str = "") -> RunData:
    """Read a run directory; `name` defaults to that of the directory.

    Raises:
        UserError: If it is not a directory or has no metrics yet.
    """
    if not folder.is_dir():
        raise UserError(
            "is not a directory", field=folder, hint="pass a run directory, such as logs/RUN"
        )
    rows = read_metrics(folder)
    if not rows:
        raise UserError(
            "has no metrics yet", field=folder, hint="wait for the run's first evaluation"
        )
    return RunData(
        name or folder.name, folder, rows, _read_config(folder), _find_sample_folders(folder)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the config; empty if it is missing, unreadable or a link out of the run directory."""
    try:
        config = read_json(folder / "config.json", parse_constant=str)
    except (UserError, OSError):
        return {}
    own = isinstance(config, dict) and is_inside(folder, folder / "config.json")
    return config if own else {}


def _find_sample_folders(folder: Path) -> dict[str, dict[int, Path]]:
    """Return the directories of samples by kind ("eval", "train") and epoch, in order."""
    found: dict[str, dict[int, Path]] = {"eval": {}, "train": {}}
    for path in sorted(folder.glob("samples/*/samples.jsonl")):
        match = SAMPLES_PATTERN.fullmatch(path.parent.name)
        if match and path.is_file():
            if is_inside(folder, path):
                found[match[1]][int(match[2])] = path.parent
            else:
                logger.warning("%s is not shown: it links out of the run directory", path.parent)
    return {kind: dict(sorted(folders.items())) for kind, folders in found.items()}


def read_sample_records(folder: Path, limit: int) -> list[SampleRecord]:
    """Return the first `limit` samples; lines that are still being written are skipped."""
    lines = (folder / "samples.jsonl").read_text("utf-8", errors="replace").split("\n")
    return list(_parse_records(folder, lines[:limit]))


def _parse_records(folder: Path, lines: list[str]) -> Iterator[SampleRecord]:
    """Yield the valid lines of a samples.jsonl; files outside `folder` are not referenced."""
    for line in lines:
        try:
            row = parse_json(line, str(folder))
        except UserError:
            continue
        if not isinstance(row, dict):
            continue
        file, answer, truth = (row.get(name) for name in ("file", "answer", "truth"))
        sources = row.get("sources")
        # file names only, so that no entry leads out of the directory
        image, audio, *source_files = [
            folder / Path(str(name)).name if name else None
            for name in (file, row.get("audio"), *(sources if isinstance(sources, list) else ()))
        ]
        yield SampleRecord(
            str(row.get("prompt", "")),
            image,
            tuple(filter(None, source_files)),
            None if answer is None else str(answer),
            None if truth is None else str(truth),
            {str(name): value for name, value in row.items() if name not in NON_SCORE_KEYS},
            row.get("advantage"),
            row["group"] if isinstance(row.get("group"), int) else None,
            audio,
        )
