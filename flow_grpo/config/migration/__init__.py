"""Settings of other trainers and of earlier versions, and what to write instead.

Each trainer has a module with its table; see docs/migrating.md.
"""

from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any

from flow_grpo.config.migration.flow_grpo import (
    PROMPT_FNS,
    RENAMED_FIELDS,
    RENAMED_PRESETS,
    RENAMED_REWARDS,
    UNSUPPORTED_FIELDS,
)
from flow_grpo.config.migration.projects import PROJECTS, foreign_hint
from flow_grpo.errors import UserError

__all__ = [
    "OLD_NAME_MESSAGE",
    "PROJECTS",
    "PROMPT_FNS",
    "REMOVED_FIELDS",
    "RENAMED_FIELDS",
    "RENAMED_PRESETS",
    "RENAMED_REWARDS",
    "UNSUPPORTED_FIELDS",
    "check_removed_fields",
    "field_hint",
    "foreign_hint",
    "translate_fields",
]

OLD_NAME_MESSAGE = "{}={} uses a name of Flow-GRPO"
# Settings of earlier versions that were removed, with the value that gives today's behaviour.
REMOVED_FIELDS: dict[str, Any] = {"sample.merge_lora": False}


def check_removed_fields(path: Path, saved: Mapping[str, Any], known: Container[str]) -> None:
    """Reject the config of an earlier version if a setting that was removed changed its result.

    Args:
        path: The config.json, for the message.
        saved: Its settings by their full names.
        known: Settings that exist here.
    """
    for name, today in REMOVED_FIELDS.items():
        if name not in known and saved.get(name, today) != today:
            raise UserError(
                f"has {name}={saved[name]!r}, a setting that was removed",
                field=path,
                hint=f"set it to {today!r} there to resume with today's behaviour",
            )


def field_hint(
    field: str, known: Collection[str] = (), chosen: Mapping[str, Any] | None = None
) -> str:
    """Return what to write instead of a setting of another trainer or an earlier version, or "".

    Args:
        field: The unknown setting.
        known: Settings that exist here.
        chosen: Settings that already have a value.
    """
    if field in REMOVED_FIELDS:
        return f"omit it: it was removed; all runs behave as with {REMOVED_FIELDS[field]!r}"
    if chosen and (ours := RENAMED_FIELDS.get(field)) in chosen:
        return f"omit it: it is called {ours} here, which is {chosen[ours]!r}"
    if field in RENAMED_FIELDS:
        return f"it is called {RENAMED_FIELDS[field]} here"
    return UNSUPPORTED_FIELDS.get(field) or foreign_hint(field, known)


def translate_fields(
    given: Mapping[str, Any], known: Collection[str], chosen: Container[str] = ()
) -> dict[str, dict[str, Any]]:
    """Translate the settings of Flow-GRPO and of earlier versions in `given`.

    Args:
        given: Settings and their values.
        known: Settings that exist here.
        chosen: Those that already have a value, which a translation does not override.

    Returns:
        By setting of `given`, the settings and values to use instead; empty if it has to be
        omitted. Settings that need no translation, or have none, are left out.
    """
    named = (given.get(name) for name in ("custom_rewards", "reward_servers"))
    custom = [
        n for each in named if isinstance(each, Mapping) for n, place in each.items() if place
    ]
    translations = {}
    for name, value in given.items():
        new = {} if RENAMED_FIELDS.get(name) in chosen else _translate_field(name, value, custom)
        is_foreign = name not in known or name in ("prompt_fn", "reward_fn", "eval_reward_fn")
        if is_foreign and new is not None and {*new} <= {*known}:
            translations[name] = new
    return translations


def _translate_field(field: str, value: Any, custom: Container[str]) -> dict[str, Any] | None:
    """Return the settings to use instead, {} to omit `field`, or None if it has no translation.

    Args:
        field: A setting of Flow-GRPO or of an earlier version.
        value: Its value.
        custom: Names of custom rewards, which are not translated.
    """
    if field in UNSUPPORTED_FIELDS or field in REMOVED_FIELDS:
        return {}
    if field in RENAMED_FIELDS:
        return {RENAMED_FIELDS[field]: value}
    if field == "prompt_fn" and isinstance(value, str) and value in PROMPT_FNS:
        return {field: PROMPT_FNS[value]}
    if field not in ("reward_fn", "eval_reward_fn") or not isinstance(value, Mapping):
        return None
    renamed = {n: RENAMED_REWARDS[n] for n in value if n in RENAMED_REWARDS and n not in custom}
    weights = {renamed[n][0] if n in renamed else n: weight for n, weight in value.items()}
    return {field: weights, "reward_options": dict(renamed.values())} if renamed else None
