"""The fields of an algorithm: name, default, reason and rule in one place.

An algorithm's settings are a frozen dataclass of `setting(...)`s. It is also its section of the
config: `--config.nft.beta=.1` sets `NftSettings.beta`.
"""

from dataclasses import field, fields
from typing import Any

from flow_grpo.errors import UserError, with_nearest


def setting(
    default: Any,
    reason: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with the reason for its default and the values it may take."""
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    rules = {words: bound for words, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={"reason": reason, "rules": rules, "choices": choices})


def check_settings(section: str, settings: Any) -> None:
    """One line for the first value that breaks its rule."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value is None and each.default is None:
            continue
        name = f"{section}.{each.name}={value!r}"
        choices = each.metadata["choices"]
        if choices and value not in choices:
            message = f"{name} must be one of {', '.join(map(repr, choices))}"
            raise UserError(with_nearest(message, value, choices))
        for words, bound in each.metadata["rules"].items():
            if not _HOLDS[words](value, bound):
                raise UserError(f"{name} must be {words} {bound}")


_HOLDS = {
    "at least": lambda value, bound: value >= bound,
    "above": lambda value, bound: value > bound,
    "at most": lambda value, bound: value <= bound,
    "below": lambda value, bound: value < bound,
}
