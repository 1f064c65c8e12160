"""Starts of a run: command line, versions and device, for its model card."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from flow_grpo import __version__
from flow_grpo.config.error_reporting import invoked_command, quote_for_shell
from flow_grpo.config.saved_config import START_FILE
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import read_json

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate")
MAX_STARTS = 20  # of which the first and the most recent are kept
Start = dict[str, Any]


def add_start(starts: list[Start]) -> list[Start]:
    """Return earlier starts and that of this process."""
    starts = [*starts, describe_start()]
    return starts if len(starts) <= MAX_STARTS else [starts[0], *starts[1 - MAX_STARTS :]]


def describe_start() -> Start:
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

    The launcher is not known, only what it has set: several processes are shown as those of
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


def read_starts(run: Path) -> list[Start]:
    """Return what `describe_start` returned at each start, the first one first."""
    try:
        starts = read_json(run / START_FILE)["starts"]
    except (OSError, UserError, KeyError, TypeError):
        return []  # a new run, or one of an older version
    found = starts if isinstance(starts, list) else []
    return [each for each in found if isinstance(each, dict)]
