"""Load the config of an existing run from its config.json."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config.config_dicts import FREE_FORM_FIELDS
from flow_grpo.config.custom import CUSTOM_CLASS_FIELDS
from flow_grpo.config.migration import REMOVED_FIELDS
from flow_grpo.config.paths import map_dataset_paths
from flow_grpo.config.trainer_spec import TRAINING_SCRIPTS, TrainerSpec
from flow_grpo.errors import UserError, did_you_mean_file, first_line
from flow_grpo.untrusted_files import flatten_fields, is_inside, read_json

log = logging.getLogger("flow_grpo")
CONFIG_FILE = "config.json"
START_FILE = "start.json"  # working directories, commands and prompts of the run
CODE_FIELDS = ("custom_rewards", "environment", *CUSTOM_CLASS_FIELDS)
# also in reward_options
PATH_FIELDS = ("model", "head", "processor", "lora_path", "lora", "critic_model")
LOCATION_FIELDS = ("resume", "run_name", "logdir")  # name the run directory


def load_run_config(run: Path, spec: TrainerSpec) -> ConfigDict:
    """Return the config that `run` was trained with; settings added since have their defaults.

    Raises:
        UserError: If the run belongs to the other trainer, or its config.json is invalid.
    """
    folders, config = read_start_folders(run), spec.get_config()
    saved = resolve_start_paths(read_saved_fields(run), folders)
    if script := spec.other_script(saved):
        [ours] = {*TRAINING_SCRIPTS.values()} - {script}
        raise UserError(f"was created by {script}, but a run of {ours} is needed", field=run)
    sections = [name for name, value in config.items() if isinstance(value, ConfigDict)]
    _check_sections(run, saved, sections)
    _reject_code_in_run(run, saved)
    if any(map(saved.get, CODE_FIELDS)):  # may be modules in them
        sys.path += [str(each) for each in folders if str(each) not in sys.path]
    if spec.load_custom_classes(saved):
        config = spec.get_config()
    for name in FREE_FORM_FIELDS:  # replaced as a whole: a default is not merged into them
        if name in config:
            config[name] = ConfigDict(saved.pop(name, config[name].to_dict()))
    for name, value in config.items():
        for key in value if isinstance(value, ConfigDict) and name not in FREE_FORM_FIELDS else ():
            if isinstance(value[key], ConfigDict) and isinstance(saved.get(name), dict):
                value[key] = ConfigDict(saved[name].pop(key, {}))
    known = dict(flatten_fields(config.to_dict()))
    fields = dict(flatten_fields(saved))
    removed = REMOVED_FIELDS.items()
    if gone := sorted(n for n, v in fields.items() if n not in known and (n, v) not in removed):
        log.warning(
            "%s has settings that no longer exist and are ignored: %s",
            run / CONFIG_FILE,
            ", ".join(gone),
        )
    try:
        config.update_from_flattened_dict({k: v for k, v in fields.items() if k in known})
    except (TypeError, ValueError) as error:
        raise UserError(f"is invalid: {first_line(error)}", field=run / CONFIG_FILE) from error
    return config


def _check_sections(run: Path, saved: dict[str, Any], sections: list[str]) -> None:
    """Reject a config.json without a model, or with another value in place of a section."""
    if "pretrained" not in saved:
        raise UserError(
            "is not the config of a run: 'pretrained' is missing", field=run / CONFIG_FILE
        )
    for name in sections:
        if not isinstance(saved.get(name, {}), dict):
            raise UserError(
                f"is invalid: {name}={saved[name]!r:.40} must be a JSON object",
                field=run / CONFIG_FILE,
            )


def _reject_code_in_run(run: Path, saved: dict[str, Any]) -> None:
    """Reject custom code inside the run directory, which may be from an untrusted source."""
    for field in CODE_FIELDS:
        named = saved.get(field)
        for path in named.values() if isinstance(named, dict) else [named]:
            file = str(path).rpartition(":")[0]
            if file.endswith(".py") and is_inside(run, Path(file)):
                raise UserError(
                    f"names {file} in {field}, but code in a run directory is not executed",
                    field=run / CONFIG_FILE,
                    hint="move it elsewhere and change the path in this file",
                )


def read_start_folders(run: Path) -> list[Path]:
    """Return the working directories of a run, the latest first.

    Directories inside the run are left out, because it may be from an untrusted source.
    """
    try:
        named = read_json(run / START_FILE)["folders"]
        found = [Path(each) for each in named if os.path.isabs(each)]
    except (OSError, UserError, KeyError, TypeError):
        return []
    return [each for each in found if not is_inside(run, each)]


def resolve_start_paths(fields: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """Make paths absolute that are relative to another working directory of the run."""

    def find(path: str) -> str:
        there = next((each for each in folders if path and os.path.exists(each / path)), None)
        return path if there in (None, Path.cwd()) else str(there / path)

    def change(name: str, value: Any, field: str) -> Any:
        """Return a setting with its paths, at any depth, resolved; other values are unchanged."""
        if isinstance(value, dict):
            return {key: change(key, each, field or name) for key, each in value.items()}
        if not isinstance(value, str):
            return value
        if (field or name) in CODE_FIELDS:
            file, colon, attribute = value.rpartition(":")
            return find(file) + colon + attribute if file.endswith(".py") else value
        if name in ("dataset", "eval_dataset"):
            return map_dataset_paths(value, find)
        return find(value) if name in PATH_FIELDS else value

    return change("", fields, "")


def load_resume_config(run: Path, spec: TrainerSpec) -> ConfigDict:
    """Return the config that resumes `run` in its current place."""
    config = load_run_config(run, spec)
    folder = run if run.name not in ("", "..") else run.resolve()
    config.logdir = str(folder.parent)
    config.run_name = folder.name
    config.resume = "auto"
    config.resume_changed = False  # was set for an earlier start
    return config


def find_run_directory(path: Path) -> Path | None:
    """Return the run directory that `path` is, or that contains it (as for a checkpoint)."""
    for each in (path, *path.parents):
        # neither function raises if the name is too long
        if os.path.isfile(each / CONFIG_FILE) and os.path.isdir(each / "checkpoints"):
            return each
    return None


def read_saved_fields(run: Path) -> dict[str, Any]:
    """Read config.json of a run directory.

    Raises:
        UserError: If the directory is not a run, or its config.json is damaged.
    """
    path = run / CONFIG_FILE
    if not run.is_dir():
        raise UserError(
            f"no run at {run}: no such directory", hint=did_you_mean_file(run, f"*/{CONFIG_FILE}")
        )
    try:
        saved = read_json(path)
    except FileNotFoundError as error:
        raise UserError(f"is not a run directory: it has no {CONFIG_FILE}", field=run) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    if not isinstance(saved, dict):
        raise UserError("must be a JSON object", field=path)
    return saved
