"""Failed scores: a call is retried, then its scores are NaN with a reason, never zero."""

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flow_grpo.errors import UserError

log = logging.getLogger(__name__)

FIRST_DELAY = 0.5
MAX_DELAY = 30.0
MAX_SCORE = 1e12


class Failed(float):
    """A NaN with a reason, in place of the score of a sample that could not be scored."""

    reason: str

    def __new__(cls, reason: str) -> "Failed":
        failed = super().__new__(cls, "nan")
        failed.reason = reason
        return failed

    def __repr__(self) -> str:
        return f"Failed({self.reason!r})"

    def __reduce__(self) -> tuple:
        return _restore_failed, (type(self), self.reason)


def _restore_failed(kind: type[Failed], reason: str) -> Failed:
    """Return a failure of `kind`; bypass its constructor, which may take other parameters."""
    return Failed.__new__(kind, reason)


class ScoreTooLarge(Failed):
    """A score beyond `MAX_SCORE`: its variance, or the loss it weights, would overflow."""

    def __new__(cls, score: float) -> "ScoreTooLarge":
        limit = f"+-{MAX_SCORE:g}"
        return super().__new__(cls, f"it returned {score:g}, beyond {limit}; scale the reward down")


class TooFewFrames(Failed):
    """The score that a video reward gives to an image or to a video with too few frames."""

    def __new__(cls, count: int, least: int) -> "TooFewFrames":
        return super().__new__(cls, f"it needs videos of at least {least} frames, not {count}")


class NotApplicable(float):
    """The score of a sample to which the reward does not apply; it is ignored.

    Its value is -inf, which no valid score has, so that it survives in arrays of scores.
    """

    def __new__(cls) -> "NotApplicable":
        return super().__new__(cls, "-inf")

    def __reduce__(self) -> tuple:
        return NotApplicable, ()


@dataclass(frozen=True)
class FailurePolicy:
    """How often and how long one batch of one reward is retried."""

    retries: int = 8  # attempts after the first
    timeout: float = 300.0  # seconds, all attempts together

    def delays(self) -> Iterator[float]:
        """Yield the seconds to wait before each further attempt.

        They grow exponentially, with jitter so that the ranks do not retry at the same moment.
        """
        for attempt in range(self.retries):
            yield min(MAX_DELAY, FIRST_DELAY * 2**attempt) * random.uniform(0.75, 1.25)


DEFAULT_POLICY = FailurePolicy()


class RetryTimer:
    """Waits before each further attempt, until the `delays` or the time are used up.

    tenacity is not used, because it also counts the pauses that a busy server requests as attempts.
    """

    def __init__(self, delays: Iterator[float], deadline: float) -> None:
        self._delays = delays
        self.deadline = deadline  # of time.monotonic()
        self.out_of_time = False  # whether `wait` returned False because of the deadline

    def wait(self, message: str = "", pause: float | None = None) -> bool:
        """Log the reason and sleep, or return False at once if no attempt is left.

        Args:
            message: Why the last attempt failed.
            pause: Seconds that a busy server requested: they use up no attempt and are not logged.
        """
        delay = next(self._delays, None) if pause is None else pause
        self.out_of_time = delay is not None and time.monotonic() + delay >= self.deadline
        if delay is None or self.out_of_time:
            return False
        if message and pause is None:
            log.warning("%s; retrying in %.1f s", message, delay)
        time.sleep(delay)
        return True


def describe_error(error: BaseException) -> str:
    """Return an error as one line."""
    try:
        lines = str(error).strip().splitlines() or ["no reason given"]
    except Exception:  # a custom __str__ may raise
        lines = ["no reason given"]
    return lines[-1] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[-1]}"
