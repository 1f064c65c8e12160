"""Run the stages of a task, each in its own process, and record which are done.

Problem: a task takes days and may be killed at any moment, also without a chance to clean up.

Invariant: a stage is recorded in `reproduce.json` only after its process ended successfully, and
every stage can be repeated: training resumes from its checkpoint, benchmarks keep what is scored,
and exported and published directories are written completely or not at all.
"""

import ctypes
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.config.error_reporting import STOP_SIGNALS
from flow_grpo.errors import StoppedBySignal, UserError
from flow_grpo.training.lock import find_writer
from flow_grpo.untrusted_files import read_json

logger = logging.getLogger("flow_grpo")
STATE_FILE = "reproduce.json"
PR_SET_PDEATHSIG = 1  # prctl(2)
WRITER_SECONDS = 300.0  # how long the previous process may take to save a checkpoint and end
AGAIN = "repeat the same command to resume"


@dataclass
class StageState:
    """Options of a task and its finished stages, stored in `reproduce.json`."""

    folder: Path
    options: dict[str, Any]
    done: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, options: dict[str, Any]) -> "StageState":
        """Read the state, or create the directory.

        Raises:
            UserError: If it was started with other options, or belongs to something else.
        """
        file = folder / STATE_FILE
        if not file.is_file():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(
                    f"exists and has no {STATE_FILE}", field=folder, hint="choose another --out"
                )
            folder.mkdir(parents=True, exist_ok=True)
            state = cls(folder, options)
            state._write()
            return state
        content = read_json(file)
        try:
            before, done = dict(content["options"]), [str(name) for name in content["done"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("is damaged", field=file, hint="choose another --out") from error
        for name in dict.fromkeys([*before, *options]):
            if before.get(name) != options.get(name):
                raise UserError(
                    f"was {before.get(name)!r} when {folder} was started",
                    field=name,
                    value=options.get(name),
                    hint="repeat the command with the original options, or choose another --out",
                )
        return cls(folder, options, done)

    def finish(self, stage: str) -> None:
        """Record that a stage is done."""
        self.done.append(stage)
        self._write()

    def _write(self) -> None:
        content = {"options": self.options, "done": self.done}
        write_text_atomic(self.folder / STATE_FILE, json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True)
class Stage:
    """A command that can be repeated until it succeeds."""

    name: str
    command: Sequence[str | Path]
    run: Path | None = None  # run directory that the command writes to
    result: Path | None = None  # directory that is written completely or not at all


def run_stages(state: StageState, stages: Sequence[Stage]) -> None:
    """Run the stages that are not done yet, in order.

    Raises:
        StoppedBySignal: A stop signal ended a stage.
        UserError: A stage failed; its process has reported why.
    """
    for number, stage in enumerate(stages, 1):
        title = f"[{number}/{len(stages)}] {stage.name}"
        if stage.name in state.done:
            logger.info("%s: already done", title)
            continue
        if stage.result is None or not stage.result.exists():
            logger.info("%s: %s", title, " ".join(map(str, stage.command)))
            if stage.run is not None:
                wait_for_writer(stage.run)
            run_command(stage.name, stage.command)
        state.finish(stage.name)


def wait_for_writer(run: Path, seconds: float = WRITER_SECONDS) -> None:
    """Wait for a process left over from an interrupted start to save and exit.

    Raises:
        UserError: If the process is still running after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (writer := find_writer(run)) is not None:
        if time.monotonic() > deadline:
            raise UserError(f"is in use by {writer}", field=run, hint="wait until it ends")
        logger.info("waiting for %s, which still writes to %s", writer, run)
        time.sleep(1.0)


def run_command(name: str, command: Sequence[str | Path]) -> None:
    """Run a command and forward stop signals to it.

    It runs in its own session, so that Ctrl-C reaches it once, from here. If this process is
    killed, the kernel sends the command SIGTERM (on Linux).
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    process: subprocess.Popen | None = None

    def forward(number: int, _: FrameType | None) -> None:
        """Send a signal on, or remember it until the process has started."""
        received.append(number)
        if process is not None:
            process.send_signal(number)

    try:
        for number in STOP_SIGNALS:
            before[number] = signal.signal(number, forward)
        process = subprocess.Popen(
            [str(word) for word in command], start_new_session=True, preexec_fn=_death_signal()
        )
        if received:
            process.send_signal(received[-1])
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == 0 and not received:
        return
    if received or code == StoppedBySignal.exit_code:
        raise StoppedBySignal(f"{name} was stopped; {AGAIN}")
    error = UserError(f"{name} failed with exit code {code}", hint=f"fix the cause, then {AGAIN}")
    error.exit_code = code if code > 0 else 1
    raise error


def _death_signal() -> Callable[[], None] | None:
    """Return a `preexec_fn` that ends the new process when this process dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
