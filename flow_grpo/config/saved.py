"""The config of a run that was, from its config.json."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config.custom import CUSTOM
from flow_grpo.config.places import each_set
from flow_grpo.config.trade import OPEN_FIELDS, SCRIPTS, Trade
from flow_grpo.errors import UserError, first_line, with_nearest_file
from flow_grpo.files import dotted, lies_in, read_json

log = logging.getLogger("flow_grpo")
CONFIG = "config.json"
START = "start.json"  # where it was started, and what its prompts were
CODE = ("custom_rewards", "environment", *CUSTOM)
PATHS = ("model", "head", "processor", "lora_path")  # also of rewards' options
PLACES = ("resume", "run_name", "logdir")  # what a run is called, not what it does


def config_of_run(run: Path, trade: Trade) -> ConfigDict:
    """What `run` was trained with. A field that came later has its default."""
    folders, config = start_folders(run), trade.get_config()
    saved = as_started(read_fields(run), folders)
    for name, script in SCRIPTS.items():
        if name in saved and name not in config:
            ours = next(SCRIPTS[field] for field in SCRIPTS if field in config)
            raise UserError(f"{run} is a run of {script}; this works with runs of {ours}")
    _check_sections(run, saved, config)
    _refuse_code(run, saved)
    if any(map(saved.get, CODE)):  # perhaps modules
        sys.path += [str(each) for each in folders if str(each) not in sys.path]
    if trade.load_custom(saved):
        config = trade.get_config()
    for name in (each for each in OPEN_FIELDS if each in config):  # a default is no part of them
        config[name] = ConfigDict(saved.pop(name, config[name].to_dict()))
    for name, value in config.items():
        for key in value if isinstance(value, ConfigDict) and name not in OPEN_FIELDS else ():
            if isinstance(value[key], ConfigDict) and isinstance(saved.get(name), dict):
                value[key] = ConfigDict(saved[name].pop(key, {}))
    known = dict(dotted(config.to_dict()))
    fields = dict(dotted(saved))
    if gone := sorted(name for name in fields if name not in known):
        log.warning("%s has fields that are no more: %s", run / CONFIG, ", ".join(gone))
    try:
        config.update_from_flattened_dict({k: v for k, v in fields.items() if k in known})
    except (TypeError, ValueError) as error:
        raise UserError(f"{run / CONFIG} does not fit: {first_line(error)}") from error
    return config


def _check_sections(run: Path, saved: dict[str, Any], config: ConfigDict) -> None:
    """Reject a config.json without a model, or with another value in place of a section."""
    if "pretrained" not in saved:
        raise UserError(f"{run / CONFIG} is not the config of a run: it has no 'pretrained'")
    for name, value in config.items():
        if isinstance(value, ConfigDict) and not isinstance(saved.get(name, {}), dict):
            raise UserError(
                f"{run / CONFIG} does not fit: {name}={saved[name]!r:.40} must be an object of "
                "fields"
            )


def _refuse_code(run: Path, saved: dict[str, Any]) -> None:
    """A run may be somebody else's: what is named has to be the user's, not in what was sent."""
    for field in CODE:
        named = saved.get(field)
        for path in named.values() if isinstance(named, dict) else [named]:
            file = str(path).rpartition(":")[0]
            if file.endswith(".py") and lies_in(run, Path(file)):
                raise UserError(
                    f"{run / CONFIG}: {field} names {file}, and code in the folder of a run is not "
                    "run; move it out of there and name its new place in this file"
                )


def start_folders(run: Path) -> list[Path]:
    """Where it was started, the last time first. A folder in the run itself is none: it may be
    somebody else's."""
    try:
        named = read_json(run / START)["folders"]
        found = [Path(each) for each in named if os.path.isabs(each)]
    except (OSError, UserError, KeyError, TypeError):
        return []
    return [each for each in found if not lies_in(run, each)]


def as_started(fields: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """Fields of a run, with paths that are relative to the folder it was started in made absolute,
    if that is another than this."""

    def find(path: str) -> str:
        there = next((each for each in folders if path and os.path.exists(each / path)), None)
        return path if there in (None, Path.cwd()) else str(there / path)

    def change(name: str, value: Any, field: str) -> Any:
        if isinstance(value, dict):
            return {key: change(key, each, field or name) for key, each in value.items()}
        if not isinstance(value, str):
            return value
        if (field or name) in CODE:
            file, colon, attribute = value.rpartition(":")
            return find(file) + colon + attribute if file.endswith(".py") else value
        if name == "dataset":
            return each_set(value, find)
        return find(value) if name in PATHS else value

    return change("", fields, "")


def config_to_go_on(run: Path, trade: Trade) -> ConfigDict:
    """The same, for a start that goes on with the run, wherever it is now."""
    config, folder = config_of_run(run, trade), run if run.name not in ("", "..") else run.resolve()
    config.logdir, config.run_name, config.resume = str(folder.parent), folder.name, "auto"
    config.resume_changed = False  # was agreed to for another start
    return config


def find_run(path: Path) -> Path | None:
    """The run that this is, or that it lies in, as a checkpoint does."""
    for each in (path, *path.parents):
        # neither raises for a name that is too long
        if os.path.isfile(each / CONFIG) and os.path.isdir(each / "checkpoints"):
            return each
    return None


def read_fields(run: Path) -> dict[str, Any]:
    path = run / CONFIG
    if not run.is_dir():
        message = f"no run at {run}: there is no such folder"
        raise UserError(with_nearest_file(message, run, f"*/{CONFIG}"))
    try:
        saved = read_json(path)
    except FileNotFoundError as error:
        raise UserError(f"{run} is not a run: it has no {CONFIG}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    if not isinstance(saved, dict):
        raise UserError(f"cannot read {path}: it must be an object of fields")
    return saved
