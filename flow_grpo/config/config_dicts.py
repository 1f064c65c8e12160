"""Validate a ConfigDict, which config files return, before it becomes frozen settings."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config import migration
from flow_grpo.config.custom import CUSTOM_CLASS_FIELDS
from flow_grpo.config.fields import RewardFields
from flow_grpo.errors import UserError, nearest
from flow_grpo.untrusted_files import flatten_fields, reject_lone_surrogates

# Settings that are dicts with arbitrary keys.
FREE_FORM_FIELDS = (
    *(each.name for each in fields(RewardFields) if each.type is dict),
    *CUSTOM_CLASS_FIELDS,
    "environment_options",
)
# Sections that may be given as the value of their main setting.
SHORTHANDS = {"preferences": "preferences.data"}
FIELD_TYPES = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    tuple: ((tuple, list), "a tuple"),
    ConfigDict: (ConfigDict, "a ConfigDict"),
}
PATH_FIELDS = (
    "dataset",
    "eval_dataset",
    "logdir",
    "run_name",
    "resume",
    "pretrained.model",
    "preferences.data",
    "train.lora_path",
)
MAX_FILE_NAME_BYTES = 255  # of all Linux file systems
MAX_LISTED = 5  # settings named in an error about many


def iter_config_fields(
    config: ConfigDict, prefix: str = "", closed: Collection[str] = FREE_FORM_FIELDS
) -> Iterator[tuple[str, Any]]:
    """Yield (full name, value) of every setting and section; a section comes before its settings.

    Dicts named in `closed`, and dicts within a section, are single values.
    """
    for key, value in config.items():
        yield prefix + key, value
        if isinstance(value, ConfigDict) and not prefix and key not in closed:
            yield from iter_config_fields(value, f"{prefix}{key}.", closed)


def suggest_field(
    name: str, known: Collection[str], chosen: Mapping[str, Any], *, cutoff: float
) -> str:
    """Return what to write instead of an unknown setting: its new name or a similar one, else "".

    Args:
        name: The unknown name.
        known: Names of all settings.
        chosen: Settings that already have a value.
        cutoff: Minimum similarity, from 0 to 1.
    """
    if hint := migration.field_hint(name, known, chosen):
        return hint
    near = nearest(name, known, cutoff=cutoff)
    return f"did you mean {near}?" if near else ""


def check_string_keys(config: ConfigDict, prefix: str = "") -> None:
    """Reject keys that are not strings, because full names join them with dots."""
    for key, value in config.items():
        if not isinstance(key, str):
            raise UserError(
                f"has a key {key!r} that must be a string",
                field=prefix.rstrip(".") or "the config",
                hint=f"write {str(key)!r}",
            )
        if isinstance(value, ConfigDict):
            check_string_keys(value, f"{prefix}{key}.")


def check_names_and_types(config: ConfigDict, default: ConfigDict, *, example: str) -> None:
    """Reject unknown and missing settings, and values of the wrong type.

    Args:
        config: The config to check.
        default: Config of the same trainer with all settings at their defaults.
        example: Python expression that returns a complete config, for messages.
    """
    known, given = dict(iter_config_fields(default)), dict(iter_config_fields(config))
    for name, value in known.items():
        if isinstance(value, ConfigDict) and name in given:
            _check_type(name, given[name], ConfigDict)
    if problems := _describe_unknown_and_missing(given, known, example):
        raise UserError(f"invalid config: {'; '.join(problems)}")
    for name, value in flatten_fields(config.to_dict()):
        _check_text(name, value)
    for name, value in given.items():
        section, _, key = name.rpartition(".")
        kind = (default[section] if section else default).get_type(key)
        _check_value(name, value, known[name], kind)


def _describe_unknown_and_missing(
    given: Mapping[str, Any], known: Mapping[str, Any], example: str
) -> list[str]:
    """Return what is wrong with the names in a config, and what to write instead."""
    values = {n: v.to_dict() if isinstance(v, ConfigDict) else v for n, v in given.items()}
    chosen = {n: v for n, v in given.items() if n in known and v != known[n]}
    translated = migration.translate_fields(values, known, chosen)
    unknown = [name for name in given if name not in known]
    hints = {name: suggest_field(name, known, chosen, cutoff=0.75) for name in unknown}
    shown = {name: f"{name} ({hint})" if hint else name for name, hint in hints.items()}
    others = [shown.pop(name) for name in unknown if name not in translated]
    absent = [name for name in known if name not in given]
    missing = [name for name in absent if name.rpartition(".")[0] not in absent]
    problems = []
    if unknown:
        listed = [*shown.values(), *([_join_first(others)] if others else [])]
        problems.append(f"unknown settings: {', '.join(listed)}")
    problems += [
        migration.OLD_NAME_MESSAGE.format(name, values[name])
        for name in translated
        if name in known
    ]
    if missing:  # of a missing section, only its name
        problems.append(f"missing settings: {_join_first(missing)}")
    if ours := {n: v for new in translated.values() for n, v in new.items()}:
        problems.append("write " + "; ".join(f"config.{n} = {v!r}" for n, v in ours.items()))
    if others or missing:
        problems.append(f"start from a preset, such as {example}, and change what differs")
    return problems


def _join_first(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _check_value(name: str, value: Any, default: Any, kind: type) -> None:
    """Reject a value that has another type or tuple length than its default, or is not finite."""
    if value is None and default is None:
        return
    if value is None and default == "":
        raise UserError("must be a string", field=name, value=None, hint="use '' for none")
    _check_type(name, value, kind)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError("must be a finite number", field=name, value=value)
    if kind is tuple:
        if len(value) != len(default):
            raise UserError(f"must have {len(default)} values", field=name, value=value)
        for one, one_default in zip(value, default, strict=True):
            _check_value(name, one, one_default, type(one_default))


def _check_type(name: str, value: Any, kind: type) -> None:
    allowed, words = FIELD_TYPES[kind]
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"must be {words}", field=name, value=value)


def _check_text(name: str, value: Any) -> None:
    """Reject invalid characters in a name or a string value, and path components too long."""
    for text in (name, value) if isinstance(value, str) else (name,):
        reject_lone_surrogates(text, ascii(name))
        if "\0" in text:
            raise UserError("must not contain a null character", field=name, value=value)
    parts = re.split("[/,]", value) if name in PATH_FIELDS and isinstance(value, str) else []
    if any(len(part.encode()) > MAX_FILE_NAME_BYTES for part in parts):
        raise UserError("is too long for a path", field=name, value=f"{value[:60]}...")
