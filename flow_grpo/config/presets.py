"""Presets as tables: a name, and what differs from another preset or from all defaults."""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

LIKE = "like"  # the preset that a preset starts from
Fields = Mapping[str, Any]  # by full names; a value may be a function of the config so far
Special = Mapping[str, Callable[[ConfigDict, Any], None]]


def resolve(
    name: str, table: Mapping[str, Fields], config: ConfigDict, special: Special | None = None
) -> ConfigDict:
    """`config` with the fields of a preset, those of what it is like first."""
    if parent := table[name].get(LIKE):
        resolve(parent, table, config, special)
    apply(table[name], config, special)
    return config


def apply(fields: Fields, config: ConfigDict, special: Special | None = None) -> None:
    """Set fields in their order. `special` says what to do with names that are no fields."""
    for name, value in fields.items():
        section, _, key = name.rpartition(".")
        if special and name in special:
            special[name](config, value)
        elif name != LIKE:
            value = value(config) if callable(value) else value
            value = ConfigDict(value) if isinstance(value, dict) else value
            (config[section] if section else config)[key] = value
