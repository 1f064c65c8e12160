"""One call of the scorer for several requests."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from flow_grpo.rewards import Scorer
from flow_grpo.rewards.failure import Failed, describe
from flow_grpo.rewards.guard import BatchScores, call, is_mistake, parse_scores
from reward_server.metrics import Metrics

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 2.0  # seconds; after that a scorer that hangs is left behind


class ScorerFailed(Exception):
    """The scorer raised, or broke its contract, on these images alone."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe(error))
        self.is_broken = is_mistake(error)  # asking again is of no use


@dataclass(eq=False)
class Job:
    """Images of one request that are scored together. Cancel `result` to give it up."""

    images: list[Image.Image]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    arrived: float = field(default_factory=time.monotonic)
    result: "Future[BatchScores]" = field(default_factory=Future)

    def __len__(self) -> int:
        return len(self.images)


class Batcher:
    """Threads that call one scorer with what is waiting.

    A call gets up to `max_batch` images: those that came within `max_wait` seconds of the first.
    A request is cut only if it is larger than that.
    """

    def __init__(
        self, name: str, scorer: Scorer, *, max_batch: int, max_wait: float, metrics: Metrics
    ) -> None:
        self.name = name
        self._scorer = scorer
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._metrics = metrics
        self._waiting: deque[Job] = deque()
        self._images_waiting = 0
        self._changed = threading.Condition()
        self._closed = False
        # A scorer that can do several calls at a time says so.
        calls = getattr(scorer, "concurrent_calls", 1)
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(calls)]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        images: list[Image.Image],
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

    def _score(self, jobs: Sequence[Job]) -> None:
        try:
            scores = self._call(jobs)
        except BaseException as error:  # the thread must live: nothing else serves this reward
            if len(jobs) > 1:
                log.warning("reward %r: %s; scoring each request alone", self.name, describe(error))
                for job in jobs:
                    self._score([job])
            else:
                self._fail(jobs[0], error)
            return
        start = 0
        for job in jobs:
            part = slice(start, start + len(job))
            extras = {name: values[part] for name, values in scores.extras.items()}
            self._resolve(job, BatchScores(scores.values[part], extras))
            start += len(job)

    def _call(self, jobs: Sequence[Job]) -> BatchScores:
        images = [image for job in jobs for image in job.images]
        prompts = [prompt for job in jobs for prompt in job.prompts]
        metadata = [entry for job in jobs for entry in job.metadata]
        self._metrics.batch_images.labels(self.name).observe(len(images))
        with self._metrics.scorer_seconds.labels(self.name).time():
            return parse_scores(call(self._scorer, images, prompts, metadata), len(images))

    def _resolve(self, job: Job, scores: BatchScores) -> None:
        failed = sum(isinstance(value, Failed) for value in scores.values)
        self._metrics.images_failed.labels(self.name).inc(failed)
        self._metrics.images_scored.labels(self.name).inc(len(job) - failed)
        job.result.set_result(scores)

    def _fail(self, job: Job, error: BaseException) -> None:
        log.warning("reward %r failed on %d images", self.name, len(job), exc_info=error)
        self._metrics.images_failed.labels(self.name).inc(len(job))
        job.result.set_exception(ScorerFailed(error))
