"""Worker processes that outlive a crash of any of them.

`concurrent.futures` gives up the whole pool when one process dies, and `multiprocessing` imports
the trainer's main script, torch and all, into every spawned child. So each worker here is a plain
child process (`worker.py`) behind a pipe, with one thread in the parent that feeds it. pebble was
tried: it forks, torch and all, or imports the main script too, which
`test_the_workers_run_without_torch` and `test_workers_do_not_outlive_a_killed_parent` forbid.
"""

import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling.supervisor import END, START
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.protocol import Scorer

log = logging.getLogger(__name__)

MAX_CHUNK = 16
MAX_DEATHS = 2
START_ATTEMPTS = 3
END_TIMEOUT = 10.0  # seconds for a supervisor to kill its processes
LONGEST_TIMEOUT = 1e6  # seconds, that a socket takes
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds until workers that could not start are tried again


# For engines that share the machine with a trainer: one core each, and the card's memory is not
# for them.
BESIDE_A_TRAINER = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class LostWorker(Failed):
    """The worker died on it."""


class TimedOut(LostWorker):
    """The worker took too long over it, and was killed."""


class CannotStart(UserError):
    """There is no worker, for now."""


class PoolClosed(RuntimeError):
    def __init__(self) -> None:
        super().__init__("the worker pool is closed")


@dataclass
class _Job:
    payload: Any
    number: int = field(default_factory=itertools.count().__next__)
    result: "Future[Any]" = field(default_factory=Future)
    deaths: int = 0


_Chunk = deque[_Job]


class _Worker:
    """A worker process and our end of its pipe.

    Args:
        timeout: Seconds without progress after which a started read or write fails; a stopped
            process neither empties its pipe nor completes a message.
    """

    def __init__(
        self, factory: str, options: dict[str, Any], environment: dict[str, str], timeout: float
    ) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        limit = struct.pack("ll", math.ceil(min(timeout, LONGEST_TIMEOUT)), 0)  # a timeval
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flow_grpo.rewards.calling.worker", str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_worker_environment(), **environment},
            )
        self.pid = self._process.pid
        # Far smaller than the pipe's buffer: this neither blocks nor needs the child to be there.
        with contextlib.suppress(OSError):
            self._connection.send((factory, options))

    def send(self, jobs: Iterable[_Job]) -> None:
        self._connection.send([(job.number, job.payload) for job in jobs])

    def receive(self, number: int, timeout: float) -> tuple[str, Any]:
        """Wait for the reply to request `number`; return its status and value."""
        while True:
            if not self._connection.poll(timeout):
                raise TimeoutError
            try:
                replied, status, value = self._connection.recv()
            except BlockingIOError as error:  # half a message, then nothing
                raise TimeoutError from error
            except (EOFError, OSError):
                raise
            except Exception as error:
                raise OSError(f"the worker sent an unreadable reply: {error!r}") from error
            if replied == number:
                return status, value

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and all its descendants (see supervisor.py)."""
        self._process.send_signal(END)

    def bury(self) -> int:
        """Make sure the process is gone; returns its exit code."""
        self.kill()
        self._connection.close()
        try:
            return self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:  # stopped by a signal, or in an endless system call
            self._process.kill()
            return self._process.wait()


class WorkerPool:
    """Runs `engine(payload)` for many payloads in child processes, each with its own engine.

    `factory` is "module:function"; a worker calls it once, with `options`, to get its engine.
    A worker that dies is replaced and what it had left is tried again; the payload that
    `max_deaths` workers died on has failed. A worker that takes longer than `timeout` seconds
    over a payload is killed and replaced, and that payload has failed; an engine that is a
    generator has as long again after each ("going on", None) that it yields. Where no worker can be
    started, `map` raises `CannotStart` at once and `trouble` says why, while the pool goes on
    trying. Several threads may use one pool. It starts nothing before its first use.
    """

    def __init__(
        self,
        factory: str,
        options: dict[str, Any],
        *,
        workers: int,
        timeout: float,
        start_timeout: float = 300.0,
        max_deaths: int = MAX_DEATHS,
        environment: Mapping[str, str] = BESIDE_A_TRAINER,
    ) -> None:
        self._factory = factory
        self._options = options
        self._size = workers
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._max_deaths = max_deaths
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._live: set[_Worker] = set()
        self._closed = threading.Event()
        self._broken: CannotStart | None = None
        self._pause = FIRST_PAUSE
        self._retry_at = 0.0  # on the monotonic clock

    @property
    def trouble(self) -> str:
        """Why it cannot work now; empty if it can, as far as is known."""
        broken = self._broken
        return f"it cannot be started again ({broken})" if broken else ""

    def map(self, payloads: Sequence[Any]) -> list[Any]:
        """One result per payload, in order; `Failed` where there is none."""
        self._start_threads()
        jobs = [_Job(payload) for payload in payloads]
        start = 0
        while start < len(jobs):
            # Large at first, so that no worker waits for the trainer to let go of the interpreter
            # lock between two pictures; one by one at last, so that none idles at the end.
            size = min(MAX_CHUNK, math.ceil((len(jobs) - start) / (4 * self._size)))
            self._put(deque(jobs[start : start + size]))
            start += size
        return [job.result.result() for job in jobs]

    def pids(self) -> list[int]:
        """Process ids of the workers that are running now."""
        with self._lock:
            return sorted(worker.pid for worker in self._live)

    def close(self) -> None:
        """Kill the workers; calls of `map` that still wait raise `PoolClosed`."""
        with self._lock:
            self._closed.set()
            for worker in self._live:
                worker.kill()
            with contextlib.suppress(queue.Empty):
                while True:
                    _fail(self._chunks.get_nowait() or (), PoolClosed())
            for _ in self._threads:
                self._chunks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_threads(self) -> None:
        with self._lock:
            if self._closed.is_set():
                raise PoolClosed
            while len(self._threads) < self._size:
                thread = threading.Thread(target=self._serve, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _put(self, chunk: _Chunk) -> None:
        with self._lock:
            if self._closed.is_set():
                _fail(chunk, PoolClosed())
            elif chunk:
                self._chunks.put(chunk)

    def _serve(self) -> None:
        """Feed one worker until the pool is closed."""
        worker: _Worker | None = None
        while (chunk := self._next_chunk()) is not None:
            try:
                worker = self._living(worker)
                if chunk:
                    self._work_off(chunk, worker)
            except _OthersWork:
                self._put(chunk)
                self._closed.wait(LONGEST_PAUSE)
            except Exception as error:
                # The caller of `map` has to know; without an answer it would wait for ever.
                _fail(chunk, error)
                if worker is not None:
                    self._retire(worker)
        if worker is not None:
            self._retire(worker)

    def _next_chunk(self) -> _Chunk | None:
        """None at the end; an empty one when it is time to start a worker that nobody waits for."""
        left = max(0.0, self._retry_at - time.monotonic()) if self._broken else None
        try:
            return self._chunks.get(timeout=left)
        except queue.Empty:
            return deque()

    def _work_off(self, chunk: _Chunk, worker: _Worker) -> None:
        try:
            worker.send(chunk)
            while chunk:
                status, value = worker.receive(chunk[0].number, self._timeout)
                if status != "going on":
                    chunk.popleft().result.set_result(value if status == "done" else Failed(value))
        except TimeoutError:
            self._retire(worker)
            reason = f"no answer within {self._timeout:g} s"
            log.warning("worker %d: %s; it is replaced", worker.pid, reason)
            chunk.popleft().result.set_result(TimedOut(reason))
            self._put(chunk)
        except (EOFError, OSError):
            code = self._retire(worker)
            log.warning("worker %d died (exit code %d); it is replaced", worker.pid, code)
            self._blame(chunk.popleft())
            self._put(chunk)

    def _blame(self, job: _Job) -> None:
        """Answers come in order, so the first one missing belongs to the job it died on."""
        job.deaths += 1
        if job.deaths < self._max_deaths:
            self._put(deque([job]))
        else:
            processes = "process" if job.deaths == 1 else "processes"
            job.result.set_result(LostWorker(f"{job.deaths} worker {processes} died on it"))

    def _living(self, worker: _Worker | None) -> _Worker:
        """`worker` if it is still there, else a new one."""
        if worker is not None:
            if worker.is_alive():
                return worker
            self._retire(worker)
        broken = self._broken
        if broken is not None and time.monotonic() < self._retry_at:
            raise CannotStart(str(broken))
        try:
            worker = self._start()
        except CannotStart as error:
            with self._lock:
                if any(each.is_alive() for each in self._live):
                    raise _OthersWork from error
                if self._broken is broken:  # else another worker was the first of this round
                    if broken is not None:  # the first time, the caller of `map` tells it
                        log.warning("%s; next try in %g s", error, self._pause)
                    self._retry_at = time.monotonic() + self._pause
                    # without its traceback, whose frames hold pictures
                    self._broken = CannotStart(str(error))
                    self._pause = min(2 * self._pause, LONGEST_PAUSE)
            raise
        self._broken, self._pause = None, FIRST_PAUSE
        return worker

    def _start(self) -> _Worker:
        for _ in range(START_ATTEMPTS):
            with self._lock:
                if self._closed.is_set():
                    raise PoolClosed
                worker = _Worker(self._factory, self._options, self._environment, self._timeout)
                self._live.add(worker)
            try:
                status, reason = worker.receive(START, self._start_timeout)
            except TimeoutError:
                status, reason = (
                    "failed",
                    f"{self._factory} is not ready after {self._start_timeout:g} s",
                )
            except (EOFError, OSError):
                code = self._retire(worker)
                log.warning("worker %d died at its start (exit code %d)", worker.pid, code)
                continue
            if status == "ready":
                return worker
            self._retire(worker)
            raise CannotStart(reason)
        raise CannotStart(
            f"{START_ATTEMPTS} worker processes for {self._factory} died before they were ready; "
            "their messages are above, if they left any; is there enough memory?"
        )

    def _retire(self, worker: _Worker) -> int:
        with self._lock:
            self._live.discard(worker)
        return worker.bury()


class PooledScorer(Scorer):
    """A reward whose work is done in a pool of its own."""

    pool: WorkerPool

    @property
    def trouble(self) -> str:
        return self.pool.trouble

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OthersWork(Exception):
    """One worker cannot be started, but there are others."""


def _fail(jobs: Iterable[_Job], error: Exception) -> None:
    for job in jobs:
        job.result.set_exception(error)


def _worker_environment() -> dict[str, str]:
    package_root = str(Path(__file__).parents[3])
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package_root, inherited] if inherited else [package_root]),
        # `python -m` would put the current directory, and what lies in it, first on the path.
        "PYTHONSAFEPATH": "1",
    }
