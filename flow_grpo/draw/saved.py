"""The config of a run that was, or of a file; both with options of the command line."""

import logging
import sys
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from flow_grpo.config import command_line
from flow_grpo.config.places import find_config
from flow_grpo.config.trade import OPEN_FIELDS, SCRIPTS
from flow_grpo.draw.fields import DRAW, get_config
from flow_grpo.errors import UserError, first_line, with_nearest
from flow_grpo.files import dotted, read_json

log = logging.getLogger("flow_grpo")


def config_of_run(run: Path, options: list[str]) -> ConfigDict:
    """What `run` was trained with. A field that came later has its default."""
    config = get_config()
    saved = _read(run)
    for name, script in SCRIPTS.items():
        if name in saved and name not in config:
            raise UserError(f"{run} is a run of {script}; this works with runs of scripts/train.py")
    for name in OPEN_FIELDS:  # a default is no part of them
        config[name] = ConfigDict(saved.pop(name, config[name].to_dict()))
    known = dict(dotted(config.to_dict()))
    fields = dict(dotted(saved))
    if gone := sorted(name for name in fields if name not in known):
        log.warning("%s has fields that are no more: %s", run / "config.json", ", ".join(gone))
    try:
        config.update_from_flattened_dict({k: v for k, v in fields.items() if k in known})
    except (TypeError, ValueError) as error:
        raise UserError(f"{run / 'config.json'} does not fit: {first_line(error)}") from error
    return override(config, options)


def config_of_file(path: str, options: list[str]) -> ConfigDict:
    """path/to/config.py or path/to/config.py:preset."""
    argument = f"--config={find_config(path)}"
    return override(command_line.check_names([sys.argv[0], argument, *options], DRAW), options)


def override(config: ConfigDict, options: list[str]) -> ConfigDict:
    """--config.FIELD=VALUE."""
    for option in options:
        name, equals, value = option.removeprefix("--config.").partition("=")
        command_line.check_name(name, config, DRAW, value if equals else None)
    values, given = flags.FlagValues(), sys.argv
    try:
        sys.argv = [given[0], *options]  # where ml_collections looks for them
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        values(sys.argv)
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(command_line.plainly(error, config, options)) from error
    finally:
        sys.argv = given
    return values.config


def _read(run: Path) -> dict[str, Any]:
    path = run / "config.json"
    if not run.is_dir():
        message = f"no run at {run}: there is no such folder"
        beside = (str(each.parent) for each in run.parent.glob("*/config.json"))
        raise UserError(with_nearest(message, str(run), beside))
    try:
        saved = read_json(path)
    except FileNotFoundError as error:
        raise UserError(f"{run} is not a run: it has no config.json") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from error
    if not isinstance(saved, dict):
        raise UserError(f"cannot read {path}: it must be an object of fields")
    return saved
