"""The rewards of a server: validation, queueing, decoding, scoring, warm-up and shutdown."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import zip_longest
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Failed, describe_error
from flow_grpo.rewards.frames import Sample
from flow_grpo.rewards.protocol import MASK, SOURCE, BatchScores, Scorer, concatenate_scores, score
from flow_grpo.rewards.workers import run_in_thread
from reward_server.batching import Batcher, ScoringError
from reward_server.errors import ApiError, ServerBusy, truncated_repr
from reward_server.image_decoding import RGB_BYTES_PER_PIXEL, decode_images
from reward_server.isolated import SCORING_BYTES_PER_PIXEL, IsolatedScorer
from reward_server.limits import Limits
from reward_server.memory import MemoryBudget
from reward_server.metrics import Metrics
from reward_server.quota import ImageQuota, Reservation
from reward_server.schemas import ScoreRequest

log = logging.getLogger(__name__)

START_RETRY_AFTER = 2  # seconds
STOP_RETRY_AFTER = 1  # another server may take over at once
DOWN_RETRY_AFTER = 5
DECODER_THREADS = min(4, os.cpu_count() or 1)
MIN_WARM_UP_CALLS = 8  # of a scorer with worker processes


class ServedReward:
    """A scorer with its batcher and quota."""

    def __init__(self, scorer: Scorer, batcher: Batcher, quota: ImageQuota) -> None:
        self.scorer = scorer
        self.batcher = batcher
        self.quota = quota
        self.warm = False

    @property
    def ready(self) -> bool:
        """Whether the reward can score now."""
        return self.warm and not self.unavailable_reason

    @property
    def unavailable_reason(self) -> str:
        """Why the reward cannot score now; empty if it can."""
        if self.batcher.is_hung:
            return "its scorer hangs; restart the server, with --isolate to restart such scorers"
        return self.scorer.unavailable_reason


class Service:
    """All rewards of the server.

    Args:
        scorers: Scorers by name.
        limits: Limits on requests, queues and memory.
        max_batch: Images per call of a scorer.
        max_wait: Seconds that a call waits for more images.
        score_timeout: Seconds after which a call is overdue.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        *,
        limits: Limits,
        max_batch: int = 64,
        max_wait: float = 0.005,
        score_timeout: float = math.inf,
    ) -> None:
        self.limits = limits
        self.metrics = Metrics()
        self.stopping = False
        self._accepted = 0  # pending requests, which are completed before shutdown
        self._decoders = ThreadPoolExecutor(DECODER_THREADS, "decode")
        memory = MemoryBudget(limits.max_memory_bytes)
        self.served_rewards: dict[str, ServedReward] = {}
        for name, scorer in scorers.items():
            isolated = isinstance(scorer, IsolatedScorer)
            batcher = Batcher(
                name,
                scorer,
                max_batch=max_batch,
                max_wait=max_wait,
                metrics=self.metrics,
                timeout=math.inf if isolated else score_timeout,  # isolated scorers have their own
            )
            bytes_per_pixel = RGB_BYTES_PER_PIXEL + (SCORING_BYTES_PER_PIXEL if isolated else 0)
            quota = ImageQuota(limits, memory, bytes_per_pixel)
            self.served_rewards[name] = ServedReward(scorer, batcher, quota)
            queue_length = self.metrics.queue_images.labels(name)
            queue_length.set_function(lambda quota=quota: quota.images)

    @property
    def idle(self) -> bool:
        """Whether no request is pending."""
        return self._accepted == 0

    async def score(self, request: ScoreRequest) -> BatchScores:
        """Decode and score a request; raises `ApiError`."""
        self._check_request(request)
        served = self._get_ready_reward(request.reward)
        metadata = request.metadata or [{} for _ in request.samples]
        self._accepted += 1
        try:
            with served.quota.acquire(_count_images(request)) as reservation:
                if request.answers is not None:  # nothing to decode
                    parts = served.batcher.submit(request.answers, request.prompts, metadata)
                    return await _gather_scores(served.batcher.name, parts)
                images, sources, masks = await asyncio.get_running_loop().run_in_executor(
                    self._decoders, self._decode, request, reservation
                )
                metadata = _add_images(_add_images(metadata, SOURCE, sources), MASK, masks)
                parts = served.batcher.submit(images, request.prompts, metadata)
                reservation.keep_memory_until_done(parts)
                del images, sources, masks, metadata  # freed as soon as the scorer is done
                return await _gather_scores(served.batcher.name, parts)
        finally:
            self._accepted -= 1

    def _decode(
        self, request: ScoreRequest, reservation: Reservation
    ) -> tuple[list[Sample], list[Sample | None], list[Image.Image | None]]:
        """Decode the images, sources and masks of a request; runs in a decoder thread."""
        return decode_images(
            request.images,
            request.sources or (),
            request.masks or (),
            max_pixels=self.limits.max_pixels,
            reserve_memory=reservation.reserve_memory,
        )

    def fail_overdue(self) -> None:
        """Fail the requests of overdue calls."""
        for served in self.served_rewards.values():
            served.batcher.fail_overdue()

    def check_ready(self) -> None:
        """Raise `ServerBusy` if the server is stopping or a reward cannot score."""
        if self.stopping:
            raise ServerBusy("shutting_down", "the server is shutting down", STOP_RETRY_AFTER)
        for name, served in self.served_rewards.items():
            self._check_warm(name)
            if unavailable_reason := served.unavailable_reason:
                message = f"the reward {name!r} is down: {unavailable_reason}"
                raise ServerBusy("reward_down", message, DOWN_RETRY_AFTER)

    def _check_warm(self, name: str) -> None:
        """Raise `ServerBusy` until the reward has been warmed up."""
        if not self.served_rewards[name].warm:
            raise ServerBusy(
                "starting", f"reward {name!r} is still starting; try again later", START_RETRY_AFTER
            )

    def _get_ready_reward(self, name: str) -> ServedReward:
        """Return a reward, or raise `ApiError` if it cannot score now."""
        if self.stopping:
            self.check_ready()
        self._check_warm(name)
        if unavailable_reason := self.served_rewards[name].unavailable_reason:
            raise ApiError("scorer_down", f"the reward {name!r} is down: {unavailable_reason}")
        return self.served_rewards[name]

    def _check_request(self, request: ScoreRequest) -> None:
        """Raise `ApiError` for an unknown reward, or inputs of wrong kinds or numbers."""
        if request.reward not in self.served_rewards:
            raise ApiError(
                "unknown_reward",
                f"unknown reward {truncated_repr(request.reward)}; this server has "
                f"{', '.join(self.served_rewards) or 'none'} (--rewards)",
            )
        images, prompts = len(request.samples), len(request.prompts)
        others = request.sources or request.masks
        if (request.images or others) and request.answers is not None:
            raise ApiError("invalid_request", "images and answers are exclusive; send one of them")
        if not images:
            raise ApiError("no_images", "images is empty; send at least one image or answer")
        total, limit = _count_images(request), self.limits.max_images
        if total > limit:
            if request.masks:
                what = "images, sources and masks"
            elif request.sources:
                what = "images and sources"
            else:
                what = "images" if total == images else "frames of videos"
            raise ApiError(
                "too_many_images", f"{total} {what} in one request; at most {limit} are allowed"
            )
        if prompts != images:
            raise ApiError(
                "counts_differ", f"{images} images but {prompts} prompts; send one per image"
            )
        for name in ("metadata", "sources", "masks"):
            column = getattr(request, name)
            if column is not None and len(column) != images:
                raise ApiError(
                    "counts_differ",
                    f"{images} images but {len(column)} {name}; send one per image or none",
                )

    def warm_up(self, workers: int | None = None) -> None:
        """Score a small sample with each reward, so that no request waits for models to load.

        A scorer with concurrent calls gets one sample per worker.

        Raises:
            UserError: If a reward fails.
        """
        for name, served in self.served_rewards.items():
            concurrent = served.scorer.concurrent_calls > 1
            count = max(workers or 0, MIN_WARM_UP_CALLS) if concurrent else 1
            start = time.monotonic()
            is_text = served.scorer.kind == "answer"
            sample = "No idea." if is_text else Image.new("RGB", (64, 64), "grey")
            samples = [sample] * count
            metadata = [{"answer": "1"} if is_text else {} for _ in samples]
            prompts = ['a sign that says "A"'] * count
            try:
                [first, *_] = score(served.scorer, samples, prompts, metadata).values
            except UserError as error:
                raise UserError(f"reward {name!r}: {error}") from error
            except Exception as error:
                first = Failed(describe_error(error))
            if isinstance(first, Failed):
                # It may need metadata that only real requests have.
                what = "a response" if is_text else "a grey image"
                log.warning("reward %r has no score for %s: %s", name, what, first.reason)
            served.warm = True
            log.info("reward %r is ready after %.1f s", name, time.monotonic() - start)

    def stop(self) -> None:
        """Reject new requests; accepted ones are completed."""
        self.stopping = True

    def close(self) -> None:
        """Score what is queued, then close all scorers."""
        for served in self.served_rewards.values():
            served.batcher.close()
            served.scorer.close()
        self._decoders.shutdown(wait=False)

    def kill(self, seconds: float) -> None:
        """Close all scorers in parallel and wait at most this long, even if some hang."""
        closing = [run_in_thread(served.scorer.close) for served in self.served_rewards.values()]
        wait(closing, seconds)


def _add_images(
    metadata: list[dict[str, Any]], name: str, images: list[Any]
) -> list[dict[str, Any]]:
    """Add each row's image to its metadata; `images` is empty or has one (or None) per row."""
    return [
        row if image is None else {**row, name: image}
        for row, image in zip_longest(metadata, images)
    ]


def _count_images(request: ScoreRequest) -> int:
    """Return the number of images, counting each frame of a video."""
    every = (*request.samples, *(request.sources or ()), *(request.masks or ()))
    return sum(1 if isinstance(sample, str) else len(sample or ()) for sample in every)


async def _gather_scores(name: str, parts: "list[Future[BatchScores]]") -> BatchScores:
    """Wait for the parts of a request and concatenate their scores; raise `ApiError`.

    Other parts are cancelled if one fails or the client disconnects.
    """
    try:
        return concatenate_scores(await asyncio.gather(*map(asyncio.wrap_future, parts)))
    except ScoringError as error:
        raise ApiError(error.code, f"reward {name!r} failed: {error}") from error
    finally:
        for part in parts:
            part.cancel()  # the client disconnected, or another part failed
