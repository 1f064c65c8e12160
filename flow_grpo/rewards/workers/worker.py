"""The child process of `pool.py`: build an engine, then run one job after another.

Run as `python -m flow_grpo.rewards.workers.worker <file descriptor of the pipe> <parent's pid>`.
"""

import importlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import describe_error
from flow_grpo.rewards.workers.supervisor import START_REPLY, supervise


def main() -> None:
    """Build the engine that the pool sends first, and run jobs until the pool closes the pipe."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # child processes of the engine must not write to it
    supervise(descriptor, int(sys.argv[2]))
    os.nice(10)  # rewards can wait; a delayed thread of the model stalls all others
    # Ctrl-C and a launcher's SIGTERM reach the whole process group; the trainer ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    # A job that forks returns in both processes; only the original one may reply.
    os.register_at_fork(after_in_child=connection.close)
    factory, options = connection.recv()
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive_jobs, args=(connection, jobs), daemon=True).start()
    try:
        engine = _import_factory(factory)(**options)
    except Exception as error:
        reason = describe_error(error)
        if not isinstance(error, UserError):
            reason = f"{factory} failed: {reason}"
        _reply(connection, START_REPLY, "failed", reason)
        return
    _reply(connection, START_REPLY, "ready", "")
    while True:
        number, payload = jobs.get()
        for status, value in _run_job(engine, payload):
            _reply(connection, number, status, value)


def _reply(connection: Connection, number: int, status: str, value: Any) -> None:
    if connection.closed:  # a forked copy of the worker
        os._exit(0)
    connection.send((number, status, value))


def _receive_jobs(connection: Connection, jobs: "queue.SimpleQueue[Any]") -> None:
    """Read chunks of jobs from the pipe, and exit the process when the other end is closed.

    Runs in its own thread, so that a worker stuck in its engine notices the trainer's death.
    """
    try:
        while True:
            for job in connection.recv():
                jobs.put(job)
    except (EOFError, OSError):
        os._exit(0)


def _import_factory(factory: str) -> Callable[..., Callable[[Any], Any]]:
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)


def _run_job(engine: Callable[[Any], Any], job: Any) -> Iterator[tuple[str, Any]]:
    """Yield the engine's progress, and finally ("done", result) or ("failed", reason)."""
    try:
        result = engine(job)
        if isinstance(result, Generator):
            result = yield from result
    except Exception as error:
        yield "failed", describe_error(error)
    else:
        yield "done", result


if __name__ == "__main__":
    main()
