"""What a run found where it was started: the folder, and the files with its prompts."""

import hashlib
import json
import os
from pathlib import Path

from flow_grpo import disk
from flow_grpo.config.saved import START, start_folders
from flow_grpo.data.mixing import parse_sources
from flow_grpo.errors import UserError
from flow_grpo.files import read_json

SPLITS = ("train", "test", "val")  # how files of a data set begin
ENDINGS = (".txt", ".jsonl", ".json", ".csv", ".parquet")


def write_origin(run: Path, dataset: str) -> None:
    folders = dict.fromkeys([os.getcwd(), *map(str, start_folders(run))])
    content = {"folders": [*folders], "prompts": fingerprints(dataset)}
    disk.write_text(run / START, json.dumps(content, indent=2) + "\n")


def changed_prompts(run: Path, dataset: str) -> list[str]:
    """Files of the data set that are not what they were when the run was last started."""
    try:
        before, now = dict(read_json(run / START)["prompts"]), fingerprints(dataset)
    except (OSError, UserError, KeyError, TypeError, ValueError):
        return []  # by an older version
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def fingerprints(dataset: str) -> dict[str, str]:
    """Size and SHA-256 of each file with prompts, by its name; none of what is on the hub."""
    return {
        f"{source.name}/{file.name}" if file != Path(source.path) else file.name: _print(file)
        for source in parse_sources(dataset)
        for file in _files(Path(source.path))
    }


def _files(path: Path) -> list[Path]:
    if os.path.isfile(path):
        return [path]
    found = sorted([*path.glob("*"), *path.glob("data/*")]) if os.path.isdir(path) else []
    return [
        each
        for each in found
        if each.name.startswith(SPLITS) and each.suffix in ENDINGS and each.is_file()
    ]


def _print(file: Path) -> str:
    with file.open("rb") as content:
        return f"{file.stat().st_size} {hashlib.file_digest(content, 'sha256').hexdigest()}"
