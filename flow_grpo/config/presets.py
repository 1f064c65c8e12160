"""Presets as tables: a name, and what differs from another preset or from all defaults."""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config.trade import OPEN_FIELDS

LIKE = "like"  # the preset that a preset starts from
Fields = Mapping[str, Any]  # of a config, or of a section of it
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
        if special and name in special:
            special[name](config, value)
        elif name in OPEN_FIELDS:
            config[name] = ConfigDict(value)
        elif isinstance(value, dict):
            apply(value, config[name])
        elif name != LIKE:
            config[name] = value


def models_of(*tables: Mapping[str, Fields]) -> list[str]:
    """What the presets of these tables train."""
    fields = [each.get("pretrained", {}) for table in tables for each in table.values()]
    return list(dict.fromkeys(each["model"] for each in fields if "model" in each))
