"""Rewards in child processes, which are restarted when they crash or hang."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards import build_scorers
from flow_grpo.rewards.failure import Failed, describe_error
from flow_grpo.rewards.frames import Sample
from flow_grpo.rewards.protocol import BatchScores, Scorer, score
from flow_grpo.rewards.workers import run_in_thread
from flow_grpo.rewards.workers.guard import is_permanent_error
from flow_grpo.rewards.workers.pool import (
    PooledScorer,
    WorkerPool,
    WorkerStartError,
    WorkerTimedOut,
)
from reward_server.batching import ScoringError

log = logging.getLogger(__name__)

SCORING_BYTES_PER_PIXEL = 17  # measured: 6 in transfer to the process, 11 in it
START_TIMEOUT = 1800.0  # seconds; it may download weights

Batch = tuple[list[Sample], list[str], list[dict[str, Any]]]


@dataclass(frozen=True)
class ScorerException:
    """A picklable exception of the scorer, whose class the parent may be unable to import."""

    reason: str
    is_user_error: bool
    is_permanent_error: bool

    @classmethod
    def from_exception(cls, error: Exception) -> "ScorerException":
        return cls(describe_error(error), isinstance(error, UserError), is_permanent_error(error))

    def to_exception(self) -> Exception:
        """Return the exception to raise in the parent: `UserError` or `ScoringError`."""
        if self.is_user_error:
            return UserError(self.reason)
        code = "scorer_broken" if self.is_permanent_error else "scorer_failed"
        return ScoringError(self.reason, code)


WorkerReply = BatchScores | ScorerException | tuple[str, int, str, bool]


def build_scorer(name: str, **settings: Any) -> Scorer:
    """Build a scorer with `build_scorers(**settings)`; reject what requests cannot contain."""
    scorer = build_scorers([name], **settings)[name]
    obstacle = ""
    if scorer.compares_groups:
        obstacle = "compares the images of a group, which a server receives in parts"
    elif scorer.reads_audio:
        obstacle = "scores sound, which requests do not contain"
    if obstacle:
        raise UserError(f"reward {name!r} {obstacle}", hint="score it in the trainer")
    return scorer


def build_worker(name: str, **settings: Any) -> Callable[[Batch | None], WorkerReply]:
    """Build the scorer in the child process and return the function that handles batches.

    The function returns (frames, min_frames, kind, reads_images) of the scorer for None.

    Raises:
        UserError: If the scorer cannot be built.
    """
    try:
        scorer = build_scorer(name, **settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"reward {name!r} cannot be built: {describe_error(error)}") from error

    def handle(batch: Batch | None) -> WorkerReply:
        """Score a batch, or return properties for None; exceptions are returned."""
        if batch is None:
            return scorer.frames, scorer.min_frames, scorer.kind, scorer.reads_images
        try:
            return score(scorer, *batch)
        except Exception as error:
            return ScorerException.from_exception(error)

    return handle


class IsolatedScorer(PooledScorer):
    """Score in a child process that is started now, and replaced when it dies or hangs.

    Args:
        name: Name of the reward.
        timeout: Seconds per batch.
        **settings: Arguments of `build_scorers`.
    """

    def __init__(self, name: str, *, timeout: float, **settings: Any) -> None:
        self.pool = WorkerPool(
            "reward_server.isolated:build_worker",
            {"name": name, **settings},
            workers=1,
            timeout=timeout,
            start_timeout=START_TIMEOUT,
            max_deaths=1,
            environment={},
        )
        try:
            [properties] = self.pool.map([None])
            if isinstance(properties, Failed):
                raise UserError(f"reward {name!r} cannot be built: {properties.reason}")
            self.frames, self.min_frames, self.kind, self.reads_images = properties
        except BaseException:
            self.close()
            raise

    def __call__(
        self, images: list[Sample], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Score a batch in the child process.

        Raises:
            ScoringError: If the process dies, hangs or is restarted.
            Exception: What the scorer raised, as `ScorerException.to_exception`.
        """
        [reply] = self.pool.map([(images, prompts, metadata)])
        if isinstance(reply, Failed):
            # start the next process before the next request
            run_in_thread(self._restart_worker)
            code = "scorer_timeout" if isinstance(reply, WorkerTimedOut) else "scorer_failed"
            raise ScoringError(f"{reply.reason}; restarting it", code)
        if isinstance(reply, ScorerException):
            raise reply.to_exception()
        return reply.values, reply.extras

    def _restart_worker(self) -> None:
        """Start the child process if it does not run; log a failure."""
        try:
            self.pool.map([None])
        except WorkerStartError as error:  # not reported elsewhere
            log.warning("%s; retrying", error)
