"""What a command line says of the config; each mistake is told with the way out."""

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

from flow_grpo.config import old_names
from flow_grpo.config.mistakes import quoted, typed
from flow_grpo.config.trade import OPEN_FIELDS, TYPES, Trade, all_fields, check_keys, suggestion
from flow_grpo.errors import UserError, first_line, nearest, with_nearest_file

# what to write on the command line, where it is not what a type is called elsewhere
WRITTEN = {tuple: "a tuple like (0, 5)", ConfigDict: "a dict like {'ocr': 1.0}"}
ALL_SCRIPTS = "flow_grpo.config.command_line"  # the module whose flags every script has


def check_names(argv: list[str], trade: Trade) -> ConfigDict | None:
    """Load the config alone and hold the overrides against it: absl would only name a key."""
    paths = values_of(argv, "config")
    if not paths:
        return None
    sys.path.append(str(Path(paths[-1].partition(":")[0]).resolve().parent))  # modules beside it
    _check_processes(paths[-1].partition(":")[2])
    config = load(paths[-1], argv, trade)
    _check_fields(argv, config, trade)
    chosen = (values_of(argv, "config.algorithm") or [config.get("algorithm")])[-1]
    idle = {*trade.algorithms()} - {chosen}
    aliases = [a for a, other in trade.second_names().items() if other.partition(".")[0] in idle]
    check_flags(argv, [n for n in names_in(config) if n not in aliases], idle=idle)
    # the last of them would be taken without a word
    given = dict(arg.removeprefix("--config.").split("=", 1) for arg in argv if "=" in arg)
    for name, other in trade.second_names().items():
        theirs, ours = given.get(name), given.get(other)
        if None not in (ours, theirs) and ours != theirs:
            raise UserError(
                f"{name}={theirs} and {other}={ours} are two names of one field; give one"
            )
    return config


def _check_fields(argv: list[str], config: ConfigDict, trade: Trade) -> None:
    """Tell all names that are wrong at once; of Flow-GRPO's, also the whole line to type."""
    start = "--config."
    words = {arg: arg.removeprefix(start).split("=", 1) for arg in argv if arg.startswith(start)}
    given = {word[0]: _read(word[1]) for word in words.values() if len(word) == 2}
    own = {name: _as_dict(config, name) for name in ("custom_rewards", "reward_servers")}
    old, wrong, line = old_names.among({**own, **given}, names_in(config), given), [], []
    for arg in argv[1:]:
        name, *value = words.get(arg, [""])
        try:
            if name:
                check_name(name, config, trade, *value, given=given)
                if name in old:
                    raise UserError(old_names.TOLD.format(name, *value))
        except UserError as error:
            wrong.append(str(error))
        line += [f"{start}{n}={v}" for n, v in old[name].items()] if name in old else [arg]
    if wrong and len(wrong) == len(old) and (wrong[1:] or old.keys() & {*names_in(config)}):
        wrong.append(f"type {' '.join([typed(), *map(quoted, line)])}")
    if wrong:
        raise UserError("; ".join(wrong))


def check_flags(argv: list[str], known: Collection[str], *, idle: Collection[str] = ()) -> None:
    """A field by its last name alone is told its full one. `idle` are sections without effect."""
    last = {field: field.rpartition(".")[2] for field in known}
    own = _own_flags(argv[0])
    for arg in argv[1:]:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name.startswith("config.") or _is_flag(name):
            continue
        names = [*last.values(), *own]
        near = name if name in names else nearest(name, names, cutoff=0.6)
        fields = [field for field in last if last[field] == near]
        fields = [f for f in fields if f.partition(".")[0] not in idle]
        if near == name and not fields and name in last.values():
            raise UserError(
                f"unknown option --{name}; the algorithm of this run has no setting {name}"
            )
        meant = [near] if near in own else [f"config.{field}" for field in fields[:3]]
        hint = " or ".join(f"--{each}{equals}{value}" for each in meant)
        way_out = f"did you mean {hint}?" if hint else "--help lists all"
        raise UserError(f"unknown option --{name}; {way_out}")


def _is_flag(name: str) -> bool:
    return name in ("", "config", *flags.FLAGS) or name.removeprefix("no") in flags.FLAGS


def _own_flags(script: str) -> list[str]:
    """The options of this script, and those of all."""
    modules = flags.FLAGS.flags_by_module_dict()
    return [flag.name for module in (script, ALL_SCRIPTS) for flag in modules.get(module, [])]


def values_of(argv: list[str], option: str) -> list[str]:
    start = f"--{option}="
    values = [a.removeprefix(start) for a in argv if a.startswith(start)]
    return values + [b for a, b in pairwise(argv) if a == f"--{option}"]


def planned_processes() -> int | None:
    """Return the number of processes to plan for: `--world_size` of a dry run, else what the
    launcher set; None if neither is given.

    Without `--dry_run`, a `--world_size` on the command line may belong to a script that calls the
    Python API.
    """
    dry_run = any(arg.partition("=")[0] == "--dry_run" for arg in sys.argv)
    given = next(reversed(values_of(sys.argv, "world_size")), "") if dry_run else ""
    if given.isdecimal():  # absl rejects other values
        return int(given)
    number = os.environ.get("WORLD_SIZE")
    if number is not None and not (number.isdecimal() and int(number)):
        raise UserError(
            f"the environment variable WORLD_SIZE={number!r} must be the number of processes; "
            "unset it, or start the run with torchrun or accelerate launch"
        )
    return None if number is None else int(number)


def check_name(
    name: str,
    config: ConfigDict,
    trade: Trade,
    value: str | None = None,
    given: Mapping[str, Any] = old_names.NONE,
) -> None:
    """Refuse a field that is to be changed, to this value, if there is none of that name; `given`
    are all that are to be changed."""
    known = names_in(config)
    if name in known:
        return
    field, _, key = name.partition(".")
    if field in OPEN_FIELDS:  # absl cannot add a name to a dict
        raise UserError(whole_dict(field, key, config, trade, value))
    hint = suggestion(name, known, given, cutoff=0.5) or "--help lists them all"
    raise UserError(f"unknown config key {name!r}; {hint}")


def _check_processes(preset: str) -> None:
    """One process would make up a small part of the epoch, without a word."""
    number = re.search(r"_(\d{1,6})gpu$", preset)
    if number and int(number[1]) > 1 and planned_processes() is None:
        raise UserError(
            f"preset {preset!r} is for {number[1]} GPUs, and one process was started; start it "
            f"with torchrun or accelerate launch, or leave _{number[1]}gpu out"
        )


def load(path: str, argv: list[str], trade: Trade) -> ConfigDict:
    """The config of a file, with the fields of classes that it or the command line names."""
    given = {name: values_of(argv, f"config.{name}") for name in trade.custom}
    trade.load_custom({name: _read(values[-1]) for name, values in given.items() if values})
    config = _load_file(path)
    return _load_file(path) if trade.load_custom(config) else config


def _load_file(path: str) -> ConfigDict:
    """What `get_config` of this file returns; whatever it raises is a mistake in that file."""
    absl = logging.getLogger("absl")
    try:
        absl.disabled = True  # it warns of what is told below
        config = ConfigFileFlagParser("config").parse(path)
        if config is not None:
            config.items  # noqa: B018  raises where the file could not be opened
    except UserError:
        raise
    except Exception as error:
        message, file = f"cannot load --config {path}{_reason(error, path)}", path.partition(":")[0]
        message = message if os.path.exists(file) else with_nearest_file(message, file, "*.py")
        if "'base.py'" in message or "'imp'" in message:
            message += "; a config of Flow-GRPO's? docs/migrating.md tells what to change"
        raise UserError(message) from error
    finally:
        absl.disabled = False
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config() of --config {path} must return a ConfigDict, not {type(config).__name__}"
        )
    check_keys(config)
    return config


def _reason(error: Exception, path: str) -> str:
    """The line of the config file, where it is known, and what is wrong there."""
    first = error
    if str(error).startswith("Error whilst parsing"):  # the parser's own, with a traceback in it
        first = error.__context__
    elif isinstance(error, OSError):  # raised at the first use of a config that was not found
        first = error.__cause__ or error
    file = Path(path.partition(":")[0]).resolve()
    frames = traceback.extract_tb(first.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    message = (str(first).strip().splitlines() or [""])[-1].strip()
    kind = type(first).__name__
    return f" (line {lines[-1]}): {kind}: {message}" if lines else f": {kind}: {message}"


def names_in(config: ConfigDict) -> list[str]:
    return [name for name, _ in all_fields(config, closed=())]


def whole_dict(field: str, key: str, config: ConfigDict, trade: Trade, value: str | None) -> str:
    """The mistake, and the option that works: `field` as it is, with this value under `key`, which
    for rewards' names and options is the nearest that there is."""
    names = key.split(".")
    # what is behind a server or in custom_rewards may have any name
    anything = field in ("custom_rewards", "reward_servers", *trade.custom)
    meant = names if anything else _meant(names, config, trade)
    whole = _without_empty(_as_dict(config, field))
    place = whole
    for name in meant[:-1]:
        place[name] = place[name] if isinstance(place.get(name), dict) else {}
        place = place[name]
    place[meant[-1]] = "..." if value is None else _read(value)
    text = repr(whole).replace("'...'", "...")
    option = f'--config.{field}="{text}"'
    if meant != names:
        return f"unknown config key {f'{field}.{key}'!r}; did you mean {option}?"
    return f"{f'{field}.{key}'!r} is not in the config; give the whole dict: {option}"


def _meant(names: list[str], config: ConfigDict, trade: Trade) -> list[str]:
    paths = {**trade.rewards, **_as_dict(config, "custom_rewards")}
    served = _without_empty(_as_dict(config, "reward_servers"))
    known = {*paths, *served}
    reward = names[0] if names[0] in known else nearest(names[0], known) or names[0]
    if len(names) == 1 or reward not in paths or reward in served:
        return [reward, *names[1:]]
    known = trade.option_names(reward, paths[reward])
    if known is None or names[1] in known:
        return [reward, *names[1:]]
    if not (option := nearest(names[1], known)):
        raise UserError(f"unknown reward_options.{reward}.{names[1]}; it takes {', '.join(known)}")
    return [reward, option, *names[2:]]


def _as_dict(config: ConfigDict, field: str) -> dict[str, Any]:
    """Empty where a config file has none: that is told when all is checked."""
    return config.get(field, ConfigDict()).to_dict()


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Servers that are not set need not be repeated."""
    return {name: value for name, value in values.items() if value != ""}


def _read(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def plainly(error: Exception, config: ConfigDict, argv: list[str]) -> str:
    """What absl says of a flag, with the rule and a way out."""
    mistake = first_line(error)
    if field := re.match(r"flag --config\.([\w.]+)=", mistake):
        section, _, key = field[1].rpartition(".")
        kind = (config[section] if section else config).get_type(key)
        start = f"--config.{field[1]}="
        given = next((arg for arg in argv if arg.startswith(start)), start)
        words = WRITTEN.get(kind) or TYPES[kind][1] if kind in TYPES else "of another type"
        return f"{given} must be {words}"
    if missing := re.match(r"flag --(\w+)=None: Flag --\w+ must have a value", mistake):
        return f"--{missing[1]} is missing: {flags.FLAGS[missing[1]].help}"
    return f"{mistake}; --help lists all options"
