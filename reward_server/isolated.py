"""A reward in a process of its own: it may crash or hang, and is started again."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards import build_scorers
from flow_grpo.rewards.calling import in_background
from flow_grpo.rewards.calling.guard import is_mistake
from flow_grpo.rewards.calling.pool import CannotStart, PooledScorer, TimedOut, WorkerPool
from flow_grpo.rewards.failure import Failed, describe
from flow_grpo.rewards.frames import Sample
from flow_grpo.rewards.protocol import BatchScores, Scorer, score
from reward_server.batching import ScorerFailed

log = logging.getLogger(__name__)

SCORING_BYTES = 17  # per pixel, measured: 6 on its way to the process, 11 there
START_TIMEOUT = 1800.0  # seconds; weights may have to be downloaded

Batch = tuple[list[Sample], list[str], list[dict[str, Any]]]


@dataclass(frozen=True)
class Raised:
    """An exception of the scorer: its class may be unknown in the other process."""

    reason: str
    is_user_error: bool
    is_mistake: bool

    @classmethod
    def by(cls, error: Exception) -> "Raised":
        return cls(describe(error), isinstance(error, UserError), is_mistake(error))

    def again(self) -> Exception:
        if self.is_user_error:
            return UserError(self.reason)
        return ScorerFailed(self.reason, "scorer_broken" if self.is_mistake else "scorer_failed")


Answer = BatchScores | Raised | tuple[str, str]


def build_scorer(name: str, **settings: Any) -> Scorer:
    scorer = build_scorers([name], **settings)[name]
    if scorer.compares_groups:
        raise UserError(
            f"reward {name!r} compares the pictures of a group, which a reward server gets in "
            "parts; leave it to the trainer"
        )
    return scorer


def build(name: str, **settings: Any) -> Callable[[Batch | None], Answer]:
    """In the child: what answers one batch after another. None asks for its rule for
    frames and for what it scores, which it has once it was built."""
    try:
        scorer = build_scorer(name, **settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"reward {name!r} cannot be built: {describe(error)}") from error

    def answer(batch: Batch | None) -> Answer:
        if batch is None:
            return scorer.frames, scorer.kind
        try:
            return score(scorer, *batch)
        except Exception as error:
            return Raised.by(error)

    return answer


class IsolatedScorer(PooledScorer):
    """Has the reward `name` scored by a child process, which is built now and replaced when it
    dies or takes longer than `timeout` seconds over a batch. `settings` are of `build_scorers`.
    """

    def __init__(self, name: str, *, timeout: float, **settings: Any) -> None:
        self.pool = WorkerPool(
            "reward_server.isolated:build",
            {"name": name, **settings},
            workers=1,
            timeout=timeout,
            start_timeout=START_TIMEOUT,
            max_deaths=1,
            environment={},
        )
        try:
            [told] = self.pool.map([None])
            if isinstance(told, Failed):
                raise UserError(f"reward {name!r} cannot be built: {told.reason}")
            self.frames, self.kind = told
        except BaseException:
            self.close()
            raise

    def __call__(
        self, images: list[Sample], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> tuple[list[float], dict[str, list[float]]]:
        [answer] = self.pool.map([(images, prompts, metadata)])
        if isinstance(answer, Failed):
            # have the next process ready before the next request
            in_background(self._start_again)
            code = "scorer_timeout" if isinstance(answer, TimedOut) else "scorer_failed"
            raise ScorerFailed(f"{answer.reason}; it is started again", code)
        if isinstance(answer, Raised):
            raise answer.again()
        return answer.values, answer.extras

    def _start_again(self) -> None:
        try:
            self.pool.map([None])
        except CannotStart as error:  # nobody else hears of it
            log.warning("%s; the pool goes on trying", error)
