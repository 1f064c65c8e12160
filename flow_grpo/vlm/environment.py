"""User-defined environments for multi-turn episodes.

`reset(row)` receives a row of the data set with its images as `images`; `step(response)` returns an
observation, a reward and whether the episode is over. Environments run in worker processes without
torch: one that hangs, raises or returns too much data ends its episode, not the run.
"""

import io
import math
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from flow_grpo.config.custom import import_object
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource, read_image
from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.workers import map_in_threads
from flow_grpo.rewards.workers.pool import WorkerPool, WorkerStartError, WorkerTimedOut
from flow_grpo.untrusted_files import reject_lone_surrogates

if TYPE_CHECKING:
    from flow_grpo.data.questions import Question

MAX_OBSERVATION_CHARACTERS = 100_000
MAX_OBSERVATION_PIXELS = 2**24  # over all its images: 4096 x 4096
MAX_TIMEOUTS_PER_TURN = 4  # after these, a worker skips the remaining steps of a turn
STEP_FORMAT = (
    "it must return (observation, reward, done), where observation is a str or (str, images)"
)

Observation = str | tuple[str, Sequence[Image.Image]]


class Environment(Protocol):
    """Protocol of user-defined environments.

    The results must be a deterministic function of the row and the responses: after a crash of the
    worker process, the episode is replayed.
    """

    def reset(self, row: dict[str, Any]) -> None:
        """Start an episode for a row of the data set, whose images are PIL images in `images`."""

    def step(self, answer: str) -> tuple[Observation, float, bool]:
        """Process the model's response; return observation, reward and whether the episode ends."""


@dataclass(frozen=True)
class StepRequest:
    """A requested step, with everything needed to replay the episode after a crash."""

    episode: tuple[int, int]  # batch id, and number within the batch
    row: dict[str, Any]
    images: tuple[ImageSource, ...]
    responses: tuple[str, ...]

    @classmethod
    def from_question(
        cls, episode: tuple[int, int], question: "Question", responses: Sequence[str]
    ) -> "StepRequest":
        """Build the request for the last of `responses`."""
        row = {**question.metadata, "question": question.text, "answer": question.answer}
        return cls(episode, row, question.images, tuple(responses))


@dataclass(frozen=True)
class StepResult:
    """What `step` returned, validated and without user-defined types."""

    text: str
    images: tuple[bytes, ...]  # PNG
    reward: float
    done: bool
    fallback: str = ""  # replaces an observation that cannot be encoded


class EnvironmentWorker:
    """Runs the steps of its episodes in a worker process."""

    def __init__(
        self, path: str, options: dict[str, Any], folders: list[str], timeout: float
    ) -> None:
        self._timeout = timeout
        sys.path += [each for each in folders if each not in sys.path]
        self._environment_class, self._options = load_environment_class(path), options
        self._batch = -1
        # by episode: its environment and the number of steps taken
        self._open_episodes: dict[tuple[int, int], tuple[Environment, int]] = {}

    def __call__(self, request: StepRequest) -> Generator[tuple[str, None], None, StepResult]:
        """Take a step; after a crash, replay the episode with a time limit for each response."""
        batch, _ = request.episode
        if batch != self._batch:  # the episodes of the previous batch are over
            self._batch, self._open_episodes = batch, {}
        environment, taken = self._open_episodes.pop(request.episode, (None, 0))
        if environment is None:
            environment = self._environment_class(**self._options)
            if (longest := getattr(environment, "longest_step", 0.0)) >= self._timeout:
                raise UserError(
                    f"must be above {longest:g}, the longest step that environment_options allows",
                    field="environment_timeout",
                    value=self._timeout,
                )
            images = [read_image(source) for source in request.images]
            environment.reset({**request.row, "images": images})
        *replayed, last = request.responses[taken:]
        for response in replayed:
            environment.step(response)
            yield "progress", None
        step = parse_step_result(environment.step(last))
        step = replace(step, fallback=getattr(environment, "fallback_observation", ""))
        if not step.done:
            self._open_episodes[request.episode] = environment, len(request.responses)
        return step


def parse_step_result(returned: Any) -> StepResult:
    """Validate what `step` returned and convert it for the trainer process.

    Raises:
        ValueError: If it is malformed, too large, or has a reward that is not finite.
    """
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise ValueError(f"step() returned {_describe_value(returned)}; {STEP_FORMAT}")
    observation, reward, done = returned
    text, images = (
        (observation, ()) if isinstance(observation, str) else _split_observation(observation)
    )
    text = str.__str__(text)  # a plain str: unpickling a subclass could run code in the trainer
    reject_lone_surrogates(text, "the text returned by step()")
    if len(text) > MAX_OBSERVATION_CHARACTERS:
        raise ValueError(
            f"step() returned {len(text):,} characters, more than {MAX_OBSERVATION_CHARACTERS:,}"
        )
    pixels = sum(image.width * image.height for image in images)
    if pixels > MAX_OBSERVATION_PIXELS:
        raise ValueError(f"step() returned {pixels:,} pixels, more than {MAX_OBSERVATION_PIXELS:,}")
    number = float(reward) if isinstance(reward, Real) else math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"step() returned the reward {_describe_value(reward)}; it must be a finite number"
        )
    if done not in (False, True):
        raise ValueError(f"step() returned done={done!r:.80}; it must be True or False")
    return StepResult(text, tuple(map(_encode_png, images)), number, bool(done))


def _split_observation(observation: Any) -> tuple[str, list[Image.Image]]:
    """Return text and images of an observation, (text, images); raise ValueError for others."""
    if isinstance(observation, tuple) and len(observation) == 2:
        text, images = observation
        is_list = isinstance(images, list | tuple)
        if isinstance(text, str) and is_list and all(isinstance(i, Image.Image) for i in images):
            return text, list(images)
    raise ValueError(
        f"step() returned the observation {_describe_value(observation)}; {STEP_FORMAT}"
    )


def _describe_value(value: Any) -> str:
    """Describe a value briefly, however large it is."""
    return repr(value) if isinstance(value, float | None) else f"a {type(value).__name__}"


def _encode_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()


def load_environment_class(path: str) -> type:
    """Import the class that the `environment` setting names.

    Raises:
        UserError: If the import fails, or the class lacks `reset` or `step`.
    """
    found = import_object(path, "environment", f"environment={path!r}")
    methods = [getattr(found, name, None) for name in ("reset", "step")]
    if not isinstance(found, type) or not all(map(callable, methods)):
        raise UserError(
            "must name a class with reset(row) and step(response)", field="environment", value=path
        )
    return found


@dataclass
class EnvironmentPool:
    """The environments of a run in worker processes; an episode stays with its worker."""

    path: str
    options: dict[str, Any]
    timeout: float  # seconds per step
    workers: int
    _pools: list[WorkerPool] = field(init=False)
    _batches: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Create one single-process pool per worker."""
        # sys.path too: a module may be in the config's directory, which workers do not know
        settings = {"path": self.path, "options": dict(self.options), "folders": list(sys.path)}
        settings["timeout"] = self.timeout
        limits = {"workers": 1, "timeout": self.timeout, "max_deaths": 1}
        self._pools = [
            WorkerPool(f"{__name__}:EnvironmentWorker", settings, **limits)
            for _ in range(self.workers)
        ]

    def next_batch_id(self) -> int:
        """Return a new id for episodes that run together."""
        self._batches += 1
        return self._batches

    def smoke_test(self, question: "Question") -> None:
        """Run reset and one step in every worker, so that errors appear before training."""
        batch = self.next_batch_id()
        requests = [
            StepRequest.from_question((batch, n), question, ["No idea."])
            for n in range(self.workers)
        ]
        for result in self.step(requests):
            if isinstance(result, Failed):
                raise UserError(
                    f"fails in a test step: {result.reason}", field="environment", value=self.path
                )

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult | Failed]:
        """Return one result per request, in order; `Failed` for an episode that cannot continue."""
        by_worker: list[list[int]] = [[] for _ in range(self.workers)]
        for index, request in enumerate(requests):
            by_worker[request.episode[1] % self.workers].append(index)
        skipped = Failed(
            f"{MAX_TIMEOUTS_PER_TURN} other steps of its worker exceeded environment_timeout"
        )
        results: list[StepResult | Failed] = [skipped] * len(requests)

        def work(number: int) -> None:
            """Run the requests of one worker in order, until too many of them time out."""
            timeouts = 0
            for index in by_worker[number]:
                if timeouts < MAX_TIMEOUTS_PER_TURN:
                    results[index] = _run_step(self._pools[number], requests[index])
                    timeouts += isinstance(results[index], WorkerTimedOut)

        map_in_threads(work, range(self.workers), self.workers)
        return results

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def _run_step(pool: WorkerPool, request: StepRequest) -> StepResult | Failed:
    """Run one request; a worker that cannot be started gives `Failed`."""
    try:
        [result] = pool.map([request])
    except WorkerStartError as error:  # may be temporary: the pool keeps trying
        return Failed(str(error))
    return result
