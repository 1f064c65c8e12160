"""A reward in a process of its own: it may crash or hang, and is started again."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.rewards import Scorer, build_scorers
from flow_grpo.rewards.failure import Failed, describe
from flow_grpo.rewards.frames import DEFAULT, Sample, frame_rule
from flow_grpo.rewards.guard import BatchScores, is_mistake, score
from flow_grpo.rewards.pool import PoolClosed, TimedOut, WorkerPool
from flow_grpo.rewards.threads import in_background
from reward_server.batching import ScorerFailed

log = logging.getLogger(__name__)

SCORING_BYTES = 17  # per pixel, measured: 6 on its way to the process, 11 there
START_TIMEOUT = 1800.0  # seconds; weights may have to be downloaded
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before another start

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


Answer = BatchScores | Raised | str


def build_scorer(name: str, **settings: Any) -> Scorer:
    scorer = build_scorers([name], **settings)[name]
    if getattr(scorer, "compares_groups", False):
        raise UserError(
            f"reward {name!r} compares the pictures of a group, which a reward server gets in "
            "parts; leave it to the trainer"
        )
    return scorer


def build(name: str, **settings: Any) -> Callable[[Batch | None], Answer]:
    """In the child: what answers one batch after another. None asks for its rule for
    frames, which it has once it was built."""
    try:
        scorer = build_scorer(name, **settings)
    except Exception as error:
        raised = Raised.by(error)
        return lambda _: raised

    def answer(batch: Batch | None) -> Answer:
        if batch is None:
            return frame_rule(scorer)
        try:
            return score(scorer, *batch)
        except Exception as error:
            return Raised.by(error)

    return answer


class IsolatedScorer:
    """Has the reward `name` scored by a child process, which is built now and replaced when it
    dies or takes longer than `timeout` seconds over a batch. `settings` are of `build_scorers`.
    """

    def __init__(self, name: str, *, timeout: float, **settings: Any) -> None:
        self.frames = DEFAULT
        self.trouble = ""  # why there is no process, after one could not be replaced
        self._name = name
        self._timeout = timeout
        self._settings: Mapping[str, Any] = settings
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._pool = self._new_pool()
        try:
            self._check_built()
        except BaseException:
            self.close()
            raise

    def __call__(
        self, images: list[Sample], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> tuple[list[float], dict[str, list[float]]]:
        try:
            [answer] = self._pool.map([(images, prompts, metadata)])
        except UserError as error:  # no new process: what was asked is not to blame
            raise ScorerFailed(str(error)) from error
        if isinstance(answer, Failed):
            in_background(self._revive)
            code = "scorer_timeout" if isinstance(answer, TimedOut) else "scorer_failed"
            raise ScorerFailed(f"{answer.reason}; it is started again", code)
        if isinstance(answer, Raised):
            raise answer.again()
        return answer.values, answer.extras

    def close(self) -> None:
        with self._lock:
            self._closed.set()
        self._pool.close()

    def _check_built(self) -> None:
        [answer] = self._pool.map([None])
        if isinstance(answer, Raised) and answer.is_user_error:
            raise UserError(answer.reason)
        if not isinstance(answer, str):  # a `Failed` has a reason as well
            raise UserError(f"reward {self._name!r} cannot be built: {answer.reason}")
        self.frames = answer

    def _revive(self) -> None:
        """Have the next process ready before the next request, however often that takes."""
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            try:
                self._check_built()
                self.trouble = ""
                return
            except PoolClosed:
                return
            except Exception as error:
                self.trouble = f"it cannot be started again ({describe(error)})"
                log.warning("reward %r: %s; next try in %g s", self._name, self.trouble, pause)
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            with self._lock:
                if not self._closed.is_set():
                    old, self._pool = self._pool, self._new_pool()
                    old.close()

    def _new_pool(self) -> WorkerPool:
        return WorkerPool(
            "reward_server.isolated:build",
            {"name": self._name, **self._settings},
            workers=1,
            timeout=self._timeout,
            start_timeout=START_TIMEOUT,
            max_deaths=1,
            environment={},
        )
