"""What the demo draws and what it refuses: a browser is not the only thing that can ask."""

import reprlib
from dataclasses import dataclass
from typing import Any

from flow_grpo.draw.fields import DrawFields
from flow_grpo.draw.session import eval_guidance
from flow_grpo.errors import UserError
from flow_grpo.pictures import BadPicture, read_picture

PROMPT_LENGTH = 2000  # characters
MOST_STEPS = 50
MOST_GUIDANCE = 20.0
MOST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Wish:
    prompt: str
    weights: str | None  # the name of some of `list_weights`; None draws the base alone
    steps: int
    guidance: float
    seed: int
    pictures: tuple[bytes, ...] = ()  # to start from


@dataclass(frozen=True)
class DemoLimits:
    """The size is not among them: it is the config's."""

    fewest_steps: int
    most_steps: int
    most_guidance: float
    pictures: range = range(1)  # how many the model starts from

    @classmethod
    def of(cls, config: DrawFields, pictures: range = range(1)) -> "DemoLimits":
        """What the config itself asks for is always allowed."""
        steps = config.sample.eval_num_steps
        return cls(
            min(2, steps),  # some schedules cannot be set to a single step
            max(MOST_STEPS, steps),
            max(MOST_GUIDANCE, eval_guidance(config)),
            pictures,
        )

    def wish(
        self,
        prompt: Any,
        weights: Any,
        steps: Any,
        guidance: Any,
        seed: Any,
        *pictures: bytes | None,
    ) -> Wish:
        """What values of any kind ask for; one that is not allowed is a UserError."""
        return Wish(
            _prompt(prompt),
            weights,
            _whole("steps", steps, self.fewest_steps, self.most_steps),
            _number("guidance", guidance, 0, self.most_guidance),
            _whole("seed", seed, 0, MOST_SEED),
            _pictures([picture for picture in pictures if picture is not None], self.pictures),
        )


def _prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"the prompt is {reprlib.repr(value)}; it must be a text")
    if not (text := value.strip()):
        raise UserError("the prompt is empty; write what to draw")
    if len(text) > PROMPT_LENGTH:
        raise UserError(f"the prompt has {len(text)} characters; at most {PROMPT_LENGTH} are drawn")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError("the prompt has half a character in it; write it whole")
    return text


def _pictures(given: list[bytes], takes: range) -> tuple[bytes, ...]:
    if len(given) > takes[-1]:
        most = f"{takes[-1]} at most" if takes[-1] else "none"
        came = f"{len(given)} picture{'s' if given[1:] else ''} came"
        raise UserError(f"the model takes {most}, and {came}; leave some out")
    if len(given) < takes[0]:
        raise UserError("the model starts from a picture; upload one")
    for picture in given:
        try:
            read_picture(picture)
        except BadPicture as error:
            raise UserError(f"the picture {error.problem}") from error
    return tuple(given)


def _number(name: str, value: Any, least: float, most: float) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not least <= value <= most:  # which no NaN is
        raise UserError(
            f"{name} is {reprlib.repr(value)}; it must be a number from {least:g} to {most:g}"
        )
    return float(value)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    # a browser sends 3.0 where 3 was typed
    if not known or value != value // 1 or not least <= value <= most:
        raise UserError(
            f"{name} is {reprlib.repr(value)}; it must be a whole number from {least} to {most}"
        )
    return int(value)
