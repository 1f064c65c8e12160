"""What a reward is: a call, the hooks it may have, and what it returns.

The call, sync or async, is `scorer(samples, prompts, metadata)`: a list of PIL images (or of
answers, texts), a list of prompts and a list of metadata dicts. It returns one number per sample,
NaN or None where it cannot score, `NotAsked()` where its prompt does not ask for it; or a tuple of
that and a dict of further values per sample, to be logged.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling import run_coroutine
from flow_grpo.rewards.failure import LARGEST_SCORE, Failed, NotAsked, TooLarge
from flow_grpo.rewards.frames import (
    CLIP,
    DEFAULT,
    Sample,
    choose_frames,
    is_clip,
    kind_of,
    mean_of_frames,
)

if TYPE_CHECKING:
    from torch import Tensor

Samples = list[Sample] | list[str]
Rows = list[dict[str, Any]]  # the metadata of each
Returned = list[float] | tuple[list[float], dict[str, list[float]]]

FRAMES_OF_A_JUDGE = "middle"  # several of one sample would be each other's rivals
SOURCE = "source"  # in the metadata: the PIL image that a picture was made from, or several
MASK = "mask"  # and the one that says what of it may change, in white
RESERVED_EXTRAS = ("std", "failed")  # logged for every reward


def pictures_in(row: dict[str, Any], name: str = SOURCE) -> list[Image.Image]:
    """Those that a row's metadata has under this name."""
    found = row.get(name)
    pictures = found if isinstance(found, list) else [found]
    return pictures if all(isinstance(each, Image.Image) for each in pictures) else []


class Scorer:
    """The hooks of a reward, and what holds where it has none. Ours are derived from it."""

    kind = "image"  # what it scores: "image" or "answer"
    frames = DEFAULT  # which frames of a video it sees; "clip": all, as a list of PIL images
    compares_groups = False  # a judge: called with whole groups, it returns shares of wins
    concurrent_calls = 1  # calls that a reward server may make at a time
    has_policy = False  # it keeps the time and tries again by itself, and is called once
    trouble = ""  # why it cannot score now, for a reward server to tell
    # Of one that can be differentiated: scores (N,) of pixels (N, 3, H, W) in [0, 1] and prompts,
    # as a function of the pixels.
    score_pixels: "Callable[[Tensor, list[str]], Tensor] | None" = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.compares_groups and cls.frames == DEFAULT:
            cls.frames = FRAMES_OF_A_JUDGE

    def __call__(self, samples: Samples, prompts: list[str], metadata: Rows) -> Returned:
        raise NotImplementedError

    def why_not(self, prompt: str, metadata: dict) -> str | None:
        """Why a prompt does not ask for this reward; None if it does, as with most rewards."""
        return None

    def invalid_row(self, prompt: str, metadata: dict) -> str | None:
        """Why a row of the data cannot be used with this reward; it is rejected before training."""
        return None

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Refuse prompts before training."""

    def check_servers(self) -> None:
        """Refuse, before training, servers that do not answer."""

    def rest(self) -> None:
        """Called when the scores of an epoch are in: the trainer needs the memory now."""

    def close(self) -> None:
        """Called at the end."""


_DEFAULTS = Scorer()


class GivenScorer:
    """A user's function, object or class, with the default for each hook that it lacks."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __call__(self, samples: Samples, prompts: list[str], metadata: Rows) -> Returned:
        return self.given(samples, prompts, metadata)

    def __getattr__(self, hook: str) -> Any:
        """Looked up each time: it may be a property, or set later."""
        if hook == "given" or hook.startswith("__"):  # asked for while a copy is made
            raise AttributeError(hook)
        if hasattr(self.given, hook):
            return getattr(self.given, hook)
        if hook == "frames" and self.compares_groups:
            return FRAMES_OF_A_JUDGE
        if hook == "has_policy":  # one that takes the policy is given it
            return "policy" in parameters_of(type(self.given))
        return getattr(_DEFAULTS, hook)


def as_scorer(given: Any) -> Scorer:
    """Give a function, an object or a class all hooks of a scorer."""
    return given if isinstance(given, Scorer | GivenScorer) else GivenScorer(given)


def parameters_of(scorer: Any) -> Mapping[str, inspect.Parameter]:
    """The options of a class of scorers; a function has none."""
    try:
        return inspect.signature(scorer).parameters if isinstance(scorer, type) else {}
    except ValueError:  # builtins do not tell
        return {}


def takes_call(scorer: Scorer | GivenScorer) -> bool:
    """Whether it has the arguments of a reward."""
    try:
        inspect.signature(getattr(scorer, "given", scorer)).bind(*"abc")
    except TypeError:
        return False
    except ValueError:  # builtins do not tell
        pass
    return True


@dataclass(frozen=True)
class BatchScores:
    values: list[float]  # one per image, `Failed` or `NotAsked` where there is none
    extras: dict[str, list[float]] = field(default_factory=dict)  # further values to log

    def each(self, change: Callable[[list[float]], list[float]]) -> "BatchScores":
        """The scores and each of the further values, changed in the same way."""
        extras = {name: change(values) for name, values in self.extras.items()}
        return BatchScores(change(self.values), extras)


class ContractError(UserError):
    """A scorer returned the wrong type, length or values."""


def score(scorer: Scorer, samples: Samples, prompts: list[str], metadata: Rows) -> BatchScores:
    """What `scorer` gives for each sample; of clips it sees the frames that its rule chooses, as
    pictures with the same prompt, unless it takes whole clips."""
    samples = choose_frames(samples, scorer.frames)
    if scorer.frames == CLIP or not any(map(is_clip, samples)):
        return _call(scorer, samples, prompts, metadata)
    clips = [sample if is_clip(sample) else [sample] for sample in samples]
    counts = [len(clip) for clip in clips]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    frames = [frame for clip in clips for frame in clip]
    scores = _call(scorer, frames, [prompts[r] for r in rows], [metadata[r] for r in rows])
    return scores.each(lambda values: mean_of_frames(values, counts))


def _call(scorer: Scorer, images: Samples, prompts: list[str], metadata: Rows) -> BatchScores:
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
    if not math.isfinite(number):
        return Failed(f"it returned {number}")
    return number if abs(number) <= LARGEST_SCORE else TooLarge(number)


def joined(parts: Sequence[BatchScores]) -> BatchScores:
    """Scores of several batches as those of one; the batches may differ in their extras."""
    names = dict.fromkeys(name for part in parts for name in part.extras)
    missing = Failed("it was not returned for this image")
    extras = {
        name: [v for part in parts for v in part.extras.get(name, [missing] * len(part.values))]
        for name in names
    }
    return BatchScores([value for part in parts for value in part.values], extras)
