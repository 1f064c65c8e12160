"""Start a script with an ml-collections config; tell mistakes in one line."""

import ast
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from flow_grpo.access import check_access
from flow_grpo.config import old_names
from flow_grpo.config.mistakes import (
    SIGNALS,
    as_typed,
    is_first_process,
    quoted,
    say,
    told_plainly,
    typed,
)
from flow_grpo.config.places import ROOT, check_made, find, find_config
from flow_grpo.config.saved import PLACES, find_run
from flow_grpo.config.trade import OPEN_FIELDS, TYPES, Trade, all_fields, entry, suggestion
from flow_grpo.errors import (
    UserError,
    check_model_folder,
    first_line,
    nearest,
    with_nearest_file,
)
from flow_grpo.files import refuse_halves

NO_CONFIG = "--config is missing; name one, e.g. --config "
# what to write on the command line, where it is not what a type is called elsewhere
WRITTEN = {tuple: "a tuple like (0, 5)", ConfigDict: "a dict like {'ocr': 1.0}"}
MORE = """\
--help=all      every setting, with its value in the config that --config names
--help=train    those of a section
--help=presets  the names of presets
docs/configuration.md says more."""
DRY_RUN = (
    "Build all that the run would, measure a few batches, tell how much memory and time the run "
    "will take, and stop; nothing is written."
)
RESUME = "logs/RUN, to go on with that run and its own config; --config.FIELD=VALUE changes it."
OF_RUN = ROOT / "config/run.py"


def run(
    main: Callable[[ConfigDict], Any],
    trade: Trade,
    *,
    default: str | None = None,
    dry_run: Callable[[ConfigDict], Any] | None = None,
) -> None:
    """Parse --config, --config.key=value ... and --debug, then call `main` with the config.

    `default` is the config to take where none is named, `dry_run` what to call in place of `main`
    with --dry_run. What is returned is never freed: gloo was seen to wait for ever when the last
    reference to a process group went.
    """
    if not flags.FLAGS.is_parsed():
        look(trade, dry_run=dry_run is not None, default=default)

    def start(_: list[str]) -> None:
        set_up_logging()
        call = dry_run if dry_run and flags.FLAGS.dry_run else main
        call_and_exit(lambda: call(flags.FLAGS.config), debug=flags.FLAGS.debug)

    app.run(start, flags_parser=lambda argv: argv[:1])


def look(trade: Trade, *, dry_run: bool = False, default: str | None = None) -> None:
    """Parse the command line: show help, and tell every mistake that can be told without torch.
    The training scripts call it before the imports that take seconds."""
    config_flags.DEFINE_config_file(
        "config", help_string="path/to/config.py or path/to/config.py:preset"
    )
    flags.DEFINE_bool("debug", False, "Show the traceback of a mistake.")
    if dry_run:
        flags.DEFINE_bool("dry_run", False, DRY_RUN)
        flags.DEFINE_string("resume", None, RESUME)
        default = next((f"{OF_RUN}:{run}" for run in _values(sys.argv, "resume")), default)
    argv = sys.argv
    if default and not any(re.match(r"--config(=|$)", arg) for arg in argv):
        argv = [argv[0], f"--config={default}", *argv[1:]]
    argv = _with_our_configs(argv)
    options = {"asks": default is None, "trains": dry_run}
    told_plainly(lambda: _look(argv, trade, **options), debug="--debug" in argv)


def _look(argv: list[str], trade: Trade, *, asks: bool, trains: bool) -> None:
    """The hub is asked for the model, unless the script may put another in its place; a script that
    `trains` needs a folder and prompts."""
    if {"--help", "-h", "--helpshort"} & {*argv}:
        _show(_short_help(argv, trade))
    if part := next((arg for arg in argv if re.match("--help(=|full)", arg)), None):
        _show(_usage(argv, trade, part.partition("=")[2]))
    _parse(argv, trade)
    settings = trade.check(flags.FLAGS.config)
    trade.check_rewards(settings)
    check_made(settings.dataset)
    model = find(settings.pretrained.model)
    if asks:
        check_model_folder(model, trade.marker)
        options = {"revision": settings.pretrained.revision, "known": trade.models()}
        check_access("pretrained.model", model, file=trade.marker, **options)
    goes_on = settings.resume == "auto" and Path(settings.logdir, settings.run_name).exists()
    if trains and not goes_on:  # else what is not as it was is told first
        resolve_name(trade.check_early)(settings)


def _show(text: str) -> NoReturn:
    say(text)
    sys.exit()


def call_and_exit(call: Callable[[], Any], *, debug: bool) -> NoReturn:
    """Python aborts when it ends while a reward still computes in a thread of its own."""
    for number in SIGNALS:  # SIGTERM like Ctrl-C: what is held is given up on the way out
        signal.signal(number, signal.default_int_handler)
    code = 0
    try:
        _kept = told_plainly(call, debug=debug)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_up_logging() -> None:
    """Our lines to stdout, bare, from the first process; warnings from all. Once: a notebook may
    train twice."""
    import diffusers
    import transformers

    for library in (transformers.utils.logging, diffusers.utils.logging):
        library.disable_progress_bar()  # one per file loaded
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # our client tells of its retries itself
    for library in ("accelerate", "httpx", "httpx2"):  # these tell of each request to the hub
        logging.getLogger(library).setLevel(logging.WARNING)
    # diffusers', of the hub's client, where there is no network
    warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours = logging.getLogger("flow_grpo")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(logging.INFO if is_first_process() else logging.WARNING)


def _parse(argv: list[str], trade: Trade) -> None:
    refuse_halves(" ".join(argv), "the command line")
    _check_resumed(argv)
    config = check_names(argv, trade)
    if config is None:
        _check_flags(argv, _names(trade.get_config()))
        raise UserError(NO_CONFIG + trade.example)
    try:
        rest = flags.FLAGS(argv)
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(plainly(error, config, argv)) from error
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}; options start with --config.")


def _check_resumed(argv: list[str]) -> None:
    """--resume says all that these say."""
    for run in _values(argv, "resume"):
        if (config := _values(argv, "config")[-1]) != f"{OF_RUN}:{run}":
            raise UserError(f"--resume {run} has a config of its own; leave --config {config} out")
        for name in PLACES:
            if _values(argv, f"config.{name}"):
                raise UserError(
                    f"--resume {run} goes on with that run; leave --config.{name} out, or start a "
                    f"new run from its state: --config ... --config.resume={run}"
                )


def config_of_first(argv: list[str], option: str) -> str | None:
    """--config for the first run, or part of one, that an option names, with commas or repeated."""
    words = [word for value in _values(argv, option) for word in (value, *value.split(","))]
    run = next(filter(None, map(find_run, map(Path, words))), None)
    return run and f"{OF_RUN}:{run}"


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


def _short_help(argv: list[str], trade: Trade) -> str:
    why = trade.reasons()
    first = [entry(f"--config.{name}=...", why[name]) for name in trade.first]
    return "\n".join([*_about(argv), "", "settings that are often changed:", *first, "", MORE])


def _usage(argv: list[str], trade: Trade, part: str) -> str:
    if part == "presets":
        return "\n".join(trade.presets.PRESETS)
    paths = _values(argv, "config")
    config = _load(paths[-1], argv, trade) if paths else trade.get_config()
    fields = trade.describe(config, "" if part in ("", "all") else part)
    return "\n".join([*_about(argv), "", "fields, as this config has them:", fields])


def _about(argv: list[str]) -> list[str]:
    """What the script does, and its options."""
    own = flags.FLAGS.flags_by_module_dict()
    ours = [*own.get(argv[0], []), *own.get(__name__, [])]
    options = [entry(f"--{flag.name}", flag.help) for flag in ours]
    about = (sys.modules["__main__"].__doc__ or "").strip()
    return [as_typed(about), "", "options:", *options]


def _with_our_configs(argv: list[str]) -> list[str]:
    """config/grpo.py is that of the library, where the current folder has none."""
    found, before = [], ""
    for arg in argv:
        if before == "--config":
            found.append(find_config(arg))
        elif arg.startswith("--config="):
            found.append("--config=" + find_config(arg.removeprefix("--config=")))
        else:
            found.append(arg)
        before = arg
    return found


def check_names(argv: list[str], trade: Trade) -> ConfigDict | None:
    """Load the config alone and hold the overrides against it: absl would only name a key."""
    paths = _values(argv, "config")
    if not paths:
        return None
    sys.path.append(str(Path(paths[-1].partition(":")[0]).resolve().parent))  # modules beside it
    _check_processes(paths[-1].partition(":")[2])
    config = _load(paths[-1], argv, trade)
    _check_fields(argv, config, trade)
    _check_flags(argv, _names(config), idle={*trade.algorithms()} - {config.get("algorithm")})
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
    old, wrong, line = old_names.among({**own, **given}, _names(config), given), [], []
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
    if wrong and len(wrong) == len(old) and (wrong[1:] or old.keys() & {*_names(config)}):
        wrong.append(f"type {' '.join([typed(), *map(quoted, line)])}")
    if wrong:
        raise UserError("; ".join(wrong))


def _check_flags(argv: list[str], known: Collection[str], *, idle: Collection[str] = ()) -> None:
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
        fields = [f for f in fields if f.partition(".")[0] not in idle] or fields
        meant = [near] if near in own else [f"config.{field}" for field in fields[:3]]
        hint = " or ".join(f"--{each}{equals}{value}" for each in meant)
        way_out = f"did you mean {hint}?" if hint else "--help lists all"
        raise UserError(f"unknown option --{name}; {way_out}")


def _is_flag(name: str) -> bool:
    return name in ("", "config", *flags.FLAGS) or name.removeprefix("no") in flags.FLAGS


def _own_flags(script: str) -> list[str]:
    """The options of this script, and those of all."""
    modules = flags.FLAGS.flags_by_module_dict()
    return [flag.name for module in (script, __name__) for flag in modules.get(module, [])]


def _values(argv: list[str], option: str) -> list[str]:
    start = f"--{option}="
    values = [a.removeprefix(start) for a in argv if a.startswith(start)]
    return values + [b for a, b in pairwise(argv) if a == f"--{option}"]


def check_name(
    name: str,
    config: ConfigDict,
    trade: Trade,
    value: str | None = None,
    given: Mapping[str, Any] = old_names.NONE,
) -> None:
    """Refuse a field that is to be changed, to this value, if there is none of that name; `given`
    are all that are to be changed."""
    known = _names(config)
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
    if number and int(number[1]) > 1 and "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"preset {preset!r} is for {number[1]} GPUs, and one process was started; start it "
            f"with torchrun or accelerate launch, or leave _{number[1]}gpu out"
        )


def _load(path: str, argv: list[str], trade: Trade) -> ConfigDict:
    """The config of a file, with the fields of classes that it or the command line names."""
    given = {name: _values(argv, f"config.{name}") for name in trade.custom}
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


def _names(config: ConfigDict) -> list[str]:
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
