"""When a score cannot be had: tried again for a while, then missing with a reason, never zero."""

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flow_grpo.errors import UserError

log = logging.getLogger(__name__)

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
LARGEST_SCORE = 1e12


class Failed(float):
    """A NaN that knows why: stands where an image got no score."""

    reason: str

    def __new__(cls, reason: str) -> "Failed":
        failed = super().__new__(cls, "nan")
        failed.reason = reason
        return failed

    def __repr__(self) -> str:
        return f"Failed({self.reason!r})"


class TooLarge(Failed):
    """A score beyond `LARGEST_SCORE`: its variance, or the loss it weighs, would overflow."""

    def __new__(cls, score: float) -> "TooLarge":
        limit = f"+-{LARGEST_SCORE:g}"
        return super().__new__(cls, f"it returned {score:g}, beyond {limit}; scale the reward down")


class NotAsked(float):
    """Stands where a prompt does not ask for a reward: it does not count there. In arrays of scores
    it is -inf, which no score is."""

    def __new__(cls) -> "NotAsked":
        return super().__new__(cls, "-inf")

    def __reduce__(self) -> tuple:
        return NotAsked, ()


@dataclass(frozen=True)
class FailurePolicy:
    """How long one batch of one reward is tried."""

    retries: int = 8  # attempts after the first
    timeout: float = 300.0  # seconds, all attempts together

    def delays(self) -> Iterator[float]:
        """Seconds to wait before each further attempt: doubling, and spread so that the
        processes of a run do not come back all at once."""
        for attempt in range(self.retries):
            yield min(LONGEST_DELAY, FIRST_DELAY * 2**attempt) * random.uniform(0.75, 1.25)


DEFAULT_POLICY = FailurePolicy()


class Attempts:
    """Waits before each further attempt, until the `delays` or the time are used up.

    By hand, as tenacity counts an attempt also where a busy server asked for the pause
    (`test_a_busy_server_is_waited_for_as_it_says_without_using_up_attempts`).
    """

    def __init__(self, delays: Iterator[float], deadline: float) -> None:
        self._delays = delays
        self.deadline = deadline  # of time.monotonic()
        self.out_of_time = False  # whether it was the time

    def wait(self, told: str = "", pause: float | None = None) -> bool:
        """Tell why, and sleep; False at once where no further attempt is left. A `pause` that a
        server asked for costs no attempt and is not told."""
        delay = next(self._delays, None) if pause is None else pause
        self.out_of_time = delay is not None and time.monotonic() + delay >= self.deadline
        if delay is None or self.out_of_time:
            return False
        if told and pause is None:
            log.warning("%s; trying again in %.1f s", told, delay)
        time.sleep(delay)
        return True


def describe(error: BaseException) -> str:
    """The error in one line."""
    try:
        lines = str(error).strip().splitlines() or ["no reason given"]
    except Exception:  # a custom __str__ may raise
        lines = ["no reason given"]
    return lines[-1] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[-1]}"
