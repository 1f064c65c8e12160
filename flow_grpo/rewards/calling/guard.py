"""One scorer, called in the background, that answers in bounded time and never raises."""

import logging
import math
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling import SerialThread, in_background
from flow_grpo.rewards.calling.pool import CannotStart
from flow_grpo.rewards.failure import Attempts, Failed, FailurePolicy, TooLarge, describe
from flow_grpo.rewards.frames import kind_of
from flow_grpo.rewards.protocol import (
    BatchScores,
    ContractError,
    Rows,
    Samples,
    as_scorer,
    score,
    takes_call,
)

log = logging.getLogger(__name__)

Pictures = "Future[list[Sample | None]]"  # None for one that was not a number

# Mistakes in the code or the set-up: the next attempt would end the same way.
NOT_RETRIED = (
    *(UserError, TypeError, AttributeError, NameError, ImportError, AssertionError),
    *(ValueError, LookupError, ArithmeticError),
)
DOWN_SHARE = 0.1  # of the time-out, for an earlier batch that hangs to come to its end
# Logged beside rewards, or written of a sample beside its scores: one of them would be lost.
RESERVED = (
    *("avg", "diversity", "failed", "samples", "std_within_group", "zero_std_ratio"),
    *("prompt", "advantage", "group", "answer", "truth", "file", "still"),
)


NO_PICTURE = Failed("its pixels are not numbers (NaN)")


class GuardedScorer:
    """Calls one scorer, one batch after the other, in a thread of its own.

    A batch whose call raises is tried again as the policy says; then all its scores are
    `Failed`. After that, batches get a single attempt until one succeeds, so that a dead
    reward does not cost its whole time-out for every batch. A scorer that was given the
    policy does all that itself, and is called once.
    """

    def __init__(self, name: str, scorer: Any, policy: FailurePolicy) -> None:
        self.name = name
        self.scorer = as_scorer(scorer)
        self.last_error = ""
        self.kind = self.scorer.kind  # of what it scored last
        self.closed = False  # then a failure is no news
        self._policy = policy
        self.mistakes = 0  # batches that failed by a mistake in the scorer, before any succeeded
        self.thread = SerialThread()
        self._down = False
        self._running: Future | None = None

    def submit(
        self, pictures: Pictures, prompts: list[str], metadata: Rows
    ) -> "Future[BatchScores]":
        return self.thread.submit(lambda: self._score(pictures, prompts, metadata))

    def rehearse(self, samples: Samples, prompts: list[str], metadata: Rows) -> None:
        """Tell a mistake in the scorer, or in what it returns, before training starts. Whatever
        else fails may be there when it is needed."""
        running = in_background(lambda: score(self.scorer, samples, prompts, metadata))
        wait([running], self._policy.timeout)
        if not running.done():
            limit = f"reward_timeout={self._policy.timeout:g}"
            kind = kind_of(samples)
            raise UserError(f"reward {self.name!r} hangs: no score for two {kind}s in {limit} s")
        error = running.exception()
        # a pool goes on trying to start its workers, but a run should not begin without them
        if isinstance(error, CannotStart) or (error is not None and is_mistake(error)):
            reason = describe(error) + _place(error)
            if isinstance(error, ContractError) or not takes_call(self.scorer):
                kind = kind_of(samples)
                reason += (
                    f"; write it as {self.name}({kind}s, prompts, metadata), which returns a list "
                    f"with one number per {kind}"
                )
            raise UserError(f"reward {self.name!r} fails when it is tried: {reason}") from error
        scores = [] if error is not None else running.result().values
        if large := [each for each in scores if isinstance(each, TooLarge)]:
            raise UserError(f"reward {self.name!r} fails when it is tried: {large[0].reason}")

    def _score(self, pictures: Pictures, prompts: list[str], metadata: Rows) -> BatchScores:
        """Scores of what there is to score; None stands for one that was not a number."""
        try:
            images = pictures.result()
            self.kind = kind_of(images)
            whole = [i for i, image in enumerate(images) if image is not None]
            batch = [[column[i] for i in whole] for column in (images, prompts, metadata)]
            scores = self._attempts(*batch) if whole else BatchScores([])
            scores = scores.each(lambda values: _spread(values, whole, len(prompts)))
            self.mistakes = -math.inf  # it has worked: what fails now is no mistake of that kind
        except BaseException as error:  # also sys.exit() in a reward
            self.mistakes += is_mistake(error)
            scores = BatchScores([Failed(describe(error) + _place(error))] * len(prompts))
        self._remember(scores.values)
        return scores

    def _attempts(self, *batch: Any) -> BatchScores:
        if self.scorer.has_policy:
            # it keeps the deadline itself; this is for a server that dribbles its answer
            return self._attempt(batch, timeout=1.1 * self._policy.timeout + 5)
        delays = iter(()) if self._down else self._policy.delays()
        attempts = Attempts(delays, time.monotonic() + self._policy.timeout)
        self._down = True
        while True:
            try:
                scores = self._attempt(batch, timeout=attempts.deadline - time.monotonic())
                self._down = False
                return scores
            except Exception as error:
                told = f"reward {self.name!r} failed ({describe(error)})"
                if self.closed or is_mistake(error) or not attempts.wait(told):
                    raise

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


def _spread(values: list[float], places: list[int], count: int) -> list[float]:
    """Values of some of the images, at their places among all."""
    by_place = dict(zip(places, values, strict=True))
    return [by_place.get(i, NO_PICTURE) for i in range(count)]
