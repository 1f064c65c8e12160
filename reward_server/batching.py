"""Dynamic batching: threads that score the images of several requests in one call.

A call takes the images that arrived within `max_wait` seconds of the first, up to `max_batch`. If
it raises, its requests are scored one by one, so that only the request at fault fails. A thread
cannot be stopped, so a call that hangs is marked overdue, its requests fail, and its thread takes
no other call until it returns.
"""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from flow_grpo.rewards.failure import Failed, describe_error
from flow_grpo.rewards.frames import Sample
from flow_grpo.rewards.protocol import BatchScores, Scorer, as_scorer, score
from flow_grpo.rewards.workers.guard import is_permanent_error
from flow_grpo.rewards.workers.pool import WorkerStartError
from reward_server.metrics import Metrics

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 2.0  # seconds to wait for a thread, which may hang


class ScoringError(Exception):
    """Images could not be scored; `code` is the error code for the client."""

    def __init__(self, reason: str, code: str = "scorer_failed") -> None:
        super().__init__(reason)
        self.code = code

    @classmethod
    def from_exception(cls, error: BaseException) -> "ScoringError":
        """Convert an exception of a scorer."""
        if isinstance(error, ScoringError):
            return cls(str(error), error.code)  # a copy: the traceback references images
        if isinstance(error, WorkerStartError):  # not the request's fault
            return cls(str(error), "scorer_down")
        code = "scorer_broken" if is_permanent_error(error) else "scorer_failed"
        return cls(describe_error(error), code)


@dataclass(eq=False)
class Job:
    """Images of one request that are scored together; cancel `result` to abandon it."""

    images: list[Sample]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    arrived: float = field(default_factory=time.monotonic)
    result: "Future[BatchScores]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.count = len(self.images)
        # frees the images, also of a job that is cancelled in the queue
        self.result.add_done_callback(lambda _: (self.images.clear(), self.metadata.clear()))

    def __len__(self) -> int:
        return self.count


@dataclass(eq=False)
class ActiveCall:
    """A running call of the scorer."""

    jobs: Sequence[Job]  # jobs that wait for this call
    started: float = field(default_factory=time.monotonic)
    overdue: bool = False


class Batcher:
    """Threads that call one scorer with batches of queued images.

    Args:
        name: Name of the reward, for messages and metrics.
        scorer: The scorer; `concurrent_calls` of it is the number of threads.
        max_batch: Images per call. Only larger requests are split.
        max_wait: Seconds that a call waits for more images.
        metrics: Prometheus metrics.
        timeout: Seconds after which a call is overdue.
    """

    def __init__(
        self,
        name: str,
        scorer: Scorer,
        *,
        max_batch: int,
        max_wait: float,
        metrics: Metrics,
        timeout: float = math.inf,
    ) -> None:
        self.name = name
        self._scorer = as_scorer(scorer)
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._metrics = metrics
        self._timeout = timeout
        self._calls: list[ActiveCall] = []
        self._waiting: deque[Job] = deque()
        self._images_waiting = 0
        self._condition = threading.Condition()
        self._closed = False
        calls = range(self._scorer.concurrent_calls)
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in calls]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        images: list[Sample],
        prompts: list[str],
        metadata: list[dict[str, Any]],
    ) -> "list[Future[BatchScores]]":
        """Queue the images of a request and return one future per part of it, in order."""
        size = self._max_batch
        parts = [slice(start, start + size) for start in range(0, len(images), size)]
        jobs = [Job(images[part], prompts[part], metadata[part]) for part in parts]
        with self._condition:
            self._waiting.extend(jobs)
            self._images_waiting += len(images)
            self._condition.notify_all()
        return [job.result for job in jobs]

    @property
    def is_hung(self) -> bool:
        """Whether all threads are in overdue calls."""
        return sum(running.overdue for running in list(self._calls)) == len(self._threads)

    def fail_overdue(self) -> None:
        """Fail the jobs of overdue calls, and all queued jobs if every thread hangs.

        Must be called regularly.
        """
        with self._condition:
            started_before = time.monotonic() - self._timeout
            late = [c for c in self._calls if not c.overdue and c.started < started_before]
            for running in late:
                running.overdue = True
            jobs = [job for running in late for job in running.jobs]
            if self.is_hung:
                jobs += [job for job in self._waiting if job.result.set_running_or_notify_cancel()]
                self._waiting.clear()
                self._images_waiting = 0
        error = ScoringError(f"no result within {self._timeout:g} s", "scorer_timeout")
        for job in jobs:
            self._fail(job, error)

    def close(self) -> None:
        """Score what is queued, then end the threads."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT)

    def _serve(self) -> None:
        """Score batches until the batcher is closed; the target of its threads."""
        while jobs := self._next_batch():
            # False for a cancelled job, whose client has disconnected.
            jobs = [job for job in jobs if job.result.set_running_or_notify_cancel()]
            if jobs:
                with contextlib.suppress(_OverdueCallReturned):  # its jobs have failed already
                    self._score(jobs)

    def _next_batch(self) -> list[Job]:
        """Wait for the next batch; empty once the batcher is closed and the queue is empty."""
        with self._condition:
            while self._waiting or not self._closed:
                if not self._waiting:
                    self._condition.wait()
                    continue
                left = self._waiting[0].arrived + self._max_wait - time.monotonic()
                if left <= 0 or self._closed or self._images_waiting >= self._max_batch:
                    return self._pop_batch()
                self._condition.wait(left)
            return []

    def _pop_batch(self) -> list[Job]:
        """Return the longest waiting jobs that fit into a batch, and remove them from the queue."""
        jobs, size = [], 0
        while self._waiting and size + len(self._waiting[0]) <= self._max_batch:
            jobs.append(self._waiting.popleft())
            size += len(jobs[-1])
        self._images_waiting -= size
        return jobs

    def _score(self, jobs: Sequence[Job], remaining: Sequence[Job] = ()) -> None:
        """Score jobs in one call and set their results; if it fails, score each job by itself.

        `remaining` are scored next on this thread, and fail with these if the call hangs.
        """
        try:
            scores = self._call(jobs, remaining)
        except _OverdueCallReturned:
            raise
        except BaseException as error:  # the thread must survive, even SystemExit
            # After a timeout each job might take as long again.
            if len(jobs) == 1 or _is_timeout(error):
                for job in jobs:
                    self._fail(job, error)
                return
            reason = describe_error(error)
            log.warning("reward %r: %s; scoring each request separately", self.name, reason)
            for index, job in enumerate(jobs):
                self._score([job], remaining=jobs[index + 1 :])
            return
        start = 0
        for job in jobs:
            part = slice(start, start + len(job))
            self._resolve(job, scores.map_values(lambda values, part=part: values[part]))
            start += len(job)

    def _call(self, jobs: Sequence[Job], remaining: Sequence[Job]) -> BatchScores:
        """Call the scorer once with all images of `jobs`; `remaining` wait for this call."""
        images = [image for job in jobs for image in job.images]
        prompts = [prompt for job in jobs for prompt in job.prompts]
        metadata = [entry for job in jobs for entry in job.metadata]
        self._metrics.batch_images.labels(self.name).observe(len(images))
        running = ActiveCall([*jobs, *remaining])
        with self._metrics.scorer_seconds.labels(self.name).time(), self._track_call(running):
            return score(self._scorer, images, prompts, metadata)

    @contextlib.contextmanager
    def _track_call(self, running: ActiveCall) -> Iterator[None]:
        """Context manager that registers a call for `fail_overdue`.

        Raises:
            _OverdueCallReturned: On exit, if the call was overdue and its jobs have failed.
        """
        with self._condition:
            self._calls.append(running)
        try:
            yield
        finally:
            with self._condition:
                self._calls.remove(running)
            if running.overdue:
                took = time.monotonic() - running.started
                log.warning("reward %r: overdue call returned after %.0f s", self.name, took)
                raise _OverdueCallReturned

    def _resolve(self, job: Job, scores: BatchScores) -> None:
        """Count the images of a job and set its result."""
        failed = sum(isinstance(value, Failed) for value in scores.values)
        self._metrics.images_failed.labels(self.name).inc(failed)
        self._metrics.images_scored.labels(self.name).inc(len(job) - failed)
        job.result.set_result(scores)

    def _fail(self, job: Job, error: BaseException) -> None:
        """Log and count the failure of a job, and set `ScoringError` as its result."""
        if isinstance(error, ScoringError):
            log.warning("reward %r failed on %d images: %s", self.name, len(job), error)
        else:
            log.warning("reward %r failed on %d images", self.name, len(job), exc_info=error)
        self._metrics.images_failed.labels(self.name).inc(len(job))
        job.result.set_exception(ScoringError.from_exception(error))


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, ScoringError) and error.code == "scorer_timeout"


class _OverdueCallReturned(Exception):
    """A call returned after its jobs were failed."""
