"""Call a scorer in the background, in bounded time and without raising."""

import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from flow_grpo.audio import Audio
from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import (
    Failed,
    FailurePolicy,
    RetryTimer,
    ScoreTooLarge,
    TooFewFrames,
    describe_error,
)
from flow_grpo.rewards.frames import Sample, is_video, sample_kind
from flow_grpo.rewards.protocol import (
    AUDIO,
    BatchScores,
    ContractError,
    MetadataRows,
    Samples,
    accepts_scorer_arguments,
    as_scorer,
    score,
)
from flow_grpo.rewards.turns import device_turn
from flow_grpo.rewards.workers import SerialThread, run_in_thread
from flow_grpo.rewards.workers.pool import WorkerStartError

log = logging.getLogger(__name__)

ImagesFuture = "Future[list[Sample | None]]"  # None for an image with non-finite pixels

RAISE_FRAMES = "raise frames, or drop the reward"
# Errors in the code or the setup: another attempt would fail in the same way.
NOT_RETRIED = (
    UserError,
    TypeError,
    AttributeError,
    NameError,
    ImportError,
    AssertionError,
    ValueError,
    LookupError,
    ArithmeticError,
)
DOWN_TIMEOUT_FRACTION = 0.1  # of the timeout, to wait for an earlier batch that hangs
TURN_TIMEOUT_FACTOR = 4.0  # of the timeout, to wait for rewards with offload="turns"
INTERRUPT_SECONDS = 0.5  # between checks for a stop while people are asked
DRY_RUN_SCORE = 0.5  # the mean of win rates
NON_FINITE_IMAGE = Failed("its pixels are not finite (NaN)")
NON_FINITE_AUDIO = Failed("its sound is empty or not finite (NaN)")
NO_AUDIO = Failed("it has no sound")


class GuardedScorer:
    """Calls one scorer, one batch after the other, in its own thread.

    A batch whose call raises is retried as the policy says; then all its scores are `Failed`. After
    that, batches get a single attempt until one succeeds, so that a dead reward does not cost its
    whole timeout for every batch. A scorer with `handles_retries` is called once. Batches of an
    `interactive` scorer are scored concurrently.
    """

    def __init__(self, name: str, scorer: Any, policy: FailurePolicy) -> None:
        self.name = name
        self.scorer = as_scorer(scorer)
        self.last_error = ""
        self.kind = self.scorer.kind  # of the last samples
        self.closed = False  # failures are no longer logged
        self.is_dry_run = False  # people are not asked
        self.interrupted: Callable[[], bool] = lambda: False  # no longer wait for people
        self._policy = policy
        # batches that failed because of the scorer's code; -inf once a batch has succeeded
        self.permanent_errors = 0
        self.thread = SerialThread()
        self._down = False
        self._running: Future | None = None

    def submit(
        self, images: ImagesFuture, prompts: list[str], metadata: MetadataRows
    ) -> "Future[BatchScores]":
        """Queue a batch; samples with invalid pixels or sound fail without a call."""
        if self.scorer.interactive:  # people should see all batches at once
            return run_in_thread(lambda: self._score(images, prompts, metadata))
        return self.thread.submit(lambda: self._score(images, prompts, metadata))

    def smoke_test(self, samples: Samples, prompts: list[str], metadata: MetadataRows) -> None:
        """Call the scorer and raise `UserError` for errors in its code or in what it returns.

        Other failures are ignored: a server may be up by the time it is needed.
        """
        reward, kind = f"reward {self.name!r}", sample_kind(samples)
        running = run_in_thread(lambda: score(self.scorer, samples, prompts, metadata))
        wait([running], self._policy.timeout)
        if not running.done():
            limit = f"reward_timeout={self._policy.timeout:g}"
            raise UserError(f"hangs: no scores for two {kind}s within {limit} s", field=reward)
        error = running.exception()
        # a pool keeps trying to start its workers, but a run should not start without them
        if isinstance(error, WorkerStartError) or (error is not None and is_permanent_error(error)):
            hint = ""
            if isinstance(error, ContractError) or not accepts_scorer_arguments(self.scorer):
                hint = (
                    f"define it as {self.name}({kind}s, prompts, metadata) and return a list of "
                    f"one number per {kind}"
                )
            reason = describe_error(error) + _error_location(error)
            raise UserError(f"fails in a test call: {reason}", field=reward, hint=hint) from error
        scores = [] if error is not None else running.result().values
        if wrong := [each for each in scores if isinstance(each, ScoreTooLarge | TooFewFrames)]:
            hint = "" if isinstance(wrong[0], ScoreTooLarge) else RAISE_FRAMES
            raise UserError(f"fails in a test call: {wrong[0].reason}", field=reward, hint=hint)

    def check_length(self, sample: Sample | str) -> None:
        """Raise a UserError if a sample has fewer frames than the scorer needs."""
        reward = f"reward {self.name!r}"
        count, least = len(sample) if is_video(sample) else 1, self.scorer.min_frames
        if not isinstance(least, int):
            raise UserError("must be an integer", field=f"min_frames of {reward}", value=least)
        if count < least:
            problem = f"cannot be used: {TooFewFrames(count, least).reason}"
            raise UserError(problem, field=reward, hint=RAISE_FRAMES)

    def _score(
        self, images: ImagesFuture, prompts: list[str], metadata: MetadataRows
    ) -> BatchScores:
        """Score a batch; never raises. Failures become `Failed` and are recorded."""
        try:
            samples = images.result()
            self.kind = sample_kind(samples)
            invalid = self._invalid_samples(samples, metadata)
            valid = [i for i in range(len(samples)) if i not in invalid]
            batch = [[column[i] for i in valid] for column in (samples, prompts, metadata)]
            scores = self._score_with_retries(*batch) if valid else BatchScores([])
            scores = scores.map_values(
                lambda values: _merge(dict(zip(valid, values, strict=True)), invalid)
            )
            self.permanent_errors = -math.inf  # its code works: later failures have other causes
        except BaseException as error:  # also sys.exit() in a reward
            self.permanent_errors += is_permanent_error(error)
            scores = BatchScores(
                [Failed(describe_error(error) + _error_location(error))] * len(prompts)
            )
        self._record_failures(scores.values)
        return scores

    def _invalid_samples(self, samples: Sequence[Any], metadata: MetadataRows) -> dict[int, Failed]:
        """Return why samples cannot be scored, by index."""
        invalid = {i: NON_FINITE_IMAGE for i, sample in enumerate(samples) if sample is None}
        if self.scorer.reads_audio:
            for i, row in enumerate(metadata):
                if not isinstance(audio := row.get(AUDIO), Audio):
                    invalid[i] = NO_AUDIO
                elif not audio.is_finite:
                    invalid[i] = NON_FINITE_AUDIO
        return invalid

    def _score_with_retries(self, *batch: Any) -> BatchScores:
        """Score a batch of columns, retrying as the policy says; raise the last error."""
        if self.scorer.interactive:
            return self._ask_people(batch)
        if self.scorer.handles_retries:
            # the scorer enforces its deadline; this limit stops servers that send byte by byte
            limit = time.monotonic() + 1.1 * self._policy.timeout + 5
            return self._score_once(batch, RetryTimer(iter(()), limit))
        delays = iter(()) if self._down else self._policy.delays()
        attempts = RetryTimer(delays, time.monotonic() + self._policy.timeout)
        self._down = True
        while True:
            try:
                scores = self._score_once(batch, attempts)
                self._down = False
                return scores
            except Exception as error:
                message = f"reward {self.name!r} failed ({describe_error(error)})"
                if self.closed or is_permanent_error(error) or not attempts.wait(message):
                    raise

    def _ask_people(self, batch: Sequence[Any]) -> BatchScores:
        """Score a batch by an interactive scorer; raise TimeoutError when the run is stopped."""
        if self.is_dry_run:
            return BatchScores([DRY_RUN_SCORE] * len(batch[0]))
        running = run_in_thread(lambda: score(self.scorer, *batch))
        while not running.done():
            wait([running], INTERRUPT_SECONDS)
            if self.interrupted():
                raise TimeoutError("the run was stopped")
        return running.result()

    def _score_once(self, batch: Sequence[Any], attempts: RetryTimer) -> BatchScores:
        """Score a batch in a new thread; raise TimeoutError at the deadline of `attempts`.

        A call that timed out goes on, and the next one waits for it first. The time until its turn
        on the device does not count: the deadline moves.
        """
        if self._running is not None:
            wait([self._running], DOWN_TIMEOUT_FRACTION * (attempts.deadline - time.monotonic()))
            if not self._running.done():
                raise TimeoutError("an earlier batch still hangs")
        queued, has_turn = time.monotonic(), Future()
        self._running = run_in_thread(lambda: self._score_in_turn(batch, has_turn))
        wait([has_turn, self._running], return_when=FIRST_COMPLETED)
        if has_turn.done():
            attempts.deadline += time.monotonic() - queued
        wait([self._running], attempts.deadline - time.monotonic())
        if not self._running.done():
            raise TimeoutError(f"no answer within {self._policy.timeout:g} s")
        return self._running.result()

    def _score_in_turn(self, batch: Sequence[Any], has_turn: Future) -> BatchScores:
        """Score a batch once the device is free, which `has_turn` tells the caller."""
        with device_turn(self.scorer, TURN_TIMEOUT_FACTOR * self._policy.timeout):
            has_turn.set_result(None)
            return score(self.scorer, *batch)

    def _record_failures(self, values: Sequence[float]) -> None:
        """Log how many samples have no score, and keep the last reason in `last_error`."""
        missing = [v for v in values if math.isnan(v)]
        if missing and not self.closed and not self.interrupted():
            self.last_error = getattr(missing[-1], "reason", "no score and no reason")
            counts = f"{len(missing)} of {len(values)} {self.kind}s"
            log.warning(
                "reward %r: %s have no score; last error: %s", self.name, counts, self.last_error
            )


def is_permanent_error(error: BaseException) -> bool:
    """Return whether retrying is useless. Errors of `requests` are OSErrors, and may pass."""
    return isinstance(error, NOT_RETRIED) and not isinstance(error, OSError | WorkerStartError)


def _error_location(error: BaseException) -> str:
    """Return " (FILE, line N)" if the error is a bug in the reward's code, else ""."""
    if isinstance(error, UserError) or not is_permanent_error(error):
        return ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({Path(frame.filename).name}, line {frame.lineno})"


def _merge(values: dict[int, float], failed: dict[int, Failed]) -> list[float]:
    """Return the values by index, which together are those of all samples, as a list."""
    by_index = values | failed
    return [by_index[i] for i in range(len(by_index))]
