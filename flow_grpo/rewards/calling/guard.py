"""One scorer, called in the background, that answers in bounded time and never raises."""

import inspect
import logging
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling.pool import CannotStart
from flow_grpo.rewards.calling.threads import SerialThread, in_background, run_coroutine
from flow_grpo.rewards.failure import Failed, FailurePolicy, NotAsked, describe
from flow_grpo.rewards.frames import (
    CLIP,
    Sample,
    choose_frames,
    frame_rule,
    is_clip,
    kind_of,
    mean_of_frames,
)

log = logging.getLogger(__name__)

# Mistakes in the code or the set-up: the next attempt would end the same way.
NOT_RETRIED = (
    *(UserError, TypeError, AttributeError, NameError, ImportError, AssertionError),
    *(ValueError, LookupError, ArithmeticError),
)
DOWN_SHARE = 0.1  # of the time-out, for an earlier batch that hangs to come to its end
RESERVED_EXTRAS = ("std", "failed")  # logged for every reward
# Logged beside rewards, or written of a sample beside its scores: one of them would be lost.
RESERVED = (
    *("avg", "diversity", "failed", "samples", "std_within_group", "zero_std_ratio"),
    *("prompt", "advantage", "group", "answer", "truth", "file", "still"),
)


NO_PICTURE = Failed("its pixels are not numbers (NaN)")


@dataclass(frozen=True)
class BatchScores:
    values: list[float]  # one per image, `Failed` or `NotAsked` where there is none
    extras: dict[str, list[float]] = field(default_factory=dict)  # further values to log


class ContractError(UserError):
    """What a scorer returned is not what a scorer returns."""


class GuardedScorer:
    """Calls one scorer, one batch after the other, in a thread of its own.

    A batch whose call raises is tried again as the policy says; then all its scores are
    `Failed`. After that, batches get a single attempt until one succeeds, so that a dead
    reward does not cost its whole time-out for every batch. A scorer that was given the
    policy does all that itself, and is called once.
    """

    def __init__(
        self, name: str, scorer: Any, policy: FailurePolicy, *, has_policy: bool = False
    ) -> None:
        self.name = name
        self.scorer = scorer
        self.last_error = ""
        self.kind = "image"  # what it scores
        self.closed = False  # then a failure is no news
        self._policy = policy
        self.has_policy = has_policy
        self.mistakes = 0  # batches that failed by a mistake in the scorer, before any succeeded
        self.thread = SerialThread()
        self._down = False
        self._running: Future | None = None

    def submit(
        self, pictures: "Future[list[Sample | None]]", prompts: list[str], metadata: list[dict]
    ) -> "Future[BatchScores]":
        return self.thread.submit(lambda: self._score(pictures, prompts, metadata))

    def rehearse(self, samples: list[Sample], prompts: list[str], metadata: list[dict]) -> None:
        """Tell a mistake in the scorer, or in what it returns, before training starts. Whatever
        else fails may be there when it is needed."""
        running = in_background(lambda: score(self.scorer, samples, prompts, metadata))
        wait([running], self._policy.timeout)
        if not running.done():
            limit = f"reward_timeout={self._policy.timeout:g}"
            kind = kind_of(samples)
            raise UserError(f"reward {self.name!r} hangs: no score for one {kind} in {limit} s")
        error = running.exception()
        # a pool goes on trying to start its workers, but a run should not begin without them
        if isinstance(error, CannotStart) or (error is not None and is_mistake(error)):
            reason = describe(error) + _place(error)
            raise UserError(f"reward {self.name!r} fails when it is tried: {reason}") from error

    def _score(
        self,
        pictures: "Future[list[Sample | None]]",
        prompts: list[str],
        metadata: list[dict],
    ) -> BatchScores:
        """Of those that are pictures; None stands for one that was not a number."""
        try:
            images = pictures.result()
            self.kind = kind_of(images)
            whole = [i for i, image in enumerate(images) if image is not None]
            batch = [[column[i] for i in whole] for column in (images, prompts, metadata)]
            scores = spread(self._attempts(*batch) if whole else BatchScores([]), whole, prompts)
            self.mistakes = -math.inf  # it has worked: what fails now is no mistake of that kind
        except BaseException as error:  # also sys.exit() in a reward
            self.mistakes += is_mistake(error)
            scores = BatchScores([Failed(describe(error) + _place(error))] * len(prompts))
        self._remember(scores.values)
        return scores

    def _attempts(self, *batch: Any) -> BatchScores:
        if self.has_policy:
            # it keeps the deadline itself; this is for a server that dribbles its answer
            return self._attempt(batch, timeout=1.1 * self._policy.timeout + 5)
        deadline = time.monotonic() + self._policy.timeout
        delays = iter(()) if self._down else self._policy.delays()
        self._down = True
        while True:
            try:
                scores = self._attempt(batch, timeout=deadline - time.monotonic())
                self._down = False
                return scores
            except Exception as error:
                delay = None if is_mistake(error) else next(delays, None)
                if self.closed or delay is None or time.monotonic() + delay >= deadline:
                    raise
                log.warning(
                    "reward %r failed (%s); trying again in %.1f s",
                    *(self.name, describe(error), delay),
                )
                time.sleep(delay)

    def _attempt(self, batch: Sequence[Any], timeout: float) -> BatchScores:
        if self._running is not None:
            wait([self._running], DOWN_SHARE * timeout)
            if not self._running.done():
                raise TimeoutError("it still hangs in an earlier batch")
        self._running = in_background(lambda: score(self.scorer, *batch))
        wait([self._running], timeout)
        if not self._running.done():
            raise TimeoutError(f"no answer within {self._policy.timeout:g} s")
        return self._running.result()

    def _remember(self, values: Sequence[float]) -> None:
        missing = [v for v in values if math.isnan(v)]
        if missing and not self.closed:
            self.last_error = getattr(missing[-1], "reason", "it gave no score and no reason")
            log.warning(
                "reward %r: %d of %d %ss got no score, the last because: %s",
                *(self.name, len(missing), len(values), self.kind, self.last_error),
            )


def is_mistake(error: BaseException) -> bool:
    """Whether trying again is of no use. What `requests` raises is an OSError, whatever else."""
    return isinstance(error, NOT_RETRIED) and not isinstance(error, OSError | CannotStart)


def _place(error: BaseException) -> str:
    """Where in the code of a reward the mistake is."""
    if isinstance(error, UserError) or not is_mistake(error):
        return ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({Path(frame.filename).name}, line {frame.lineno})"


def score(
    scorer: Any, samples: list[Sample], prompts: list[str], metadata: list[dict]
) -> BatchScores:
    """What `scorer` gives for each sample; of clips it sees the frames that its rule chooses, as
    pictures with the same prompt, unless it takes whole clips."""
    rule = frame_rule(scorer)
    samples = choose_frames(samples, rule)
    if rule == CLIP or not any(map(is_clip, samples)):
        return _call(scorer, samples, prompts, metadata)
    clips = [sample if is_clip(sample) else [sample] for sample in samples]
    counts = [len(clip) for clip in clips]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    frames = [frame for clip in clips for frame in clip]
    scores = _call(scorer, frames, [prompts[r] for r in rows], [metadata[r] for r in rows])
    extras = {name: mean_of_frames(values, counts) for name, values in scores.extras.items()}
    return BatchScores(mean_of_frames(scores.values, counts), extras)


def _call(
    scorer: Any, images: list[Sample], prompts: list[str], metadata: list[dict]
) -> BatchScores:
    """One that is async is waited for."""
    result = scorer(images, prompts, metadata)
    result = run_coroutine(result) if inspect.iscoroutine(result) else result
    return parse_scores(result, len(images), kind_of(images))


def parse_scores(result: Any, count: int, kind: str = "image") -> BatchScores:
    """Hold what a scorer returned against the contract."""
    extras: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, extras = result
    for name in extras:
        if not isinstance(name, str) or name in RESERVED_EXTRAS:
            raise ContractError(f"{name!r} cannot be the name of a further value")
    return BatchScores(
        _numbers("scores", result, count, kind),
        {name: _numbers(f"{name!r}", values, count, kind) for name, values in extras.items()},
    )


def spread(scores: BatchScores, places: list[int], images: Sequence[Any]) -> BatchScores:
    """Scores of some of the images, at their places among all."""

    def column(values: list[float]) -> list[float]:
        by_place = dict(zip(places, values, strict=True))
        return [by_place.get(i, NO_PICTURE) for i in range(len(images))]

    return BatchScores(column(scores.values), {n: column(v) for n, v in scores.extras.items()})


def joined(parts: Sequence[BatchScores]) -> BatchScores:
    """One after the other; parts may differ in their extras."""
    names = dict.fromkeys(name for part in parts for name in part.extras)
    missing = Failed("it was not returned for this image")
    extras = {
        name: [v for part in parts for v in part.extras.get(name, [missing] * len(part.values))]
        for name in names
    }
    return BatchScores([value for part in parts for value in part.values], extras)


def _numbers(what: str, values: Any, count: int, kind: str) -> list[float]:
    try:
        shape = np.shape([] if values is None else values)
    except ValueError as error:
        raise ContractError(f"it returned {what} that are lists of several lengths") from error
    if shape != (count,):
        raise ContractError(
            f"it returned {what} of shape {shape} for {count} {kind}s; it must return one number "
            f"per {kind} (NaN where it cannot score)"
        )
    return [_number(what, value) for value in values]


def _number(what: str, value: Any) -> float:
    if value is None or isinstance(value, Failed | NotAsked):
        return Failed("it returned None") if value is None else value
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ContractError(f"it returned {value!r} among its {what}, not a number") from error
    # no reward is infinite: count it as failed
    return number if math.isfinite(number) else Failed(f"it returned {number}")
