"""A pool of worker processes that survives the crash of any of them.

`concurrent.futures` abandons the whole pool when one process dies; `multiprocessing` and pebble
import the trainer's main script, and with it torch, into every spawned child, or fork it. Here each
worker is a plain child process (process.py) behind a pipe, fed by one thread of the parent.
"""

import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.protocol import Scorer
from flow_grpo.rewards.workers.process import WorkerProcess
from flow_grpo.rewards.workers.supervisor import START_REPLY

log = logging.getLogger(__name__)

MAX_CHUNK = 16
MAX_DEATHS = 2
START_ATTEMPTS = 3
MIN_RESTART_DELAY = 1.0  # seconds before workers that failed to start are started again
MAX_RESTART_DELAY = 60.0

# For engines on the machine of a trainer: one core each, and no GPU.
CPU_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class WorkerDied(Failed):
    """The worker process died on this payload."""


class WorkerTimedOut(WorkerDied):
    """The worker process exceeded the timeout and was killed."""


class WorkerStartError(UserError):
    """No worker process can be started at present."""


class PoolClosed(RuntimeError):
    """The pool was used after `close`, or closed while it was in use."""

    def __init__(self) -> None:
        super().__init__("the worker pool is closed")


@dataclass
class _Job:
    """A payload with its result; `deaths` counts the workers that died on it."""

    payload: Any
    number: int = field(default_factory=itertools.count().__next__)
    result: "Future[Any]" = field(default_factory=Future)
    deaths: int = 0


_Chunk = deque[_Job]


class WorkerPool:
    """Runs `engine(payload)` for many payloads in child processes, each with its own engine.

    A worker that dies is replaced and its remaining payloads are retried. While no worker can be
    started, `map` raises `WorkerStartError` at once, and the pool keeps trying in the background.
    The pool is thread-safe and starts its processes on first use.

    Args:
        factory: "module:function"; each worker calls it once, with `options`, to build its engine.
        options: Keyword arguments of the factory.
        workers: Number of processes.
        timeout: Seconds per payload, after which the worker is replaced and the payload fails. An
            engine that is a generator restarts the clock by yielding ("progress", None).
        start_timeout: Seconds for a worker to build its engine.
        max_deaths: Number of workers that may die on a payload before it fails.
        environment: Environment variables added to the inherited ones.
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
        environment: Mapping[str, str] = CPU_WORKER_ENVIRONMENT,
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
        self._live: set[WorkerProcess] = set()
        self._closed = threading.Event()
        self._start_error: WorkerStartError | None = None
        self._restart_delay = MIN_RESTART_DELAY
        self._retry_at = 0.0  # on the monotonic clock

    @property
    def unavailable_reason(self) -> str:
        """Why no worker can be started at present; "" if nothing is wrong."""
        error = self._start_error
        return f"it cannot be started again ({error})" if error else ""

    def map(self, payloads: Sequence[Any]) -> list[Any]:
        """Return one result per payload, in order; `Failed` for those without one."""
        self._start_threads()
        jobs = [_Job(payload) for payload in payloads]
        start = 0
        while start < len(jobs):
            # Large chunks first, so that workers need not wait for the trainer to release the
            # interpreter lock after each payload; small ones last, so that no worker idles.
            size = min(MAX_CHUNK, math.ceil((len(jobs) - start) / (4 * self._size)))
            self._put(deque(jobs[start : start + size]))
            start += size
        return [job.result.result() for job in jobs]

    def pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        with self._lock:
            return sorted(worker.pid for worker in self._live)

    def close(self) -> None:
        """Kill the workers; pending calls of `map` raise `PoolClosed`."""
        with self._lock:
            self._closed.set()
            for worker in self._live:
                worker.kill()
            with contextlib.suppress(queue.Empty):
                while True:
                    _fail_jobs(self._chunks.get_nowait() or (), PoolClosed())
            for _ in self._threads:
                self._chunks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_threads(self) -> None:
        """Start the threads that feed the workers, unless they run already."""
        with self._lock:
            if self._closed.is_set():
                raise PoolClosed
            while len(self._threads) < self._size:
                thread = threading.Thread(target=self._serve, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _put(self, chunk: _Chunk) -> None:
        """Queue a chunk; fail its jobs if the pool is closed."""
        with self._lock:
            if self._closed.is_set():
                _fail_jobs(chunk, PoolClosed())
            elif chunk:
                self._chunks.put(chunk)

    def _serve(self) -> None:
        """Feed one worker until the pool is closed."""
        worker: WorkerProcess | None = None
        while (chunk := self._next_chunk()) is not None:
            try:
                worker = self._ensure_alive(worker)
                if chunk:
                    self._process_chunk(chunk, worker)
            except _OtherWorkersAlive:
                self._put(chunk)
                self._closed.wait(MAX_RESTART_DELAY)
            except Exception as error:
                # Without a result the caller of `map` would wait forever.
                _fail_jobs(chunk, error)
                if worker is not None:
                    self._retire(worker)
        if worker is not None:
            self._retire(worker)

    def _next_chunk(self) -> _Chunk | None:
        """Wait for the next chunk of jobs; return None once the pool is closed.

        While no worker can be started, return an empty chunk when the start is to be retried.
        """
        timeout = max(0.0, self._retry_at - time.monotonic()) if self._start_error else None
        try:
            return self._chunks.get(timeout=timeout)
        except queue.Empty:
            return deque()

    def _process_chunk(self, chunk: _Chunk, worker: WorkerProcess) -> None:
        """Send jobs to a worker and set their results; requeue the rest if it dies or hangs."""
        try:
            worker.send([(job.number, job.payload) for job in chunk])
            while chunk:
                status, value = worker.receive(chunk[0].number, self._timeout)
                if status != "progress":
                    chunk.popleft().result.set_result(value if status == "done" else Failed(value))
        except TimeoutError:
            self._retire(worker)
            reason = f"no answer within {self._timeout:g} s"
            log.warning("worker %d: %s; replacing it", worker.pid, reason)
            chunk.popleft().result.set_result(WorkerTimedOut(reason))
            self._put(chunk)
        except (EOFError, OSError):
            code = self._retire(worker)
            log.warning("worker %d died (exit code %d); replacing it", worker.pid, code)
            self._count_death(chunk.popleft())
            self._put(chunk)

    def _count_death(self, job: _Job) -> None:
        """Fail the job that a worker died on after `max_deaths`, else retry it."""
        job.deaths += 1
        if job.deaths < self._max_deaths:
            self._put(deque([job]))
        else:
            processes = "process" if job.deaths == 1 else "processes"
            job.result.set_result(WorkerDied(f"{job.deaths} worker {processes} died on it"))

    def _ensure_alive(self, worker: WorkerProcess | None) -> WorkerProcess:
        """Return `worker` if it is alive, else a new one."""
        if worker is not None:
            if worker.is_alive():
                return worker
            self._retire(worker)
        previous = self._start_error
        if previous is not None and time.monotonic() < self._retry_at:
            raise WorkerStartError(str(previous))
        try:
            worker = self._start()
        except WorkerStartError as error:
            with self._lock:
                if any(each.is_alive() for each in self._live):
                    raise _OtherWorkersAlive from error
                if self._start_error is previous:  # else another thread has handled this round
                    if previous is not None:  # the first error is raised by `map`
                        log.warning("%s; next attempt in %g s", error, self._restart_delay)
                    self._retry_at = time.monotonic() + self._restart_delay
                    # a copy without the traceback, whose frames keep images alive
                    self._start_error = WorkerStartError(str(error))
                    self._restart_delay = min(2 * self._restart_delay, MAX_RESTART_DELAY)
            raise
        self._start_error = None
        self._restart_delay = MIN_RESTART_DELAY
        return worker

    def _start(self) -> WorkerProcess:
        """Start a worker and wait until its engine is built.

        Raises:
            WorkerStartError: If building fails, takes too long, or kills `START_ATTEMPTS` workers.
            PoolClosed: If the pool was closed meanwhile.
        """
        for _ in range(START_ATTEMPTS):
            with self._lock:
                if self._closed.is_set():
                    raise PoolClosed
                worker = WorkerProcess(
                    self._factory, self._options, self._environment, self._timeout
                )
                self._live.add(worker)
            try:
                status, reason = worker.receive(START_REPLY, self._start_timeout)
            except TimeoutError:
                status = "failed"
                reason = f"{self._factory} is not ready after {self._start_timeout:g} s"
            except (EOFError, OSError):
                code = self._retire(worker)
                log.warning("worker %d died while starting (exit code %d)", worker.pid, code)
                continue
            if status == "ready":
                return worker
            self._retire(worker)
            raise WorkerStartError(reason)
        raise WorkerStartError(
            f"{START_ATTEMPTS} worker processes for {self._factory} died before they were ready",
            hint="see their output above, and check that there is enough memory",
        )

    def _retire(self, worker: WorkerProcess) -> int:
        with self._lock:
            self._live.discard(worker)
        return worker.kill_and_wait()


class PooledScorer(Scorer):
    """A reward that is computed by a pool of worker processes."""

    pool: WorkerPool

    @property
    def unavailable_reason(self) -> str:
        return self.pool.unavailable_reason

    def close(self) -> None:
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OtherWorkersAlive(Exception):
    """A worker could not be started, but others are running."""


def _fail_jobs(jobs: Iterable[_Job], error: Exception) -> None:
    for job in jobs:
        job.result.set_exception(error)
