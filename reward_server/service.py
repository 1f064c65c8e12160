"""The rewards of one server, from their first warm-up to the last answer before it ends."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import zip_longest

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling import in_background
from flow_grpo.rewards.failure import Failed, describe
from flow_grpo.rewards.frames import Sample
from flow_grpo.rewards.protocol import MASK, SOURCE, BatchScores, Scorer, joined, score
from reward_server.batching import Batcher, ScorerFailed
from reward_server.errors import ApiError, Busy, shown
from reward_server.isolated import SCORING_BYTES, IsolatedScorer
from reward_server.limits import Limits
from reward_server.memory import Memory
from reward_server.metrics import Metrics
from reward_server.pictures import RGB_BYTES, decode
from reward_server.room import Place, Room
from reward_server.schemas import ScoreRequest

log = logging.getLogger(__name__)

START_RETRY_AFTER = 2  # seconds
STOP_RETRY_AFTER = 1  # another server may take it at once
DOWN_RETRY_AFTER = 5
DECODERS = min(4, os.cpu_count() or 1)  # threads
WORKERS_TO_WARM = 8  # at least, of a scorer with workers of its own


class Desk:
    """One reward: its scorer, the queue before it and the room that the queue may take."""

    def __init__(self, scorer: Scorer, batcher: Batcher, room: Room) -> None:
        self.scorer = scorer
        self.batcher = batcher
        self.room = room
        self.warm = False

    @property
    def ready(self) -> bool:
        return self.warm and not self.trouble

    @property
    def trouble(self) -> str:
        """Why it cannot score now; empty if it can."""
        if self.batcher.hangs:
            return (
                "a call of its scorer does not come back; restart the server, with --isolate "
                "to have such a scorer restarted alone"
            )
        return self.scorer.trouble


class Service:
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
        self._accepted = 0  # requests that will be answered whatever happens
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")
        memory = Memory(limits.max_memory_bytes)
        self.desks: dict[str, Desk] = {}
        for name, scorer in scorers.items():
            isolated = isinstance(scorer, IsolatedScorer)
            batcher = Batcher(
                name,
                scorer,
                max_batch=max_batch,
                max_wait=max_wait,
                metrics=self.metrics,
                timeout=math.inf if isolated else score_timeout,  # that one keeps time itself
            )
            room = Room(limits, memory, RGB_BYTES + (SCORING_BYTES if isolated else 0))
            self.desks[name] = desk = Desk(scorer, batcher, room)
            queue_length = self.metrics.queue_images.labels(name)
            queue_length.set_function(lambda room=desk.room: room.images)

    @property
    def idle(self) -> bool:
        return self._accepted == 0

    async def score(self, request: ScoreRequest) -> BatchScores:
        self._check(request)
        desk = self._open_desk(request.reward)
        metadata = request.metadata or [{} for _ in request.samples]
        self._accepted += 1
        try:
            with desk.room.hold(_pictures(request)) as place:
                if request.answers is not None:  # texts: nothing to decode
                    parts = desk.batcher.submit(request.answers, request.prompts, metadata)
                    return await _scores(desk.batcher.name, parts)
                images, sources, masks = await asyncio.get_running_loop().run_in_executor(
                    self._decoders, self._decode, request, place
                )
                for name, pictures in ((SOURCE, sources), (MASK, masks)):
                    metadata = [
                        row if picture is None else {**row, name: picture}
                        for row, picture in zip_longest(metadata, pictures)
                    ]
                parts = desk.batcher.submit(images, request.prompts, metadata)
                place.used_by(parts)
                del (
                    images,
                    sources,
                    masks,
                    pictures,
                    metadata,
                )  # what the scorer is done with, nobody else holds
                return await _scores(desk.batcher.name, parts)
        finally:
            self._accepted -= 1

    def _decode(
        self, request: ScoreRequest, place: Place
    ) -> tuple[list[Sample], list[Sample | None], list[Image.Image | None]]:
        others = request.sources or (), request.masks or ()
        limit = self.limits.max_pixels
        return decode(request.images, *others, max_pixels=limit, claim=place.claim)

    def fail_overdue(self) -> None:
        for desk in self.desks.values():
            desk.batcher.fail_overdue()

    def check_ready(self) -> None:
        """Raise what a client is told while not all rewards can be had."""
        if self.stopping:
            raise Busy("shutting_down", "the server is shutting down", STOP_RETRY_AFTER)
        for name, desk in self.desks.items():
            self._check_warm(name)
            if trouble := desk.trouble:
                message = f"the reward {name!r} is down: {trouble}"
                raise Busy("reward_down", message, DOWN_RETRY_AFTER)

    def _check_warm(self, name: str) -> None:
        if not self.desks[name].warm:
            raise Busy(
                "starting", f"the reward {name!r} is still starting; come back", START_RETRY_AFTER
            )

    def _open_desk(self, name: str) -> Desk:
        if self.stopping:
            self.check_ready()
        self._check_warm(name)
        if trouble := self.desks[name].trouble:
            raise ApiError("scorer_down", f"the reward {name!r} is down: {trouble}")
        return self.desks[name]

    def _check(self, request: ScoreRequest) -> None:
        if request.reward not in self.desks:
            raise ApiError(
                "unknown_reward",
                f"unknown reward {shown(request.reward)}; this server has "
                f"{', '.join(self.desks) or 'none'}; start it with --rewards to have others",
            )
        images, prompts = len(request.samples), len(request.prompts)
        others = request.sources or request.masks
        if (request.images or others) and request.answers is not None:
            raise ApiError("invalid_request", "there are images and answers; send one of them")
        if not images:
            raise ApiError("no_images", "images is empty; send at least one image, or one answer")
        pictures, most = _pictures(request), self.limits.max_images
        if pictures > most:
            what = "images" if pictures == images else "frames of clips"
            what = "images and sources" if request.sources else what
            what = "images, sources and masks" if request.masks else what
            raise ApiError(
                "too_many_images", f"{pictures} {what} in one request; at most {most} are allowed"
            )
        if prompts != images:
            raise ApiError(
                "counts_differ", f"{images} images but {prompts} prompts; send one per image"
            )
        for name in ("metadata", "sources", "masks"):
            given = getattr(request, name)
            if given is not None and len(given) != images:
                raise ApiError(
                    "counts_differ",
                    f"{images} images but {len(given)} {name}; send one per image or none",
                )

    def warm_up(self, workers: int | None = None) -> None:
        """Score a small picture, or an answer, with each reward, so that no request waits for
        models to load.

        A scorer that takes several calls at a time gets one for each of its workers.
        """
        for name, desk in self.desks.items():
            several = desk.scorer.concurrent_calls > 1
            count = max(workers or 0, WORKERS_TO_WARM) if several else 1
            start = time.monotonic()
            is_answer = desk.scorer.kind == "answer"
            sample = "No idea." if is_answer else Image.new("RGB", (64, 64), "grey")
            samples = [sample] * count
            metadata = [{"answer": "1"} if is_answer else {} for _ in samples]
            prompts = ['a sign that says "A"'] * count
            try:
                [first, *_] = score(desk.scorer, samples, prompts, metadata).values
            except UserError as error:
                raise UserError(f"reward {name!r}: {error}") from error
            except Exception as error:
                first = Failed(describe(error))
            if isinstance(first, Failed):
                # Perhaps it needs metadata of its own: only real requests can tell.
                what = "an answer" if is_answer else "a grey picture"
                log.warning("reward %r gave no score for %s: %s", name, what, first.reason)
            desk.warm = True
            log.info("reward %r is ready after %.1f s", name, time.monotonic() - start)

    def stop(self) -> None:
        """Take no more requests; those accepted are still answered."""
        self.stopping = True

    def close(self) -> None:
        for desk in self.desks.values():
            desk.batcher.close()
            desk.scorer.close()
        self._decoders.shutdown(wait=False)

    def kill(self, seconds: float) -> None:
        """End the processes of all scorers, whatever hangs."""
        wait([in_background(desk.scorer.close) for desk in self.desks.values()], seconds)


def _pictures(request: ScoreRequest) -> int:
    """How many there are, each frame of a clip counted."""
    every = (*request.samples, *(request.sources or ()), *(request.masks or ()))
    return sum(1 if isinstance(sample, str) else len(sample or ()) for sample in every)


async def _scores(name: str, parts: "list[Future[BatchScores]]") -> BatchScores:
    try:
        return joined(await asyncio.gather(*map(asyncio.wrap_future, parts)))
    except ScorerFailed as error:
        raise ApiError(error.code, f"reward {name!r} failed: {error}") from error
    finally:
        for part in parts:
            part.cancel()  # of a client that went away, or whose other part failed
