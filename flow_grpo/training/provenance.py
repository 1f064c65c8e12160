"""Record how a run was started (start.json).

It has the working directories, the command lines, the versions of the libraries, the device, and
the hashes of the prompt files.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from flow_grpo import __version__, atomic_io
from flow_grpo.config.error_reporting import invoked_command, quote_for_shell
from flow_grpo.config.saved_config import START_FILE, read_start_folders
from flow_grpo.data.mixing import parse_sources
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import read_json

SPLIT_PREFIXES = ("train", "test", "val")  # how the names of data files begin
DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate")
MAX_STARTS = 20  # of which the first and the most recent are kept


def write_provenance(run: Path, dataset: str) -> None:
    """Write start.json; working directories and commands of earlier starts are kept."""
    folders = dict.fromkeys([os.getcwd(), *map(str, read_start_folders(run))])
    starts = [*read_starts(run), describe_start()]
    if len(starts) > MAX_STARTS:
        starts = [starts[0], *starts[1 - MAX_STARTS :]]
    content = {"folders": [*folders], "prompts": fingerprints(dataset), "starts": starts}
    atomic_io.write_text_atomic(run / START_FILE, json.dumps(content, indent=2) + "\n")


def describe_start() -> dict[str, Any]:
    """Return command, number of processes, versions and device of this process."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": training_command(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "device": gpu or "CPU",
        "versions": {"flow_grpo": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def training_command() -> str:
    """Return the command line that started this run, "" from Python code.

    The launcher is not known, but what it was told: several processes are shown as those of
    `accelerate launch`.
    """
    if not any(word.startswith(("--config", "--resume")) for word in sys.argv[1:]):
        return ""
    start, processes = invoked_command(), int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        script = start.removeprefix("python ")
        if start.startswith("flow-grpo "):
            script = f"-m flow_grpo.config.command {start.removeprefix('flow-grpo ')}"
        start = f"accelerate launch --num_processes {processes} {script}"
    return " ".join([start, *map(quote_for_shell, sys.argv[1:])])


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Return what `describe_start` returned at each start, the first one first."""
    try:
        starts = read_json(run / START_FILE)["starts"]
    except (OSError, UserError, KeyError, TypeError):
        return []  # a new run, or one of an older version
    found = starts if isinstance(starts, list) else []
    return [each for each in found if isinstance(each, dict)]


def find_changed_data(run: Path, dataset: str) -> list[str]:
    """Return the data files that changed since the run was last started."""
    try:
        before, now = dict(read_json(run / START_FILE)["prompts"]), fingerprints(dataset)
    except (OSError, UserError, KeyError, TypeError, ValueError):
        return []  # written by an older version
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def fingerprints(dataset: str) -> dict[str, str]:
    """Return size and SHA-256 of each local data file, by name."""
    return {
        f"{source.name}/{file.name}" if file != Path(source.path) else file.name: _fingerprint(file)
        for source in parse_sources(dataset)
        for file in _data_files(Path(source.path))
    }


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
