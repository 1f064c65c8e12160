"""The schema of configs: name, type, default, help and rule of each setting in one place.

A section of a config is a frozen dataclass of `setting(...)`s: `--config.nft.beta=0.1` sets
`NftSettings.beta`. Defaults, validation and `--help` are all derived from it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, field, fields, is_dataclass
from numbers import Real
from operator import attrgetter
from typing import Any, get_args

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from flow_grpo.errors import UserError, did_you_mean

_COMPARISONS = {
    "at least": lambda value, bound: value >= bound,
    "above": lambda value, bound: value > bound,
    "at most": lambda value, bound: value <= bound,
    "below": lambda value, bound: value < bound,
    "at least 0 and below": lambda value, bound: 0 <= value < bound,
}

# Conditions on other settings, mapped to the reason, which may be "". A condition is "NAME" (that
# setting is true, or neither 0 nor empty) or "NAME=VALUE|VALUE" (it has one of these values).
Conditions = Mapping[str, str] | str

UPPER_BOUNDS = ("at most", "below", "at least 0 and below")
# Upper bound of every number that declares none. Larger values overflow float32 or 32-bit indices.
DEFAULT_MAX = 10**9


def setting(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    from_0_below: float | None = None,
    choices: Iterable[str] = (),
    requires: Conditions = "",
    excludes: Conditions = "",
) -> Any:
    """Declare a setting as a dataclass field.

    Args:
        default: Default value. None is for a setting that may stay unset, a dict for a mapping with
            arbitrary keys.
        help: One or two sentences for `--help`.
        at_least: Inclusive lower bound of a number, or of each number in a tuple.
        above: Exclusive lower bound.
        at_most: Inclusive upper bound; without an upper bound it is `DEFAULT_MAX`.
        below: Exclusive upper bound.
        from_0_below: Exclusive upper bound with the lower bound 0.
        choices: Allowed values.
        requires: Conditions that must hold if the value is not the default.
        excludes: Conditions that must not hold if the value is not the default.
    """
    bounds = dict(zip(_COMPARISONS, (at_least, above, at_most, below, from_0_below), strict=True))
    rules = {words: bound for words, bound in bounds.items() if bound is not None}
    metadata = {
        "help": help,
        "rules": rules,
        "choices": tuple(choices),
        "requires": _with_reasons(requires),
        "excludes": _with_reasons(excludes),
    }
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _with_reasons(conditions: Conditions) -> dict[str, str]:
    if isinstance(conditions, str):
        return {conditions: ""} if conditions else {}
    return dict(conditions)


def section(settings: type) -> Any:
    """Declare a section: a dataclass field that contains another dataclass of settings."""
    return field(default_factory=settings)


def alias_of(other: str) -> Any:
    """Declare an alias of the setting `other`: "section.name", or "name" in the same section."""
    metadata = {"alias_of": other, "help": f"Alias of {other}.", "choices": ()}
    return field(default=None, metadata=metadata)


def iter_settings(settings: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Yield every setting with its full name, such as "train.beta"."""
    for each in fields(settings):
        if is_dataclass(each.type):
            yield from iter_settings(each.type, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name, each


def field_aliases(settings: type) -> dict[str, str]:
    """Return the aliases, mapped to the settings they stand for."""
    targets = {}
    for name, each in iter_settings(settings):
        if target := each.metadata.get("alias_of"):
            section_name = name.rpartition(".")[0]
            targets[name] = target if "." in target else f"{section_name}.{target}"
    return targets


def build_default_config(settings: type) -> ConfigDict:
    """Return a config with all settings at their defaults."""
    config = _build_default_config(settings)
    for name, other in field_aliases(settings).items():
        part, key = name.split(".")
        other_part, other_key = other.split(".")
        config[part][key] = config[other_part].get_ref(other_key)
    return config


def _build_default_config(settings: type) -> ConfigDict:
    """Build the config of a settings dataclass; an unset setting becomes a typed placeholder."""
    config = ConfigDict()
    for each in fields(settings):
        if is_dataclass(each.type):
            config[each.name] = _build_default_config(each.type)
        elif each.default is MISSING:
            config[each.name] = ConfigDict(each.default_factory())
        elif each.default is not None:
            config[each.name] = each.default
        elif "alias_of" not in each.metadata:
            config[each.name] = placeholder(get_args(each.type)[0])
    return config


def freeze(settings: type, config: Any) -> Any:
    """Convert a config to an instance of the dataclass `settings`; other objects are returned."""
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
    """Return settings, also unchecked ones, as the JSON object that is written to config.json."""
    fields = settings.to_dict() if isinstance(settings, ConfigDict) else asdict(settings)
    return json.loads(json.dumps(fields, default=str))


def check_settings(part: str, settings: Any) -> None:
    """Check every value against its rule.

    Args:
        part: Name of the section, or "" for the whole config.
        settings: Frozen settings.

    Raises:
        UserError: For the first value that breaks its rule.
    """
    for name, each in iter_settings(type(settings)):
        value = get_setting(settings, name)
        full_name = f"{part}.{name}" if part else name
        choices = each.metadata.get("choices", ())
        if "alias_of" in each.metadata:
            continue  # its target is checked
        if value is None and each.default is None:
            continue
        if choices and value not in choices:
            raise UserError(
                f"must be one of {', '.join(map(repr, choices))}",
                field=full_name,
                value=value,
                hint=did_you_mean(value, choices),
            )
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, Real) and not isinstance(number, bool):
                _check_number(full_name, value, number, each.metadata.get("rules", {}))


def _check_number(name: str, value: Any, number: Real, rules: dict[str, float]) -> None:
    """Reject `number` if it breaks a rule (such as {"at least": 0}), or exceeds `DEFAULT_MAX`.

    Args:
        name: Full name of the setting.
        value: Value of the setting, for the message.
        number: The value, or one of its elements.
        rules: Bounds by comparison.
    """
    if not isinstance(number, int) and not math.isfinite(number):  # a huge int overflows
        raise UserError("must be a finite number", field=name, value=value)
    if not rules.keys() & {*UPPER_BOUNDS}:
        rules = {**rules, "at most": DEFAULT_MAX}
    for words, bound in rules.items():
        if not _COMPARISONS[words](number, bound):
            raise UserError(f"must be {words} {bound}", field=name, value=value)


def get_setting(settings: Any, name: str) -> Any:
    """Return the value of a setting by its full name, such as "train.beta"."""
    return attrgetter(name)(settings)


def check_conditions(settings: Any) -> None:
    """Check what the settings that differ from their defaults require and exclude.

    Raises:
        UserError: For the first violated condition.
    """
    for name, each in iter_settings(type(settings)):
        value = get_setting(settings, name)
        default = each.default_factory() if each.default is MISSING else each.default
        if value == default:
            continue
        for kind, forbidden in (("requires", False), ("excludes", True)):
            for condition, reason in each.metadata.get(kind, {}).items():
                if _holds(condition, settings) is forbidden:
                    other = condition.partition("=")[0]
                    rule = f"is incompatible with {other}={get_setting(settings, other)!r}"
                    remedy = f"change {other}" if forbidden else f"set {condition}"
                    raise UserError(
                        f"{rule}: {reason}" if reason else rule,
                        field=name,
                        value=value,
                        hint=f"reset it to {default!r}, or {remedy}",
                    )


def _holds(condition: str, settings: Any) -> bool:
    name, equals, values = condition.partition("=")
    value = get_setting(settings, name)
    return str(value) in values.split("|") if equals else bool(value)
