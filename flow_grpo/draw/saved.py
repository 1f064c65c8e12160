"""The config of a run that was, or of a file; both with options of the command line."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from flow_grpo.config import overrides, saved
from flow_grpo.config.places import find_config
from flow_grpo.config.trade import OtherTrade
from flow_grpo.draw.fields import DRAW
from flow_grpo.errors import UserError
from flow_grpo.files import dotted

# Fields of training, and those that an evaluation uses in their place.
EVAL_FIELDS = {
    "reward_fn": "eval_reward_fn",
    "sample.num_steps": "sample.eval_num_steps",
    "sample.guidance_scale": "sample.eval_guidance_scale",
}


def config_of_run(run: Path, options: list[str]) -> ConfigDict:
    """What `run` was trained with. A field that came later has its default."""
    return override(saved.config_of_run(run, DRAW), options)


def config_of_file(path: str, options: list[str]) -> ConfigDict:
    """path/to/config.py, path/to/config.py:preset or the name of a preset."""
    argument = f"--config={find_config(path, DRAW.preset_file)}"
    config = overrides.check_names([sys.argv[0], argument, *options], DRAW)
    try:
        DRAW.check_kind(config)
    except OtherTrade as error:
        raise UserError(
            f"--config {path} is not a config of a diffusion model, which this script needs; use "
            f"one like {DRAW.example}"
        ) from error
    return override(config, options)


def check_eval_fields(options: Sequence[str], config: ConfigDict) -> None:
    """Reject --config.FIELD of sampling in training where evaluations have a field of their own."""
    given = {option.removeprefix("--config.").partition("=")[0] for option in options}
    values = dict(dotted(config.to_dict()))
    for field, own in EVAL_FIELDS.items():
        in_use = bool(config.eval_reward_fn) if field == "reward_fn" else values[own] is not None
        is_given = any(name == field or name.startswith(f"{field}.") for name in given)
        if is_given and own not in given and in_use:
            raise UserError(
                f"--config.{field} has no effect here, where {own} is used; set --config.{own}"
            )


def override(config: ConfigDict, options: list[str]) -> ConfigDict:
    """--config.FIELD=VALUE."""
    for option in options:
        name, equals, value = option.removeprefix("--config.").partition("=")
        overrides.check_name(name, config, DRAW, value if equals else None)
    values, given = flags.FlagValues(), sys.argv
    try:
        sys.argv = [given[0], *options]  # where ml_collections looks for them
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        values(sys.argv)
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(overrides.plainly(error, config, options)) from error
    finally:
        sys.argv = given
    return values.config
