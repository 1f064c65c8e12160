"""Config overrides on the command line: loading, validation and error messages with suggestions."""

import ast
import logging
import os
import re
import sys
import traceback
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from flow_grpo.config import migration
from flow_grpo.config.config_dicts import (
    FIELD_TYPES,
    FREE_FORM_FIELDS,
    check_string_keys,
    iter_config_fields,
    suggest_field,
)
from flow_grpo.config.error_reporting import invoked_command, quote_for_shell
from flow_grpo.config.trainer_spec import TrainerSpec
from flow_grpo.errors import UserError, did_you_mean_file, first_line, join_hints, nearest

# Descriptions of values on the command line, where they differ from those of config files.
VALUE_EXAMPLES = {tuple: "a tuple like (0, 5)", ConfigDict: "a dict like {'ocr': 1.0}"}
COMMON_FLAGS_MODULE = "flow_grpo.config.command_line"  # defines the flags that every script has


def load_checked_config(argv: list[str], spec: TrainerSpec) -> ConfigDict | None:
    """Load the config; reject unknown names and contradictory aliases among the overrides.

    absl would report only a key, without suggestions. The directory of the config file is appended
    to `sys.path` for its imports.

    Returns:
        The config without the overrides, or None if --config is missing.
    """
    paths = option_values(argv, "config")
    if not paths:
        return None
    sys.path.append(str(Path(paths[-1].partition(":")[0]).resolve().parent))  # its imports
    _check_preset_world_size(paths[-1].partition(":")[2])
    config = load_config(paths[-1], argv, spec)
    _check_fields(argv, config, spec)
    chosen = (option_values(argv, "config.algorithm") or [config.get("algorithm")])[-1]
    unused = {*spec.algorithms()} - {chosen}
    aliases = spec.field_aliases()
    idle = [name for name, other in aliases.items() if other.partition(".")[0] in unused]
    check_flags(argv, [name for name in field_names(config) if name not in idle], unused=unused)
    given = dict(arg.removeprefix("--config.").split("=", 1) for arg in argv if "=" in arg)
    for name, other in aliases.items():
        value, other_value = given.get(name), given.get(other)
        if None not in (value, other_value) and value != other_value:  # absl uses the last one
            raise UserError(
                f"differs from {other}={other_value}, of which it is an alias",
                field=name,
                value=_parse_literal(value),
                hint="pass only one",
            )
    return config


def _check_fields(argv: list[str], config: ConfigDict, spec: TrainerSpec) -> None:
    """Reject unknown names, and values of Flow-GRPO for known ones, all at once.

    If every error has a translation, the corrected command is part of the message.
    """
    start = "--config."
    words = {arg: arg.removeprefix(start).split("=", 1) for arg in argv if arg.startswith(start)}
    given = {word[0]: _parse_literal(word[1]) for word in words.values() if len(word) == 2}
    custom = {name: _get_dict(config, name) for name in ("custom_rewards", "reward_servers")}
    known = field_names(config)
    translations = migration.translate_fields({**custom, **given}, known, given)
    errors, corrected = [], []
    for arg in argv[1:]:
        name, *value = words.get(arg, [""])
        translation = translations.get(name)
        corrected += (
            [arg] if translation is None else [f"{start}{n}={v}" for n, v in translation.items()]
        )
        try:
            if name:
                check_field_name(name, config, spec, *value, given=given)
            if translation is not None:  # the name exists here, but not this value
                raise UserError(migration.OLD_NAME_MESSAGE.format(name, *value))
        except UserError as error:
            errors.append(str(error))
    can_be_corrected = len(errors) == len(translations)
    if can_be_corrected and (len(errors) > 1 or translations.keys() & {*known}):
        errors.append(f"run {' '.join([invoked_command(), *map(quote_for_shell, corrected)])}")
    if errors:
        raise UserError("; ".join(errors))


def check_flags(argv: list[str], known: Collection[str], *, unused: Collection[str] = ()) -> None:
    """Reject unknown options; for `--beta`, suggest `--config.train.beta`.

    Args:
        argv: The command line.
        known: Full names of all settings.
        unused: Sections without effect, which are not suggested.
    """
    last = {field: field.rpartition(".")[2] for field in known}
    own = [flag.name for flag in script_flags(argv[0])]
    for index, arg in enumerate(argv[1:], 1):
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name.startswith("config.") or _is_flag(name):
            continue
        names = [*last.values(), *own]
        following = argv[index + 1 : index + 2]
        text = value if equals or not following or following[0].startswith("--") else following[0]
        if name not in names and (foreign := migration.foreign_hint(name, known, text)):
            raise UserError(f"unknown option --{name}", hint=foreign)
        near = name if name in names else nearest(name, names, cutoff=0.6)
        fields = [f for f in last if last[f] == near and f.partition(".")[0] not in unused]
        if near == name and not fields and name in last.values():
            raise UserError(
                f"unknown option --{name}; the selected algorithm has no setting {name}"
            )
        meant = [near] if near in own else [f"config.{field}" for field in fields[:3]]
        hint = " or ".join(f"--{each}{equals}{value}" for each in meant)
        raise UserError(
            f"unknown option --{name}",
            hint=f"did you mean {hint}?" if hint else "--help lists all options",
        )


def _is_flag(name: str) -> bool:
    return name in ("", "config", *flags.FLAGS) or name.removeprefix("no") in flags.FLAGS


def script_flags(script: str) -> list[flags.Flag]:
    """Return the flags that a script defines, and those that every script has."""
    modules = flags.FLAGS.flags_by_module_dict()
    return [*modules.get(script, []), *modules.get(COMMON_FLAGS_MODULE, [])]


def option_values(argv: list[str], option: str) -> list[str]:
    """Return the values of an option, given as --option=value or --option value."""
    start = f"--{option}="
    values = [a.removeprefix(start) for a in argv if a.startswith(start)]
    return values + [b for a, b in pairwise(argv) if a == f"--{option}"]


def planned_world_size() -> int | None:
    """Return the number of processes of `--world_size` (with `--dry_run`) or of the launcher.

    None if neither is given. Without `--dry_run`, a `--world_size` on the command line may belong
    to a script that calls the Python API.
    """
    dry_run = any(arg.partition("=")[0] == "--dry_run" for arg in sys.argv)
    given = next(reversed(option_values(sys.argv, "world_size")), "") if dry_run else ""
    if given.isdecimal():  # absl rejects other values
        return int(given)
    number = os.environ.get("WORLD_SIZE")
    if number is not None and not (number.isdecimal() and int(number)):
        raise UserError(
            "must be the number of processes",
            field="environment variable WORLD_SIZE",
            value=number,
            hint="unset it, or start the run with torchrun or accelerate launch",
        )
    return None if number is None else int(number)


def check_field_name(
    name: str,
    config: ConfigDict,
    spec: TrainerSpec,
    value: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> None:
    """Reject an override of an unknown setting.

    Args:
        name: Full name of the setting.
        config: The config to be changed.
        spec: The trainer that the config is for.
        value: The new value, for messages.
        given: All overrides.
    """
    known = field_names(config)
    if name in known:
        return
    field, _, key = name.partition(".")
    if field in FREE_FORM_FIELDS:  # absl cannot add a name to a dict
        raise UserError(full_dict_message(field, key, config, spec, value))
    hint = suggest_field(name, known, given or {}, cutoff=0.5) or "--help=all lists all settings"
    raise UserError(f"unknown config key {name!r}", hint=hint)


def _check_preset_world_size(preset: str) -> None:
    """Reject a preset for several GPUs in one process, which would train a part of the epoch."""
    number = re.search(r"_(\d{1,6})gpu$", preset)
    if number and int(number[1]) > 1 and planned_world_size() is None:
        raise UserError(
            f"preset {preset!r} is for {number[1]} GPUs, but one process was started; start it "
            f"with torchrun or accelerate launch, or omit the suffix _{number[1]}gpu"
        )


def load_config(path: str, argv: list[str], spec: TrainerSpec) -> ConfigDict:
    """Load a config file, with the settings of custom classes that it or `argv` names."""
    given = {name: option_values(argv, f"config.{name}") for name in spec.custom}
    spec.load_custom_classes(
        {name: _parse_literal(values[-1]) for name, values in given.items() if values}
    )
    config = _load_config_file(path)
    return _load_config_file(path) if spec.load_custom_classes(config) else config


def _load_config_file(path: str) -> ConfigDict:
    """Call `get_config` of a file; any exception is reported as an error in that file."""
    absl = logging.getLogger("absl")
    try:
        absl.disabled = True  # it also logs the error that is raised below
        config = ConfigFileFlagParser("config").parse(path)
        if config is not None:
            config.items  # noqa: B018  raises if the file could not be opened
    except UserError:
        raise
    except Exception as error:
        message = f"cannot load --config {path}{_describe_load_error(error, path)}"
        hints = []
        file = path.partition(":")[0]
        if not os.path.exists(file):
            hints.append(did_you_mean_file(file, "*.py"))
        if "'base.py'" in message or "'imp'" in message:
            hints.append("for a config of Flow-GRPO, see docs/migrating.md")
        raise UserError(message, hint=join_hints(*hints)) from error
    finally:
        absl.disabled = False
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config() of --config {path} must return a ConfigDict, not {type(config).__name__}"
        )
    check_string_keys(config)
    return config


def _describe_load_error(error: Exception, path: str) -> str:
    """Return the error message, preceded by the line of the config file that raised it if known."""
    first = error
    if str(error).startswith("Error whilst parsing"):  # with a traceback in the message
        first = error.__context__
    elif isinstance(error, OSError):  # raised at the first use of a missing config
        first = error.__cause__ or error
    file = Path(path.partition(":")[0]).resolve()
    frames = traceback.extract_tb(first.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    message = (str(first).strip().splitlines() or [""])[-1].strip()
    kind = type(first).__name__
    return f" (line {lines[-1]}): {kind}: {message}" if lines else f": {kind}: {message}"


def field_names(config: ConfigDict) -> list[str]:
    """Return the full names of all settings and sections."""
    return [name for name, _ in iter_config_fields(config, closed=())]


def full_dict_message(
    field: str, key: str, config: ConfigDict, spec: TrainerSpec, value: str | None
) -> str:
    """Return the error for `--config.field.key=value` on a dict, with the option that works.

    It sets the whole dict, with the new value; misspelt rewards and options in `key` are corrected.
    """
    names = key.split(".")
    # custom rewards and rewards on servers may have any name
    anything = field in ("custom_rewards", "reward_servers", *spec.custom)
    meant = names if anything else _nearest_reward_names(names, config, spec)
    whole = _drop_empty(_get_dict(config, field))
    place = whole
    for name in meant[:-1]:
        place[name] = place[name] if isinstance(place.get(name), dict) else {}
        place = place[name]
    place[meant[-1]] = "..." if value is None else _parse_literal(value)
    text = repr(whole).replace("'...'", "...")
    option = f'--config.{field}="{text}"'
    if meant != names:
        return f"unknown config key {f'{field}.{key}'!r}; did you mean {option}?"
    return f"{f'{field}.{key}'!r} is not in the config; set the whole dict: {option}"


def _nearest_reward_names(names: list[str], config: ConfigDict, spec: TrainerSpec) -> list[str]:
    """Replace an unknown reward, and an unknown option of it, by the nearest known name."""
    paths = {**spec.rewards, **_get_dict(config, "custom_rewards")}
    served = _drop_empty(_get_dict(config, "reward_servers"))
    known = {*paths, *served}
    reward = names[0] if names[0] in known else nearest(names[0], known) or names[0]
    if len(names) == 1 or reward not in paths or reward in served:
        return [reward, *names[1:]]
    known = spec.option_names(reward, paths[reward])
    if known is None or names[1] in known:
        return [reward, *names[1:]]
    if not (option := nearest(names[1], known)):
        raise UserError(
            f"unknown reward_options.{reward}.{names[1]}; known options: {', '.join(known)}"
        )
    return [reward, option, *names[2:]]


def _get_dict(config: ConfigDict, field: str) -> dict[str, Any]:
    """Return a dict of the config; empty if it is missing, which is reported later."""
    return config.get(field, ConfigDict()).to_dict()


def _drop_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Drop reward servers that are not set."""
    return {name: value for name, value in values.items() if value != ""}


def _parse_literal(value: str) -> Any:
    """Return the value of a Python literal, or the text itself if it is none."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def explain_flag_error(error: Exception, config: ConfigDict, argv: list[str]) -> str:
    """Return the message for an error that absl raised while parsing a flag."""
    message = first_line(error)
    if field := re.match(r"flag --config\.([\w.]+)=", message):
        section, _, key = field[1].rpartition(".")
        kind = (config[section] if section else config).get_type(key)
        start = f"--config.{field[1]}="
        given = next((arg for arg in argv if arg.startswith(start)), start)
        words = VALUE_EXAMPLES.get(kind) or FIELD_TYPES.get(kind, ("", "of a different type"))[1]
        return f"{given} must be {words}"
    if missing := re.match(r"flag --(\w+)=None: Flag --\w+ must have a value", message):
        return f"--{missing[1]} is missing: {flags.FLAGS[missing[1]].help}"
    return f"{message}; --help lists all options"
