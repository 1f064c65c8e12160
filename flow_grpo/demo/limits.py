"""What the demo draws and what it refuses: a browser is not the only thing that can ask."""

import reprlib
from dataclasses import dataclass
from typing import Any

from flow_grpo.draw.fields import DrawFields
from flow_grpo.draw.session import eval_guidance
from flow_grpo.errors import UserError

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


@dataclass(frozen=True)
class DemoLimits:
    """The size is not among them: it is the config's."""

    fewest_steps: int
    most_steps: int
    most_guidance: float

    @classmethod
    def of(cls, config: DrawFields) -> "DemoLimits":
        """What the config itself asks for is always allowed."""
        steps = config.sample.eval_num_steps
        # some schedules cannot be set to a single step
        return cls(min(2, steps), max(MOST_STEPS, steps), max(MOST_GUIDANCE, eval_guidance(config)))

    def wish(self, prompt: Any, weights: Any, steps: Any, guidance: Any, seed: Any) -> Wish:
        """What values of any kind ask for; one that is not allowed is a UserError."""
        return Wish(
            _prompt(prompt),
            weights,
            _whole("steps", steps, self.fewest_steps, self.most_steps),
            _number("guidance", guidance, 0, self.most_guidance),
            _whole("seed", seed, 0, MOST_SEED),
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
