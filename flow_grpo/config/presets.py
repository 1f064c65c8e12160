"""Presets as data: each lists what differs from its parent preset or from the defaults."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config.config_dicts import FREE_FORM_FIELDS
from flow_grpo.config.migration import RENAMED_PRESETS
from flow_grpo.errors import UserError, nearest

PARENT_KEY = "like"  # names the parent of a preset
FieldValues = Mapping[str, Any]  # settings, with sections as nested mappings
FieldHandlers = Mapping[str, Callable[[ConfigDict, Any], None]]


def resolve_preset(
    name: str,
    table: Mapping[str, FieldValues],
    config: ConfigDict,
    special: FieldHandlers | None = None,
) -> ConfigDict:
    """Apply a preset to `config`, after its parents.

    Args:
        name: Name of the preset.
        table: All presets.
        config: Config to change.
        special: Handlers of keys that are not settings.

    Returns:
        The same config.
    """
    if parent := table[name].get(PARENT_KEY):
        resolve_preset(parent, table, config, special)
    apply_fields(table[name], config, special)
    return config


def apply_fields(
    fields: FieldValues, config: ConfigDict, special: FieldHandlers | None = None
) -> None:
    """Set settings in their order; `special` handles keys that are not settings."""
    for name, value in fields.items():
        if special and name in special:
            special[name](config, value)
        elif name in FREE_FORM_FIELDS:
            config[name] = ConfigDict(value)
        elif isinstance(value, dict):
            apply_fields(value, config[name])
        elif name != PARENT_KEY:
            config[name] = value


def check_preset_exists(name: str, presets: Collection[str], suffix: str = "") -> None:
    """Reject an unknown preset, with a suggestion.

    Args:
        name: Name of the preset, without its suffix.
        presets: Names of all presets.
        suffix: Suffix of the name, for messages.
    """
    if name in presets:
        return
    hint = f"known presets: {', '.join(presets)}"
    if RENAMED_PRESETS.get(name) in presets:
        hint = f"it is called {RENAMED_PRESETS[name]}{suffix} here"
    elif near := nearest(name, presets):
        hint = f"did you mean {near}{suffix}?"
    raise UserError("is unknown", field="preset", value=f"{name}{suffix}", hint=hint)


def preset_models(*tables: Mapping[str, FieldValues]) -> list[str]:
    """Return the models that the presets of these tables train."""
    fields = [each.get("pretrained", {}) for table in tables for each in table.values()]
    return list(dict.fromkeys(each["model"] for each in fields if "model" in each))
