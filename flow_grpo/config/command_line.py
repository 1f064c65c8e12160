"""Start a script with an ml-collections config; tell mistakes in one line."""

import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from flow_grpo.access import check_access
from flow_grpo.config.mistakes import SIGNALS, as_typed, is_first_process, say, told_plainly
from flow_grpo.config.overrides import check_flags, check_names, load, names_in, plainly, values_of
from flow_grpo.config.places import ROOT, check_made, find, find_config
from flow_grpo.config.saved import PLACES, find_run
from flow_grpo.config.trade import OtherTrade, Trade, entry
from flow_grpo.errors import UserError, check_model_folder
from flow_grpo.files import refuse_halves

NO_CONFIG = "--config is missing; name one, e.g. --config "
MORE = """\
--help=all      every setting, with its value in the config that --config names
--help=train    those of a section
--help=presets  the names of presets
docs/configuration.md says more."""
DRY_RUN = (
    "Build all that the run would, measure a few batches, tell how much memory and time the run "
    "will take, and stop; nothing is written."
)
WORLD_SIZE = (
    "With --dry_run: plan for this many processes, even if fewer are running; these measure "
    "batches of the planned size."
)
RESUME = "logs/RUN, to go on with that run and its own config; --config.FIELD=VALUE changes it."
OF_RUN = ROOT / "config/run.py"


def run(
    main: Callable[[ConfigDict], Any],
    trade: Trade,
    *,
    common: Sequence[str] = (),
    other_trade: str = "",
    default: str | None = None,
    dry_run: Callable[[ConfigDict, int | None], Any] | None = None,
) -> None:
    """Parse --config, --config.key=value ... and --debug, then call `main` with the config.

    `common` are the settings that --help lists; the default is those of training. `other_trade` is
    the error message for a config of the other training script; the default names that script.
    `default` is the config to take where none is named, `dry_run` what to call in place of `main`
    with --dry_run, with the config and --world_size. What is returned is never freed: gloo was seen
    to wait for ever when the last reference to a process group went.
    """
    if not flags.FLAGS.is_parsed():
        trains = dry_run is not None
        look(trade, dry_run=trains, default=default, common=common, other_trade=other_trade)

    def start(_: list[str]) -> None:
        set_up_logging()
        config = flags.FLAGS.config
        call = partial(main, config)
        if dry_run and flags.FLAGS.dry_run:
            call = partial(dry_run, config, flags.FLAGS.world_size)
        call_and_exit(call, debug=flags.FLAGS.debug)

    app.run(start, flags_parser=lambda argv: argv[:1])


def look(
    trade: Trade,
    *,
    dry_run: bool = False,
    default: str | None = None,
    common: Sequence[str] = (),
    other_trade: str = "",
) -> None:
    """Parse the command line: show help, and tell every mistake that can be told without torch.
    The training scripts call it before the imports that take seconds."""
    config_flags.DEFINE_config_file(
        "config", help_string="path/to/config.py or path/to/config.py:preset"
    )
    flags.DEFINE_bool("debug", False, "Show the traceback of a mistake.")
    if dry_run:
        flags.DEFINE_bool("dry_run", False, DRY_RUN)
        flags.DEFINE_integer("world_size", None, WORLD_SIZE, lower_bound=1)
        flags.DEFINE_string("resume", None, RESUME)
        default = next((f"{OF_RUN}:{run}" for run in values_of(sys.argv, "resume")), default)
    argv = sys.argv
    if default and not any(re.match(r"--config(=|$)", arg) for arg in argv):
        argv = [argv[0], f"--config={default}", *argv[1:]]
    argv = _with_our_configs(argv, trade.preset_file)
    options = {"asks": default is None, "trains": dry_run, "common": common or trade.first}

    def check() -> None:
        try:
            _look(argv, trade, **options)
        except OtherTrade as error:
            raise UserError(other_trade or str(error)) from error

    told_plainly(check, debug="--debug" in argv)


def _look(
    argv: list[str], trade: Trade, *, asks: bool, trains: bool, common: Sequence[str]
) -> None:
    """The hub is asked for the model, unless the script may put another in its place; a script that
    `trains` needs a folder and prompts."""
    if {"--help", "-h", "--helpshort"} & {*argv}:
        _show(_short_help(argv, trade, common))
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
    world_size = flags.FLAGS.world_size if trains else None
    if world_size and not flags.FLAGS.dry_run:
        raise UserError(
            f"--world_size={world_size} needs --dry_run; without it, the launcher sets the number "
            "of processes"
        )
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
        check_flags(argv, names_in(trade.get_config()))
        if checkpoints := [name for name in values_of(argv, "checkpoint") if name != "base"]:
            raise UserError(
                f"--checkpoint {checkpoints[0]} is not a run or part of one, whose config would be "
                f"used; name a run, or a config as well, e.g. --config {trade.example}"
            )
        raise UserError(NO_CONFIG + trade.example)
    try:
        rest = flags.FLAGS(argv)
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(plainly(error, config, argv)) from error
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}; options start with --config.")


def _check_resumed(argv: list[str]) -> None:
    """--resume says all that these say."""
    if "resume" not in flags.FLAGS:  # reported as unknown
        return
    for run in values_of(argv, "resume"):
        if (config := values_of(argv, "config")[-1]) != f"{OF_RUN}:{run}":
            raise UserError(f"--resume {run} has a config of its own; leave --config {config} out")
        for name in PLACES:
            if values_of(argv, f"config.{name}"):
                raise UserError(
                    f"--resume {run} goes on with that run; leave --config.{name} out, or start a "
                    f"new run from its state: --config ... --config.resume={run}"
                )


def config_of_first(argv: list[str], option: str) -> str | None:
    """--config for the first run, or part of one, that an option names, with commas or repeated."""
    words = [word for value in values_of(argv, option) for word in (value, *value.split(","))]
    run = next(filter(None, map(find_run, map(Path, words))), None)
    return run and f"{OF_RUN}:{run}"


def _short_help(argv: list[str], trade: Trade, common: Sequence[str]) -> str:
    why = trade.reasons()
    first = [entry(f"--config.{name}=...", why[name]) for name in common]
    return "\n".join([*_about(argv), "", "settings that are often changed:", *first, "", MORE])


def _usage(argv: list[str], trade: Trade, part: str) -> str:
    if part == "presets":
        return "\n".join(trade.presets.PRESETS)
    paths = values_of(argv, "config")
    config = load(paths[-1], argv, trade) if paths else trade.get_config()
    fields = trade.describe(config, "" if part in ("", "all") else part)
    return "\n".join([*_about(argv), "", "fields, as this config has them:", fields])


def _about(argv: list[str]) -> list[str]:
    """What the script does, and its options."""
    own = flags.FLAGS.flags_by_module_dict()
    ours = [*own.get(argv[0], []), *own.get(__name__, [])]
    # absl appends a line to the help of options that may be repeated
    helps = {flag.name: flag.help.partition(";\n    repeat this option")[0] for flag in ours}
    options = [entry(f"--{name}", text) for name, text in helps.items()]
    about = (sys.modules["__main__"].__doc__ or "").strip()
    return [as_typed(about), "", "options:", *options]


def _with_our_configs(argv: list[str], presets: str = "") -> list[str]:
    """Resolve config/grpo.py to the library's if the current folder has none, and a bare preset
    name to the config file `presets`."""
    found, before = [], ""
    for arg in argv:
        if before == "--config":
            found.append(find_config(arg, presets))
        elif arg.startswith("--config="):
            found.append("--config=" + find_config(arg.removeprefix("--config="), presets))
        else:
            found.append(arg)
        before = arg
    return found
