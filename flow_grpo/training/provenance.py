"""Record how a run was started (start.json): directories, commands and prompt file hashes."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flow_grpo import atomic_io
from flow_grpo.config.saved_config import START_FILE, read_start_folders
from flow_grpo.data.mixing import parse_sources
from flow_grpo.errors import UserError
from flow_grpo.training.starts import add_start, read_starts
from flow_grpo.untrusted_files import read_json

SPLIT_PREFIXES = ("train", "test", "val", "votes")  # how the names of data files begin
DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")


def data_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a config, as in config.json, that name data files."""
    given = (config.get("preferences") or {}).get("data", "")
    return {name: config.get(name, "") for name in ("dataset", "eval_dataset")} | {
        "preferences": given
    }


def write_provenance(
    run: Path, dataset: str, eval_dataset: str = "", preferences: str = ""
) -> None:
    """Write start.json; working directories and commands of earlier starts are kept."""
    folders = dict.fromkeys([os.getcwd(), *map(str, read_start_folders(run))])
    content = {
        "folders": [*folders],
        "prompts": fingerprints(dataset, eval_dataset, preferences),
        "starts": add_start(read_starts(run)),
    }
    atomic_io.write_text_atomic(run / START_FILE, json.dumps(content, indent=2) + "\n")


def find_changed_data(
    run: Path, dataset: str, eval_dataset: str = "", preferences: str = ""
) -> list[str]:
    """Return the data files that changed since the run was last started."""
    try:
        before = dict(read_json(run / START_FILE)["prompts"])
        now = fingerprints(dataset, eval_dataset, preferences)
    except (OSError, UserError, KeyError, TypeError, ValueError):
        return []  # written by an older version
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def fingerprints(dataset: str, eval_dataset: str = "", preferences: str = "") -> dict[str, str]:
    """Return size and SHA-256 of each local data file, by name.

    Names of `eval_dataset` begin with "eval/", those of `preferences.data` with "preferences/".
    """
    found = {}
    for prefix, named in (("", dataset), ("eval/", eval_dataset)):
        for source in parse_sources(named) if named else ():
            for file in _data_files(Path(source.path)):
                name = file.name if file == Path(source.path) else f"{source.name}/{file.name}"
                found[prefix + name] = _fingerprint(file)
    for file in _data_files(Path(preferences)) if preferences else ():
        found[f"preferences/{file.name}"] = _fingerprint(file)
    return found


def _data_files(path: Path) -> list[Path]:
    """Return the file itself, or the files of the splits in a directory and its `data/`."""
    if os.path.isfile(path):
        return [path]
    found = sorted([*path.glob("*"), *path.glob("data/*")]) if os.path.isdir(path) else []
    return [
        each
        for each in found
        if each.name.startswith(SPLIT_PREFIXES) and each.suffix in DATA_SUFFIXES and each.is_file()
    ]


def _fingerprint(file: Path) -> str:
    with file.open("rb") as content:
        return f"{file.stat().st_size} {hashlib.file_digest(content, 'sha256').hexdigest()}"
