"""Compare the settings of a resumed run with those in its config.json.

A changed setting is used and logged, or rejected. Fields that define the shape of the saved state
cannot change. `GOAL_FIELDS` define what is optimized, so a change is probably a mistake, such as a
reused run name; it needs `resume_changed=True`. Settings are compared by their full names; those
that only one of the two configs has are skipped, because they were added or removed by an update.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flow_grpo.config import paths
from flow_grpo.config.config_dicts import FREE_FORM_FIELDS
from flow_grpo.config.custom import CUSTOM_CLASS_FIELDS
from flow_grpo.config.error_reporting import format_command
from flow_grpo.config.migration import check_removed_fields
from flow_grpo.config.saved_config import (
    CONFIG_FILE,
    LOCATION_FIELDS,
    read_start_folders,
    resolve_start_paths,
)
from flow_grpo.errors import UserError, first_line
from flow_grpo.rewards.custom import current_import_path
from flow_grpo.training.lora_targets import FIELD as LORA_TARGETS_FIELD
from flow_grpo.training.lora_targets import parse_target_modules
from flow_grpo.training.provenance import data_settings, find_changed_data
from flow_grpo.untrusted_files import flatten_fields, read_json

log = logging.getLogger(__name__)

GOAL_FIELDS = (
    "algorithm",
    "train.loss",
    "pretrained.model",
    "pretrained.revision",
    "dataset",
    "eval_dataset",
    "preferences.data",
    "reward_fn",
    "eval_reward_fn",
    "custom_rewards",
    *CUSTOM_CLASS_FIELDS,
    "environment",
    "environment_options",
)
# define the files of the saved state
STATE_FIELDS = ("use_lora", "train.use_8bit_adam", "train.optimizer")
LORA_SHAPE_FIELDS = ("train.lora_rank", "train.lora_alpha", LORA_TARGETS_FIELD)


def compare_configs(
    run: Path, checkpoint: Path | None, config: dict[str, Any], *, same_run: bool
) -> None:
    """Log settings that differ from those of the resumed run; reject those that may not.

    Args:
        run: Directory of the resumed run.
        checkpoint: Its checkpoint to resume from, if there is one.
        config: Current settings, as written to config.json.
        same_run: Whether `run` itself is continued, not a new run from its checkpoint.
    """
    path = run / CONFIG_FILE
    try:
        before, now = _read_previous_fields(run), flatten_config(config)
    except FileNotFoundError:
        log.warning("%s is missing, so changed settings cannot be detected", path)
        return
    except (UserError, OSError, AttributeError) as error:
        raise UserError(
            f"cannot resume from {checkpoint or run}: {first_line(error)}",
            hint=f"restore {CONFIG_FILE}, or remove it to resume without comparing settings",
        ) from error
    if same_run:
        check_removed_fields(path, before, now)
    if checkpoint is not None:
        _reject_changed_state(checkpoint, before, now)
    changed = _changed_fields(before, now)
    data = data_settings(config)
    named = {"preferences.data", *data}
    prompts = [] if named & {*changed} else find_changed_data(run, **data)
    _reject_changed_goal(run, before, now, prompts, same_run=same_run)
    for name in prompts:
        log.warning("resumed with changed prompts: %s", name)
    for name in changed:
        log.warning("resumed with %s=%r instead of %r", name, now[name], before[name])


def check_same_goal(config: dict[str, Any]) -> None:
    """Reject a changed goal (`GOAL_FIELDS`) when the run of `run_name` is resumed.

    Call it before the settings are validated: otherwise the user would first be asked to correct
    settings of a method that the run cannot use.

    Args:
        config: Current settings, as they would be written to config.json.
    """
    if config.get("resume") != "auto" or not config.get("run_name"):
        return
    run = Path(str(config.get("logdir", "")), str(config["run_name"]))
    try:
        before, now = _read_previous_fields(run), flatten_config(config)
    except (UserError, OSError, AttributeError):
        return  # validation reports it
    _reject_changed_goal(run, before, now, same_run=True)


def _read_previous_fields(run: Path) -> dict[str, Any]:
    """Return the settings in the config.json of a run by their full names, with current paths."""
    saved = read_json(run / CONFIG_FILE)
    if rewards := saved.get("custom_rewards"):
        saved["custom_rewards"] = {name: current_import_path(p) for name, p in rewards.items()}
    return flatten_config(resolve_start_paths(saved, read_start_folders(run)))


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return all fields by their full names; free-form ones as dicts without their empty entries.

    `environment_options` keeps those: an environment may read an option that is False.
    """
    fields = {name: value for name, value in config.items() if name not in FREE_FORM_FIELDS}
    flat = dict(flatten_fields(fields))
    for name in FREE_FORM_FIELDS:
        if name in config:
            keep_empty = name == "environment_options"
            flat[name] = {k: v for k, v in config[name].items() if v or keep_empty}
    return flat


def _changed_fields(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the sorted names of settings whose values differ; paths compare by their target.

    Locations of the run and settings that are in only one of the dicts are left out.
    """
    compared = (before.keys() & now.keys()) - {*LOCATION_FIELDS, "resume_changed"}
    return [
        name
        for name in sorted(compared)
        if _normalize_paths(before[name]) != _normalize_paths(now[name])
    ]


def _normalize_paths(value: Any) -> Any:
    """Return a path, or several, in canonical form, so that different spellings compare equal."""

    def real(path: str) -> str:
        found = paths.resolve_path(path)
        return os.path.realpath(found) if os.path.exists(found) else path

    return paths.map_dataset_paths(value, real) if isinstance(value, str) else value


def _reject_changed_state(checkpoint: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a UserError if a setting that determines the shape of the saved state has changed."""
    fields = STATE_FIELDS
    before = {LORA_TARGETS_FIELD: "", **before}  # earlier versions used the family's default
    # a loaded LoRA has its own rank and alpha, which are compared when the state is loaded
    if now["use_lora"] and not (before.get("train.lora_path") or now.get("train.lora_path")):
        fields += LORA_SHAPE_FIELDS
    for name in fields:
        if name in before and _state_value(name, before) != _state_value(name, now):
            raise UserError(
                f"must be {before[name]!r} to resume from {checkpoint}",
                field=name,
                value=now[name],
                hint="set it back, or start a new run",
            )


def _state_value(name: str, fields: dict[str, Any]) -> Any:
    """Return a setting as it determines the state: the order of layer names does not."""
    value = fields[name]
    return parse_target_modules(value) if name == LORA_TARGETS_FIELD else value


def _reject_changed_goal(
    run: Path,
    before: dict[str, Any],
    now: dict[str, Any],
    prompts: Sequence[str] = (),
    *,
    same_run: bool,
) -> None:
    """Raise a UserError if a goal field or one of the prompt files (`prompts`) changed."""
    fields = [name for name in _changed_fields(before, now) if name in GOAL_FIELDS]
    changes = [f"{name}={now[name]!r} (was {before[name]!r})" for name in fields]
    if prompts:
        changes.append(f"prompts in {', '.join(prompts)}")
    if not changes or now.get("resume_changed") is True:
        return
    undo = "set it back" if fields else "restore the prompts"
    if fields and same_run:
        line = format_command(f"--resume {run}", without=[*LOCATION_FIELDS, *fields])
        undo = f"resume it unchanged with {line}"
    raise UserError(
        f"cannot be resumed with changed settings or prompts: {', '.join(changes)}",
        field=run,
        hint=f"{undo}, or allow the change with --config.resume_changed=True",
    )
