"""Validate demo requests, which clients other than the page can send too."""

import reprlib
from dataclasses import dataclass
from typing import Any

from flow_grpo.diffusion.builders import get_eval_guidance_scale
from flow_grpo.diffusion.fields import DiffusionSampleConfig
from flow_grpo.errors import UserError
from flow_grpo.images import InvalidImage, read_image

MAX_PROMPT_LENGTH = 2000  # characters
MAX_STEPS = 50
MAX_GUIDANCE = 20.0
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request."""

    prompt: str
    weights: str | None  # a name from `list_weights`; None: base model only
    steps: int
    guidance: float
    seed: int
    images: tuple[bytes, ...] = ()  # source images


@dataclass(frozen=True)
class DemoLimits:
    """Limits of a request. The image size is fixed by the config."""

    min_steps: int
    max_steps: int
    max_guidance: float
    images: range = range(1)  # possible numbers of source images

    @classmethod
    def of(cls, sample: DiffusionSampleConfig, images: range = range(1)) -> "DemoLimits":
        """Return the limits for a run or model; its own values are always allowed.

        Args:
            sample: Section `sample` of its config.
            images: Allowed numbers of source images.
        """
        steps = sample.eval_num_steps
        return cls(
            min(2, steps),  # some schedules do not support a single step
            max(MAX_STEPS, steps),
            max(MAX_GUIDANCE, get_eval_guidance_scale(sample)),
            images,
        )

    def parse_request(
        self,
        prompt: Any,
        weights: Any,
        steps: Any,
        guidance: Any,
        seed: Any,
        *images: bytes | None,
    ) -> GenerationRequest:
        """Build a request from untrusted values; raise a UserError for an invalid one.

        `weights` is not checked here: the generator looks it up.
        """
        return GenerationRequest(
            _check_prompt(prompt),
            weights,
            _check_number("steps", steps, self.min_steps, self.max_steps, integer=True),
            _check_number("guidance", guidance, 0, self.max_guidance),
            _check_number("seed", seed, 0, MAX_SEED, integer=True),
            _check_images([image for image in images if image is not None], self.images),
        )


def _check_prompt(value: Any) -> str:
    """Return the prompt without surrounding blanks; reject other types, empty and overlong text."""
    if not isinstance(value, str):
        raise UserError(f"must be text, not {reprlib.repr(value)}", field="prompt")
    if not (text := value.strip()):
        raise UserError("is empty", field="prompt", hint="describe an image")
    if len(text) > MAX_PROMPT_LENGTH:
        raise UserError(
            f"has {len(text)} characters, at most {MAX_PROMPT_LENGTH} are allowed", field="prompt"
        )
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError("contains half of a surrogate pair", field="prompt")
    return text


def _check_images(given: list[bytes], allowed: range) -> tuple[bytes, ...]:
    """Return the source images; reject a number outside `allowed` and files that are not images."""
    if len(given) > allowed[-1]:
        most = f"at most {allowed[-1]}" if allowed[-1] else "no"
        raise UserError(f"the model takes {most} source images, {len(given)} were given")
    if len(given) < allowed[0]:
        raise UserError("the model needs a source image", hint="upload one")
    for image in given:
        try:
            read_image(image)
        except InvalidImage as error:
            raise UserError(f"the source image {error.problem}") from error
    return tuple(given)


def _check_number(
    name: str, value: Any, least: float, most: float, *, integer: bool = False
) -> int | float:
    """Return a number as int or float; reject values of other types or outside [least, most]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # least <= NaN is False; a browser sends 3.0 for the integer 3
    if not is_number or not least <= value <= most or (integer and value != value // 1):
        kind = "an integer" if integer else "a number"
        raise UserError(
            f"must be {kind} from {least:.10g} to {most:.10g}, not {reprlib.repr(value)}",
            field=name,
        )
    return int(value) if integer else float(value)
