"""A worker process from the side of its parent; worker.py is what runs in it."""

import contextlib
import math
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flow_grpo.rewards.workers.supervisor import KILL_SIGNAL

SUPERVISOR_EXIT_TIMEOUT = 10.0  # seconds for a supervisor to kill its processes
MAX_SOCKET_TIMEOUT = 1e6  # seconds; a socket rejects larger values


class WorkerProcess:
    """A worker process and the parent's end of its pipe.

    Args:
        factory: "module:function", which builds the engine.
        options: Keyword arguments of the factory.
        environment: Environment variables added to the inherited ones.
        timeout: Seconds without progress after which a started read or write fails; a stopped
            process neither empties its pipe nor completes a message.
    """

    def __init__(
        self, factory: str, options: dict[str, Any], environment: dict[str, str], timeout: float
    ) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        limit = struct.pack("ll", math.ceil(min(timeout, MAX_SOCKET_TIMEOUT)), 0)  # a timeval
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs:
            descriptor = theirs.fileno()
            arguments = [str(descriptor), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flow_grpo.rewards.workers.worker", *arguments],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_worker_environment(), **environment},
            )
        self.pid = self._process.pid
        # Far smaller than the pipe's buffer, so this does not block before the child reads.
        with contextlib.suppress(OSError):
            self._connection.send((factory, options))

    def send(self, jobs: Sequence[tuple[int, Any]]) -> None:
        """Send pairs of a number, which comes back with the replies, and a payload."""
        self._connection.send(jobs)

    def receive(self, number: int, timeout: float) -> tuple[str, Any]:
        """Wait for the reply to request `number`; return its status and value."""
        while True:
            if not self._connection.poll(timeout):
                raise TimeoutError
            try:
                replied, status, value = self._connection.recv()
            except BlockingIOError as error:  # part of a message, then a timeout
                raise TimeoutError from error
            except (EOFError, OSError):
                raise
            except Exception as error:
                raise OSError(f"the worker sent an unreadable reply: {error!r}") from error
            if replied == number:
                return status, value

    def is_alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and all its descendants (see supervisor.py)."""
        self._process.send_signal(KILL_SIGNAL)

    def kill_and_wait(self) -> int:
        """Kill the process and return its exit code."""
        self.kill()
        self._connection.close()
        try:
            return self._process.wait(SUPERVISOR_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:  # stopped by a signal, or in an uninterruptible call
            self._process.kill()
            return self._process.wait()


def _worker_environment() -> dict[str, str]:
    """Return the environment of a worker, in which this package can be imported."""
    package_root = str(Path(__file__).parents[3])
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package_root, inherited] if inherited else [package_root]),
        # Without it `python -m` puts the current directory first on the path.
        "PYTHONSAFEPATH": "1",
    }
