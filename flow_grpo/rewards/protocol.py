"""The scorer protocol: how a reward is called, its optional hooks and what it returns.

A scorer is a sync or async function `scorer(samples, prompts, metadata)` of three lists of length
N: PIL images (or response texts), prompts, and metadata dicts. It returns one number per sample, or
a tuple of these numbers and a dict of extra per-sample values to log. NaN and None mean that a
sample could not be scored, `NotApplicable()` that the reward does not apply to its prompt.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import MAX_SCORE, Failed, NotApplicable, ScoreTooLarge
from flow_grpo.rewards.frames import (
    DEFAULT_FRAMES,
    WHOLE_VIDEO,
    Sample,
    average_over_frames,
    is_video,
    sample_kind,
    select_frames,
)
from flow_grpo.rewards.turns import device_turn
from flow_grpo.rewards.workers import run_coroutine

if TYPE_CHECKING:
    from torch import Tensor

Samples = list[Sample] | list[str]
MetadataRows = list[dict[str, Any]]  # one dict per sample
ScorerOutput = list[float] | tuple[list[float], dict[str, list[float]]]

PAIRWISE_FRAMES = "middle"  # several frames of one sample would compete with each other
# metadata key: the PIL image (or images) that an edited image was made from, or of a question
SOURCE = "source"
MASK = "mask"  # metadata key: PIL image, white where the source may change
AUDIO = "audio"  # metadata key: the `Audio` of a sample, for scorers with `reads_audio`
GET_REWARD = "/get_reward"  # path of OpenRLHF's protocol (workers/get_reward.py)
RESERVED_EXTRAS = ("std", "failed")  # logged for every reward
# Hooks were renamed; custom scorers that define the old names keep working.
OLD_HOOKS = {
    "skip_reason": "why_not",
    "release_memory": "rest",
    "handles_retries": "has_policy",
    "unavailable_reason": "trouble",
}


def images_in_metadata(row: dict[str, Any], name: str = SOURCE) -> list[Image.Image]:
    """Return the images that a metadata row has under `name`, or [] if there are none."""
    found = row.get(name)
    images = found if isinstance(found, list) else [found]
    return images if all(isinstance(each, Image.Image) for each in images) else []


class Scorer:
    """Base class of the built-in rewards: every hook with its default.

    Custom rewards need not inherit from it; `as_scorer` adds the hooks they lack.

    Attributes:
        kind: What is scored: "image" or "answer" (a response text).
        frames: Rule for the frames of a video (see frames.py); "clip" passes whole videos, as
            lists of PIL images.
        min_frames: Minimum number of frames of a sample; an image counts as one.
        compares_groups: Whether samples of a prompt are compared with each other. The scorer is
            then called with whole groups and returns win rates.
        reads_images: Whether the metadata of a response must have the images of its question, under
            `SOURCE`.
        reads_audio: Whether the metadata of a sample must have its sound, under `AUDIO`.
        concurrent_calls: How many calls a reward server may make at the same time.
        handles_retries: Whether the scorer retries and keeps the deadline itself; it is then
            called once per batch.
        interactive: Whether people give the scores. Its batches are scored concurrently, without a
            time limit but its own `timeout`, and test calls and dry runs leave it out.
        unavailable_reason: Why it cannot score at present, reported by a reward server; or "".
        score_pixels: For differentiable rewards, the function (pixels, prompts) -> scores (N,),
            with pixels (N, 3, H, W) in [0, 1].
        preview: For rewards of drawn responses, function (responses, questions) -> images (N).
    """

    kind = "image"
    frames = DEFAULT_FRAMES
    min_frames = 1
    compares_groups = False
    reads_images = False
    reads_audio = False
    concurrent_calls = 1
    handles_retries = False
    interactive = False
    timeout = math.inf
    unavailable_reason = ""
    score_pixels: "Callable[[Tensor, list[str]], Tensor] | None" = None
    preview: Callable[[list[str], list[str]], list[Image.Image | None]] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Map hooks under their old names; compare single frames of videos in groupwise rewards."""
        super().__init_subclass__(**options)
        for hook, old_name in OLD_HOOKS.items():
            owner = next(vars(each) for each in cls.__mro__ if {hook, old_name} & vars(each).keys())
            if hook not in owner:
                setattr(cls, hook, owner[old_name])
        if cls.compares_groups and cls.frames == DEFAULT_FRAMES:
            cls.frames = PAIRWISE_FRAMES

    def __call__(
        self, samples: Samples, prompts: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        """Score a batch.

        Args:
            samples: N images, videos (lists of images) or response texts.
            prompts: Their N prompts.
            metadata: Their N rows of metadata.

        Returns:
            N scores, or a tuple of these and extra values to log, {name: N numbers}.
        """
        raise NotImplementedError

    def skip_reason(self, prompt: str, metadata: dict) -> str | None:
        """Return why this reward does not apply to a prompt, or None if it does."""
        return None

    def invalid_row(self, prompt: str, metadata: dict) -> str | None:
        """Return why a data row cannot be used with this reward; it is rejected before training."""
        return None

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise `UserError` before training if the prompts cannot be used."""

    def check_servers(self) -> None:
        """Raise `UserError` before training if a server does not respond."""

    def release_memory(self) -> None:
        """Free GPU memory after the scoring of an epoch; the trainer needs it next."""

    def close(self) -> None:
        """Release all resources at the end of the run."""


def _alias(hook: str) -> property:
    """Return a property that reads and sets the attribute `hook`."""
    return property(attrgetter(hook), lambda scorer, value: setattr(scorer, hook, value))


# classes written for the old names also set them on instances, and call them with super()
Scorer.why_not, Scorer.rest = Scorer.skip_reason, Scorer.release_memory
Scorer.has_policy, Scorer.trouble = _alias("handles_retries"), _alias("unavailable_reason")
_DEFAULT_SCORER = Scorer()


class ScorerAdapter:
    """Wraps a custom function, object or class and adds the default of each hook it lacks."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __call__(
        self, samples: Samples, prompts: list[str], metadata: MetadataRows
    ) -> ScorerOutput:
        return self.wrapped(samples, prompts, metadata)

    def __getattr__(self, hook: str) -> Any:
        """Return a hook of the wrapped scorer, or its default.

        It is looked up at each access, because it may be a property, or be set later.
        """
        if hook == "wrapped" or hook.startswith("__"):  # looked up while a copy is made
            raise AttributeError(hook)
        for name in (hook, OLD_HOOKS.get(hook, hook)):
            if hasattr(self.wrapped, name):
                return getattr(self.wrapped, name)
        if hook == "frames" and self.compares_groups:
            return PAIRWISE_FRAMES
        if hook == "handles_retries":  # a class with a `policy` parameter receives the policy
            return "policy" in constructor_parameters(type(self.wrapped))
        return getattr(_DEFAULT_SCORER, hook)


def as_scorer(scorer: Any) -> Scorer:
    """Return a function, object or class with all hooks of a scorer."""
    return scorer if isinstance(scorer, Scorer | ScorerAdapter) else ScorerAdapter(scorer)


def constructor_parameters(scorer: Any) -> Mapping[str, inspect.Parameter]:
    """Return the constructor parameters of a scorer class; a function has none."""
    try:
        return inspect.signature(scorer).parameters if isinstance(scorer, type) else {}
    except ValueError:  # builtins have no signature
        return {}


def accepts_scorer_arguments(scorer: Scorer | ScorerAdapter) -> bool:
    """Return whether a scorer can be called with samples, prompts and metadata."""
    try:
        inspect.signature(getattr(scorer, "wrapped", scorer)).bind(*"abc")
    except TypeError:
        return False
    except ValueError:  # builtins have no signature
        pass
    return True


@dataclass(frozen=True)
class BatchScores:
    """Scores of a batch, and the extra values to log."""

    values: list[float]  # one per sample; `Failed` or `NotApplicable` if it has no score
    extras: dict[str, list[float]] = field(default_factory=dict)

    def map_values(self, change: Callable[[list[float]], list[float]]) -> "BatchScores":
        """Apply `change` to the scores and to each list of extra values."""
        extras = {name: change(values) for name, values in self.extras.items()}
        return BatchScores(change(self.values), extras)


class ContractError(UserError):
    """A scorer returned the wrong type, length or values."""


def score(
    scorer: Scorer, samples: Samples, prompts: list[str], metadata: MetadataRows
) -> BatchScores:
    """Score a batch of images, texts or videos.

    The selected frames of a video are scored as images with its prompt and their scores averaged,
    unless the scorer takes whole videos.
    """
    samples = select_frames(samples, scorer.frames)
    if scorer.frames == WHOLE_VIDEO or not any(map(is_video, samples)):
        return _call(scorer, samples, prompts, metadata)
    videos = [sample if is_video(sample) else [sample] for sample in samples]
    counts = [len(video) for video in videos]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    frames = [frame for video in videos for frame in video]
    scores = _call(scorer, frames, [prompts[r] for r in rows], [metadata[r] for r in rows])
    return scores.map_values(lambda values: average_over_frames(values, counts))


def _call(
    scorer: Scorer, samples: Samples, prompts: list[str], metadata: MetadataRows
) -> BatchScores:
    with device_turn(scorer):
        result = scorer(samples, prompts, metadata)
        result = run_coroutine(result) if inspect.iscoroutine(result) else result
    return parse_scores(result, len(samples), sample_kind(samples))


def parse_scores(result: Any, count: int, kind: str = "image") -> BatchScores:
    """Validate what a scorer returned for `count` samples.

    Raises:
        ContractError: A type, length or value is wrong.
    """
    extras: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, extras = result
    for name in extras:
        if not isinstance(name, str) or name in RESERVED_EXTRAS:
            raise ContractError(f"it returned extra values under the reserved name {name!r}")
    return BatchScores(
        _parse_numbers("scores", result, count, kind),
        {name: _parse_numbers(f"{name!r}", values, count, kind) for name, values in extras.items()},
    )


def _parse_numbers(what: str, values: Any, count: int, kind: str) -> list[float]:
    """Return `count` scores from an array or sequence of numbers.

    Raises:
        ContractError: For another shape, or an element that is not a number.
    """
    try:
        shape = np.shape([] if values is None else values)
    except ValueError as error:
        raise ContractError(f"it returned {what} as nested lists of different lengths") from error
    if shape != (count,):
        raise ContractError(
            f"it returned {what} of shape {shape} for {count} {kind}s; it must return one number "
            f"per {kind} (NaN where it cannot score)"
        )
    return [_parse_number(what, value) for value in values]


def _parse_number(what: str, value: Any) -> float:
    """Return a score as a float; `Failed` and `NotApplicable` are kept.

    None, non-finite and too large numbers become `Failed`.

    Raises:
        ContractError: It is not a number.
    """
    if value is None:
        return Failed("it returned None")
    if isinstance(value, Failed | NotApplicable):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ContractError(f"it returned {value!r} among its {what}, not a number") from error
    if not math.isfinite(number):
        return Failed(f"it returned {number}")
    return number if abs(number) <= MAX_SCORE else ScoreTooLarge(number)


def concatenate_scores(parts: Sequence[BatchScores]) -> BatchScores:
    """Concatenate the scores of several batches, which may differ in their extra values."""
    names = dict.fromkeys(name for part in parts for name in part.extras)
    missing = Failed("it was not returned for this image")
    extras = {
        name: [v for part in parts for v in part.extras.get(name, [missing] * len(part.values))]
        for name in names
    }
    return BatchScores([value for part in parts for value in part.values], extras)
