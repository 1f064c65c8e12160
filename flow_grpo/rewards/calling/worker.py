"""The child process of `pool.py`: build one engine, then answer one job after another.

Run as `python -m flow_grpo.rewards.calling.worker <file descriptor of the pipe>`.
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
from flow_grpo.rewards.calling.supervisor import START, supervise
from flow_grpo.rewards.failure import describe


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # what the engine starts must not write to it
    supervise(descriptor)
    os.nice(10)  # rewards are waited for last; the model's threads wait for one another
    # Ctrl-C and a launcher's SIGTERM reach the whole process group; the trainer decides when its
    # workers go.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    # A step that forks returns twice, in both processes; only the original one may reply.
    os.register_at_fork(after_in_child=connection.close)
    factory, options = connection.recv()
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    try:
        engine = _load(factory)(**options)
    except Exception as error:
        own = isinstance(error, UserError)  # which says all there is to say
        reason = describe(error)
        reason = reason if own else f"{factory} could not be set up: {reason}"
        _reply(connection, START, "failed", reason)
        return
    _reply(connection, START, "ready", "")
    while True:
        number, payload = jobs.get()
        for status, value in _answer(engine, payload):
            _reply(connection, number, status, value)


def _reply(connection: Connection, number: int, status: str, value: Any) -> None:
    if connection.closed:  # a forked copy of the worker
        os._exit(0)
    connection.send((number, status, value))


def _receive(connection: Connection, jobs: "queue.SimpleQueue[Any]") -> None:
    """Take chunks of jobs off the pipe, and end this process when the other end is gone.

    A thread of its own: a worker busy or stuck in the engine still notices that the trainer died.
    """
    try:
        while True:
            for job in connection.recv():
                jobs.put(job)
    except (EOFError, OSError):
        os._exit(0)


def _load(factory: str) -> Callable[..., Callable[[Any], Any]]:
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)


def _answer(engine: Callable[[Any], Any], job: Any) -> Iterator[tuple[str, Any]]:
    try:
        result = engine(job)
        if isinstance(result, Generator):
            result = yield from result
    except Exception as error:
        yield "failed", describe(error)
    else:
        yield "done", result


if __name__ == "__main__":
    main()
