"""Environments: what answers a model's answers, with texts and pictures, for several turns.

An environment is a class of the user's. `reset(row)` is given the row of the data set, with its
pictures as `images`; `step(answer)` returns an observation, a reward and whether the episode is
over. It is played in processes of its own: one that hangs, raises or returns too much ends its
episode, not the run. These processes do without torch.
"""

import io
import math
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from flow_grpo.config.custom import import_named
from flow_grpo.errors import UserError
from flow_grpo.files import refuse_halves
from flow_grpo.pictures import Picture, read_picture
from flow_grpo.rewards.calling import map_in_threads
from flow_grpo.rewards.calling.pool import CannotStart, TimedOut, WorkerPool
from flow_grpo.rewards.failure import Failed

if TYPE_CHECKING:
    from flow_grpo.data.questions import Question

MAX_TEXT = 100_000  # characters of an observation
MAX_PIXELS = 2**24  # and pixels of its pictures: 4096 x 4096
MAX_OVERRUNS = 4  # steps of a turn that a worker waits for in vain
FORM = "it must return (observation, reward, done), the observation a text or (text, pictures)"

Observation = str | tuple[str, Sequence[Image.Image]]


class Environment(Protocol):
    """What a class of the user's has. What it returns must follow from the row and the answers
    alone: after a crash of its process the episode is played again up to where it was."""

    def reset(self, row: dict[str, Any]) -> None: ...

    def step(self, answer: str) -> tuple[Observation, float, bool]: ...


@dataclass(frozen=True)
class Move:
    """The last answer of an episode, with all that led to it."""

    episode: tuple[int, int]  # number of its batch, and its own
    row: dict[str, Any]
    images: tuple[Picture, ...]
    answers: tuple[str, ...]

    @classmethod
    def of(cls, episode: tuple[int, int], question: "Question", answers: Sequence[str]) -> "Move":
        row = {**question.metadata, "question": question.text, "answer": question.answer}
        return cls(episode, row, question.images, tuple(answers))


@dataclass(frozen=True)
class Step:
    text: str
    pictures: tuple[bytes, ...]  # PNG
    reward: float
    done: bool


class Stage:
    """In a worker: plays one move after another, each in the environment of its episode."""

    def __init__(self, path: str, options: dict[str, Any], folders: list[str]) -> None:
        sys.path += [each for each in folders if each not in sys.path]
        self._kind, self._options = find_environment(path), options
        self._batch = -1
        self._held: dict[tuple[int, int], tuple[Environment, int]] = {}  # and steps taken

    def __call__(self, move: Move) -> Generator[tuple[str, None], None, Step]:
        """Each answer that is played again, after a crash, has a time limit of its own."""
        batch, _ = move.episode
        if batch != self._batch:  # the episodes of the last one are over
            self._batch, self._held = batch, {}
        environment, taken = self._held.pop(move.episode, (None, 0))
        if environment is None:
            environment = self._kind(**self._options)
            pictures = [read_picture(source) for source in move.images]
            environment.reset({**move.row, "images": pictures})
        *before, last = move.answers[taken:]
        for answer in before:
            environment.step(answer)
            yield "going on", None
        step = checked(environment.step(last))
        if not step.done:
            self._held[move.episode] = environment, len(move.answers)
        return step


def checked(returned: Any) -> Step:
    """What `step` returned, as it travels; a ValueError where it is none of what it may be."""
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise ValueError(f"step() returned {_shown(returned)}; {FORM}")
    observation, reward, done = returned
    text, pictures = (observation, ()) if isinstance(observation, str) else _parts(observation)
    text = str.__str__(text)  # a plain str: pickles of subclasses run code in the trainer
    refuse_halves(text, "the text that step() returned")
    if len(text) > MAX_TEXT:
        raise ValueError(
            f"step() returned a text of {len(text):,} characters, more than {MAX_TEXT:,}"
        )
    pixels = sum(picture.width * picture.height for picture in pictures)
    if pixels > MAX_PIXELS:
        raise ValueError(f"step() returned {pixels:,} pixels, more than {MAX_PIXELS:,}")
    number = float(reward) if isinstance(reward, Real) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"step() returned the reward {_shown(reward)}; it must be a finite number")
    if done not in (False, True):
        raise ValueError(f"step() returned done={done!r:.80}; it must be True or False")
    return Step(text, tuple(map(_png, pictures)), number, bool(done))


def _parts(observation: Any) -> tuple[str, list[Image.Image]]:
    if isinstance(observation, tuple) and len(observation) == 2:
        text, pictures = observation
        kinds = pictures if isinstance(pictures, list | tuple) else [None]
        if isinstance(text, str) and all(isinstance(each, Image.Image) for each in kinds):
            return text, list(pictures)
    raise ValueError(f"step() returned the observation {_shown(observation)}; {FORM}")


def _shown(value: Any) -> str:
    """In a few words, however large it is."""
    return repr(value) if isinstance(value, float | None) else f"a {type(value).__name__}"


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()


def find_environment(path: str) -> type:
    """The class that `environment` names."""
    found = import_named(path, "environment", f"environment={path!r}")
    if not isinstance(found, type) or not all(
        callable(getattr(found, name, None)) for name in ("reset", "step")
    ):
        raise UserError(f"environment={path!r} must name a class with reset(row) and step(answer)")
    return found


@dataclass
class Environments:
    """The environments of a run, in so many worker processes. An episode stays with its worker."""

    path: str
    options: dict[str, Any]
    timeout: float  # seconds of a step
    workers: int
    _pools: list[WorkerPool] = field(init=False)
    _batches: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # a module may lie beside the config, whose folder only the trainer has on its path
        settings = {"path": self.path, "options": dict(self.options), "folders": list(sys.path)}
        limits = {"workers": 1, "timeout": self.timeout, "max_deaths": 1}
        self._pools = [
            WorkerPool(f"{__name__}:Stage", settings, **limits) for _ in range(self.workers)
        ]

    def new_batch(self) -> int:
        """A number for episodes that are played together."""
        self._batches += 1
        return self._batches

    def try_out(self, question: "Question") -> None:
        """Tell a mistake in the class before training: reset and one step, in every worker."""
        batch = self.new_batch()
        numbers = range(self.workers)
        for result in self.step([Move.of((batch, n), question, ["No idea."]) for n in numbers]):
            if isinstance(result, Failed):
                reason = result.reason
                raise UserError(f"environment={self.path!r} fails when it is tried: {reason}")

    def step(self, moves: Sequence[Move]) -> list[Step | Failed]:
        """One result for each, in order; `Failed` for an episode that cannot go on."""
        by_worker: list[list[int]] = [[] for _ in range(self.workers)]
        for place, move in enumerate(moves):
            by_worker[move.episode[1] % self.workers].append(place)
        late = Failed(f"{MAX_OVERRUNS} other steps of its worker took over environment_timeout")
        results: list[Step | Failed] = [late] * len(moves)

        def work(number: int) -> None:
            overruns = 0
            for place in by_worker[number]:
                if overruns < MAX_OVERRUNS:
                    results[place] = _played(self._pools[number], moves[place])
                    overruns += isinstance(results[place], TimedOut)

        map_in_threads(work, range(self.workers), self.workers)
        return results

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def _played(pool: WorkerPool, move: Move) -> Step | Failed:
    try:
        [result] = pool.map([move])
    except CannotStart as error:  # for now: the pool goes on trying
        return Failed(str(error))
    return result
