"""The fields of a config: name, type, default, reason and rule of each in one place.

A section of a config is a frozen dataclass of `setting(...)`s: `--config.nft.beta=0.1` sets
`NftSettings.beta`. What a config holds at first, what it may hold and `--help` all come from there.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, asdict, field, fields, is_dataclass
from numbers import Real
from typing import Any, get_args

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from flow_grpo.errors import UserError, with_nearest

_HOLDS = {
    "at least": lambda value, bound: value >= bound,
    "above": lambda value, bound: value > bound,
    "at most": lambda value, bound: value <= bound,
    "below": lambda value, bound: value < bound,
    "at least 0 and below": lambda value, bound: 0 <= value < bound,
}

UPPER_BOUNDS = ("at most", "below", "at least 0 and below")
# Upper bound of every number that declares none. Larger values overflow float32 or 32-bit indices.
LARGEST = 10**9


def setting(
    default: Any,
    reason: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    from_0_below: float | None = None,
    choices: Iterable[str] = (),
) -> Any:
    """A dataclass field with the reason for its default and the values it may take.

    A default of None is for a field that may be left unset. A dict holds names of the user's.
    Numbers that declare no upper bound are at most `LARGEST`; bounds of a tuple apply to each of
    its values.
    """
    bounds = dict(zip(_HOLDS, (at_least, above, at_most, below, from_0_below), strict=True))
    rules = {words: bound for words, bound in bounds.items() if bound is not None}
    metadata = {"reason": reason, "rules": rules, "choices": tuple(choices)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(settings: type) -> Any:
    """A dataclass field that holds the fields of another dataclass."""
    return field(default_factory=settings)


def same_as(other: str) -> Any:
    """A dataclass field that is an alias of another one: a config has one value for both."""
    metadata = {"same_as": other, "reason": f"Flow-GRPO's name of {other}.", "choices": ()}
    return field(default=None, metadata=metadata)


def walk(settings: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """All settings by their full names."""
    for each in fields(settings):
        if is_dataclass(each.type):
            yield from walk(each.type, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name, each


def second_names(settings: type) -> dict[str, str]:
    """The aliases among these settings: {alias: field it stands for}."""
    named = {name: each.metadata.get("same_as") for name, each in walk(settings)}
    return {name: other for name, other in named.items() if other}


def to_config(settings: type) -> ConfigDict:
    """All fields at their defaults."""
    config = _to_config(settings)
    for name, other in second_names(settings).items():
        (part, key), (other_part, other_key) = name.split("."), other.split(".")
        config[part][key] = config[other_part].get_ref(other_key)
    return config


def _to_config(settings: type) -> ConfigDict:
    config = ConfigDict()
    for each in fields(settings):
        if is_dataclass(each.type):
            config[each.name] = _to_config(each.type)
        elif each.default is MISSING:
            config[each.name] = ConfigDict(each.default_factory())
        elif each.default is not None:
            config[each.name] = each.default
        elif "same_as" not in each.metadata:
            config[each.name] = placeholder(get_args(each.type)[0])
    return config


def freeze(settings: type, config: Any) -> Any:
    """The values of a config as an object of `settings`; what is frozen stays as it is."""
    if not isinstance(config, ConfigDict):
        return config
    values = {each.name: config[each.name] for each in fields(settings)}
    for each in fields(settings):
        value = values[each.name]
        if is_dataclass(each.type):
            values[each.name] = freeze(each.type, value)
        elif isinstance(value, ConfigDict):
            values[each.name] = value.to_dict()
        elif isinstance(value, list):
            values[each.name] = tuple(value)
    return settings(**values)


def to_json(settings: Any) -> dict[str, Any]:
    """What a run writes of its settings."""
    return json.loads(json.dumps(asdict(settings), default=str))


def check_settings(part: str, settings: Any) -> None:
    """One line for the first value that breaks its rule."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        name = f"{part}.{each.name}" if part else each.name
        if is_dataclass(value):
            check_settings(name, value)
        elif "same_as" in each.metadata:
            continue  # the field that it aliases is checked
        elif value is not None or each.default is not None:
            _check_rules(name, value, each)


def _check_rules(name: str, value: Any, each: Field) -> None:
    choices = each.metadata.get("choices", ())
    if choices and value not in choices:
        message = f"{name}={value!r} must be one of {', '.join(map(repr, choices))}"
        raise UserError(with_nearest(message, value, choices))
    for number in value if isinstance(value, tuple | list) else (value,):
        if isinstance(number, Real) and not isinstance(number, bool):
            _check_number(name, value, number, each.metadata.get("rules", {}))


def _check_number(name: str, value: Any, number: Real, rules: dict[str, float]) -> None:
    if not isinstance(number, int) and not math.isfinite(number):  # a huge int is no float
        raise UserError(f"{name}={value} must be a finite number")
    if not rules.keys() & {*UPPER_BOUNDS}:
        rules = {**rules, "at most": LARGEST}
    for words, bound in rules.items():
        if not _HOLDS[words](number, bound):
            raise UserError(f"{name}={value} must be {words} {bound}")
