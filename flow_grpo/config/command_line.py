"""Start a script with an ml_collections config; report user errors in one line."""

import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from flow_grpo.config.config_dicts import SHORTHANDS
from flow_grpo.config.error_reporting import (
    STOP_SIGNALS,
    exit_on_user_error,
    is_rank_zero,
    print_text,
)
from flow_grpo.config.fields import SharedFields
from flow_grpo.config.help import full_help, short_help
from flow_grpo.config.migration import foreign_hint
from flow_grpo.config.migration.mm_grpo import weigh_listed_rewards
from flow_grpo.config.overrides import (
    check_flags,
    explain_flag_error,
    field_names,
    load_checked_config,
    load_config,
    option_values,
)
from flow_grpo.config.paths import ROOT, check_dataset_available, resolve_config_file, resolve_path
from flow_grpo.config.saved_config import LOCATION_FIELDS, find_run_directory, read_saved_fields
from flow_grpo.config.settings import check_conditions
from flow_grpo.config.trainer_spec import TrainerSpec, WrongTrainerConfig
from flow_grpo.errors import UserError, check_model_folder
from flow_grpo.hub_access import check_hub_access
from flow_grpo.untrusted_files import reject_lone_surrogates

NO_CONFIG_MESSAGE = "--config is missing; pass one, such as --config "
DRY_RUN_HELP = (
    "Build everything, measure a few batches, print the estimated memory and time of the run, and "
    "exit without writing anything."
)
WORLD_SIZE_HELP = (
    "With --dry_run: number of processes to plan for; the running ones measure batches of the "
    "planned size."
)
RESUME_HELP = "Run directory to resume with its own config, which --config.FIELD=VALUE overrides."
RUN_CONFIG_FILE = ROOT / "config/run.py"


def run_with_config(
    main: Callable[[ConfigDict], Any],
    spec: TrainerSpec,
    *,
    common: Sequence[str] = (),
    wrong_trainer_message: str = "",
    default: str | None = None,
    dry_run: Callable[[ConfigDict, int | None], Any] | None = None,
) -> None:
    """Parse --config, --config.key=value ... and --debug, then call `main` with the config.

    The return value of `main` is never freed, because gloo can hang when the last reference to a
    process group goes.

    Args:
        main: Called with the config.
        spec: The trainer that the config is for.
        common: Settings that --help lists; defaults to those of training.
        wrong_trainer_message: Error for a config of the other training script; by default it names
            that script.
        default: Config to use if none is given.
        dry_run: Called instead of `main` with --dry_run, with the config and --world_size.
    """
    if not flags.FLAGS.is_parsed():
        parse_command_line(
            spec,
            dry_run=dry_run is not None,
            default=default,
            common=common,
            wrong_trainer_message=wrong_trainer_message,
        )

    def start(_: list[str]) -> None:
        """Call `main`, or `dry_run` with --dry_run, with the parsed config; never returns."""
        set_up_logging()
        config = flags.FLAGS.config
        call = partial(main, config)
        if dry_run and flags.FLAGS.dry_run:
            call = partial(dry_run, config, flags.FLAGS.world_size)
        call_and_exit(call, debug=flags.FLAGS.debug)

    app.run(start, flags_parser=lambda argv: argv[:1])


def parse_command_line(
    spec: TrainerSpec,
    *,
    dry_run: bool = False,
    default: str | None = None,
    common: Sequence[str] = (),
    wrong_trainer_message: str = "",
    needs_files: bool = True,
) -> None:
    """Parse the command line, print help, and report the errors that can be found without torch.

    The training scripts call it before imports that take seconds. For arguments, see
    `run_with_config`; here `dry_run` tells whether the script has that option. With
    `needs_files=False`, the model and the datasets need not be available.
    """
    config_flags.DEFINE_config_file(
        "config", help_string="path/to/config.py or path/to/config.py:preset"
    )
    flags.DEFINE_bool("debug", False, "Show the traceback of a user error.")
    # in place, because ml_collections reads the names of overrides from there
    sys.argv[:] = argv = [expand_shorthand(arg) for arg in sys.argv]
    if dry_run:
        flags.DEFINE_bool("dry_run", False, DRY_RUN_HELP)
        flags.DEFINE_integer("world_size", None, WORLD_SIZE_HELP, lower_bound=1)
        flags.DEFINE_string("resume", None, RESUME_HELP)
        if runs := option_values(argv, "resume"):
            default = f"{RUN_CONFIG_FILE}:{runs[0]}"
    if default and not any(re.match(r"--config(=|$)", arg) for arg in argv):
        argv = [argv[0], f"--config={default}", *argv[1:]]
    argv = [weigh_listed_rewards(arg) for arg in _resolve_config_options(argv, spec.preset_file)]

    def parse_and_check() -> None:
        """Print help and exit if it is requested; else parse the flags and check the config."""
        if text := _requested_help(argv, spec, common or spec.first):
            print_text(text)
            sys.exit()
        _parse(argv, spec)
        try:
            settings = spec.check(flags.FLAGS.config)
        except WrongTrainerConfig as error:
            raise UserError(wrong_trainer_message or str(error)) from error
        spec.check_rewards(settings)
        if needs_files:
            check_dataset_available(settings.dataset)
            check_dataset_available(settings.eval_dataset, "eval_dataset")
        if default is None and needs_files:
            _check_model_exists(settings, spec)
        if dry_run:
            _check_training(settings, spec)

    exit_on_user_error(parse_and_check, debug="--debug" in argv)


def _requested_help(argv: list[str], spec: TrainerSpec, common: Sequence[str]) -> str:
    """Return the text of a `--help` option, or "" if there is none."""
    if {"--help", "-h", "--helpshort"} & {*argv}:
        return short_help(argv, spec, common)
    for arg in argv:
        if re.match("--help(=|full)", arg):
            return full_help(argv, spec, arg.partition("=")[2])
    return ""


def _check_model_exists(settings: SharedFields, spec: TrainerSpec) -> None:
    """Reject a model that is neither on disk nor on the hub."""
    model = resolve_path(settings.pretrained.model)
    check_model_folder(model, spec.marker)
    check_hub_access(
        "pretrained.model",
        model,
        revision=settings.pretrained.revision,
        file=spec.marker,
        known=spec.models(),
    )


def _check_training(settings: SharedFields, spec: TrainerSpec) -> None:
    """Check the options of a training script, and the settings and files that a run needs."""
    if flags.FLAGS.world_size and not flags.FLAGS.dry_run:
        raise UserError(
            "requires --dry_run",
            field="--world_size",
            value=flags.FLAGS.world_size,
            hint="in a run, the launcher sets the number of processes",
        )
    resumes = settings.resume == "auto" and Path(settings.logdir, settings.run_name).exists()
    if not resumes:  # a resumed run reports changed settings first
        check_conditions(settings)
        resolve_name(spec.preflight_check)(settings)


def call_and_exit(call: Callable[[], Any], *, debug: bool) -> NoReturn:
    """Run `call`, report user errors, and exit without waiting for threads.

    Python would abort if it exited normally while a reward is being computed in a thread.
    """
    for number in STOP_SIGNALS:  # SIGTERM, like Ctrl-C, unwinds the stack and releases resources
        signal.signal(number, signal.default_int_handler)
    code = 0
    try:
        _kept = exit_on_user_error(call, debug=debug)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_up_logging() -> None:
    """Log to stdout without prefixes: everything on rank 0, warnings on the others.

    It may be called repeatedly, as in a notebook that trains twice.
    """
    import diffusers
    import transformers

    for library in (transformers.utils.logging, diffusers.utils.logging):
        library.disable_progress_bar()  # one per file loaded
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # retries are logged by our client
    for library in ("accelerate", "httpx", "httpx2"):  # they log every request
        logging.getLogger(library).setLevel(logging.WARNING)
    # raised by diffusers without a network
    warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks")
    log_to_stdout()


def log_to_stdout() -> None:
    """Set up our own logging only, for scripts that start without torch."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours = logging.getLogger("flow_grpo")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(logging.INFO if is_rank_zero() else logging.WARNING)


def _parse(argv: list[str], spec: TrainerSpec) -> None:
    """Parse the command line into `absl.flags.FLAGS`; raise a UserError for what absl rejects."""
    reject_lone_surrogates(" ".join(argv), "the command line")
    _check_resume_options(argv)
    config = load_checked_config(argv, spec)
    if config is None:
        check_flags(argv, field_names(spec.get_config()))
        if checkpoints := [name for name in option_values(argv, "checkpoint") if name != "base"]:
            raise UserError(
                "is not in a run directory, so its config is unknown",
                field="--checkpoint",
                value=checkpoints[0],
                hint=f"pass a run, or add a config such as --config {spec.example}",
            )
        raise UserError(NO_CONFIG_MESSAGE + spec.example)
    try:
        rest = flags.FLAGS(argv)
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(explain_flag_error(error, config, argv)) from error
    if rest[1:]:
        name, _, text = rest[1].lstrip("+").partition("=")
        hint = foreign_hint(name, field_names(config), text)
        raise UserError(
            f"unexpected argument {rest[1]!r}", hint=hint or "settings start with --config."
        )


def _check_resume_options(argv: list[str]) -> None:
    """Reject options that contradict --resume."""
    if "resume" not in flags.FLAGS:  # reported as unknown elsewhere
        return
    for run in option_values(argv, "resume"):
        if (config := option_values(argv, "config")[-1]) != f"{RUN_CONFIG_FILE}:{run}":
            raise UserError(
                f"is incompatible with --resume={run}, which has its own config",
                field="--config",
                value=config,
                hint="omit one of them",
            )
        for name in LOCATION_FIELDS:
            if option_values(argv, f"config.{name}"):
                raise UserError(
                    f"is incompatible with --resume={run}, which continues that run",
                    field=f"--config.{name}",
                    hint=f"omit it, or start a new run from its state: --config.resume={run}",
                )


def config_of_first_run(argv: list[str], option: str) -> str | None:
    """Return the --config value of the first run directory that an option's paths are in, or None.

    The option may be repeated, or have several values separated by commas.
    """
    paths = map(Path, _option_paths(argv, option))
    run = next(filter(None, map(find_run_directory, paths)), None)
    return run and f"{RUN_CONFIG_FILE}:{run}"


def choose_trainer(
    argv: list[str], specs: Sequence[TrainerSpec], default: str | None = None
) -> TrainerSpec:
    """Return the trainer that --config is for; the first one if the config cannot be loaded.

    Errors are reported when the command line is parsed.

    Args:
        argv: The command line.
        specs: The trainers.
        default: Config to use if none is given.
    """
    given = (option_values(argv, "config") or [default])[-1]
    if not given:
        return specs[0]
    for spec in specs:
        if given in spec.presets.PRESETS:
            return spec
    path = resolve_config_file(given)
    folder = str(Path(path.partition(":")[0]).resolve().parent)
    sys.path.append(folder)  # its imports
    try:
        config = load_config(path, argv, specs[0])
    except UserError:
        return specs[0]
    finally:
        sys.path.remove(folder)
    return next((spec for spec in specs if not spec.other_script(config)), specs[0])


def reject_other_runs(argv: list[str], option: str, spec: TrainerSpec) -> None:
    """Reject paths in runs of the other trainer.

    Args:
        argv: The command line.
        option: The option with the paths, as for `config_of_first_run`.
        spec: The trainer that the config is for.
    """
    for path in _option_paths(argv, option):
        run = find_run_directory(Path(path))
        if run and (script := spec.other_script(read_saved_fields(run))):
            raise UserError(
                f"belongs to a run of {script}, but --config to the other trainer",
                field=f"--{option}",
                value=path,
                hint=f"omit --config, or use a config such as {spec.example} with its checkpoints",
            )


def _option_paths(argv: list[str], option: str) -> list[str]:
    """Return the values of an option, whole and split at commas: a name may contain one."""
    return [path for value in option_values(argv, option) for path in (value, *value.split(","))]


def expand_shorthand(arg: str) -> str:
    """Return the option of a section's main setting: --config.preferences=PATH names its data."""
    option, equals, value = arg.partition("=")
    name = SHORTHANDS.get(option.removeprefix("--config."))
    return f"--config.{name}{equals}{value}" if name and option.startswith("--config.") else arg


def _resolve_config_options(argv: list[str], presets: str = "") -> list[str]:
    """Resolve the values of --config.

    config/grpo.py is the library's if the current directory has none; a bare preset name refers to
    the config file `presets`.
    """
    resolved = []
    for previous, arg in pairwise(["", *argv]):
        option, equals, path = arg.partition("=")
        if previous == "--config":
            resolved.append(resolve_config_file(arg, presets))
        elif option == "--config" and equals:
            resolved.append(f"--config={resolve_config_file(path, presets)}")
        else:
            resolved.append(arg)
    return resolved
