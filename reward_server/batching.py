"""One call of the scorer for several requests."""

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

from flow_grpo.rewards.calling.guard import is_mistake
from flow_grpo.rewards.calling.pool import CannotStart
from flow_grpo.rewards.failure import Failed, describe
from flow_grpo.rewards.frames import Sample
from flow_grpo.rewards.protocol import BatchScores, Scorer, as_scorer, score
from reward_server.metrics import Metrics

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 2.0  # seconds; after that a scorer that hangs is left behind


class ScorerFailed(Exception):
    """These images got no scores; `code` is what the client is told."""

    def __init__(self, reason: str, code: str = "scorer_failed") -> None:
        super().__init__(reason)
        self.code = code

    @classmethod
    def because(cls, error: BaseException) -> "ScorerFailed":
        """The scorer raised, or broke its contract, on these images alone."""
        if isinstance(error, ScorerFailed):
            return cls(str(error), error.code)  # without its frames, which hold pictures
        if isinstance(error, CannotStart):  # what was asked is not to blame
            return cls(str(error), "scorer_down")
        # After a mistake in the code, asking again is of no use.
        return cls(describe(error), "scorer_broken" if is_mistake(error) else "scorer_failed")


@dataclass(eq=False)
class Job:
    """Images of one request that are scored together. Cancel `result` to give it up."""

    images: list[Sample]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    arrived: float = field(default_factory=time.monotonic)
    result: "Future[BatchScores]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.count = len(self.images)
        # Also of one that is given up while it waits for its turn.
        self.result.add_done_callback(lambda _: (self.images.clear(), self.metadata.clear()))

    def __len__(self) -> int:
        return self.count


@dataclass(eq=False)
class Running:
    """A call of the scorer."""

    jobs: Sequence[Job]  # that get no answer before it comes back
    started: float = field(default_factory=time.monotonic)
    overdue: bool = False


class Batcher:
    """Threads that call one scorer with what is waiting.

    A call gets up to `max_batch` images: those that came within `max_wait` seconds of the first.
    A request is cut only if it is larger than that. A thread cannot be stopped: after a call that
    takes longer than `timeout` seconds it takes no other until that one has come back.
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
        self._calls: list[Running] = []
        self._waiting: deque[Job] = deque()
        self._images_waiting = 0
        self._changed = threading.Condition()
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
        """One future per part of the request, in order."""
        size = self._max_batch
        parts = [slice(start, start + size) for start in range(0, len(images), size)]
        jobs = [Job(images[part], prompts[part], metadata[part]) for part in parts]
        with self._changed:
            self._waiting.extend(jobs)
            self._images_waiting += len(images)
            self._changed.notify_all()
        return [job.result for job in jobs]

    @property
    def hangs(self) -> bool:
        """Whether no thread is left to take a call."""
        return sum(running.overdue for running in list(self._calls)) == len(self._threads)

    def fail_overdue(self) -> None:
        """Answer what has waited too long for the scorer; to be called now and then."""
        with self._changed:
            started_before = time.monotonic() - self._timeout
            late = [c for c in self._calls if not c.overdue and c.started < started_before]
            for running in late:
                running.overdue = True
            jobs = [job for running in late for job in running.jobs]
            if self.hangs:
                jobs += [job for job in self._waiting if job.result.set_running_or_notify_cancel()]
                self._waiting.clear()
                self._images_waiting = 0
        for job in jobs:
            self._fail(job, ScorerFailed(f"no answer within {self._timeout:g} s", "scorer_timeout"))

    def close(self) -> None:
        """Work off what is waiting, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT)

    def _serve(self) -> None:
        while jobs := self._next_batch():
            # False for one that was cancelled: its client is gone.
            jobs = [job for job in jobs if job.result.set_running_or_notify_cancel()]
            if jobs:
                with contextlib.suppress(_CameBackLate):  # all were answered
                    self._score(jobs)

    def _next_batch(self) -> list[Job]:
        """Empty once all is done and closed."""
        with self._changed:
            while self._waiting or not self._closed:
                if not self._waiting:
                    self._changed.wait()
                    continue
                left = self._waiting[0].arrived + self._max_wait - time.monotonic()
                if left <= 0 or self._closed or self._images_waiting >= self._max_batch:
                    return self._pop_batch()
                self._changed.wait(left)
            return []

    def _pop_batch(self) -> list[Job]:
        jobs, size = [], 0
        while self._waiting and size + len(self._waiting[0]) <= self._max_batch:
            jobs.append(self._waiting.popleft())
            size += len(jobs[-1])
        self._images_waiting -= size
        return jobs

    def _score(self, jobs: Sequence[Job], behind: Sequence[Job] = ()) -> None:
        """`behind` come next on this thread: they are given up with `jobs` if the call hangs."""
        try:
            scores = self._call(jobs, behind)
        except _CameBackLate:
            raise
        except BaseException as error:  # the thread must live: nothing else serves this reward
            # After a time-out each of them might take as long again.
            if len(jobs) == 1 or _is_timeout(error):
                for job in jobs:
                    self._fail(job, error)
                return
            log.warning("reward %r: %s; scoring each request alone", self.name, describe(error))
            for number, job in enumerate(jobs, start=1):
                self._score([job], behind=jobs[number:])
            return
        start = 0
        for job in jobs:
            part = slice(start, start + len(job))
            self._resolve(job, scores.each(lambda values, part=part: values[part]))
            start += len(job)

    def _call(self, jobs: Sequence[Job], behind: Sequence[Job]) -> BatchScores:
        images = [image for job in jobs for image in job.images]
        prompts = [prompt for job in jobs for prompt in job.prompts]
        metadata = [entry for job in jobs for entry in job.metadata]
        self._metrics.batch_images.labels(self.name).observe(len(images))
        running = Running([*jobs, *behind])
        with self._metrics.scorer_seconds.labels(self.name).time(), self._watched(running):
            return score(self._scorer, images, prompts, metadata)

    @contextlib.contextmanager
    def _watched(self, running: Running) -> Iterator[None]:
        with self._changed:
            self._calls.append(running)
        try:
            yield
        finally:
            with self._changed:
                self._calls.remove(running)
            if running.overdue:
                took = time.monotonic() - running.started
                log.warning("reward %r came back after %.0f s; it goes on", self.name, took)
                raise _CameBackLate

    def _resolve(self, job: Job, scores: BatchScores) -> None:
        failed = sum(isinstance(value, Failed) for value in scores.values)
        self._metrics.images_failed.labels(self.name).inc(failed)
        self._metrics.images_scored.labels(self.name).inc(len(job) - failed)
        job.result.set_result(scores)

    def _fail(self, job: Job, error: BaseException) -> None:
        known = isinstance(error, ScorerFailed)  # whose traceback would be ours
        log.warning(
            "reward %r failed on %d images%s",
            *(self.name, len(job), f": {error}" if known else ""),
            exc_info=None if known else error,
        )
        self._metrics.images_failed.labels(self.name).inc(len(job))
        job.result.set_exception(ScorerFailed.because(error))


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, ScorerFailed) and error.code == "scorer_timeout"


class _CameBackLate(Exception):
    """A call whose images were given up meanwhile."""
