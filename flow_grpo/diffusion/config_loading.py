"""Load the config of a run or a file and apply command-line overrides."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from flow_grpo.config import overrides, saved_config
from flow_grpo.config.paths import resolve_config_file
from flow_grpo.config.trainer_spec import TrainerSpec
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.errors import UserError
from flow_grpo.untrusted_files import flatten_fields

# Fields of training, mapped to those that replace them in evaluations.
EVAL_FIELDS = {
    "reward_fn": "eval_reward_fn",
    "dataset": "eval_dataset",
    "dataset_column": "eval_dataset_column",
    "image_column": "eval_image_column",
    "resolution": "eval_resolution",
    "height": "eval_height",
    "width": "eval_width",
    "sample.num_steps": "sample.eval_num_steps",
    "sample.guidance_scale": "sample.eval_guidance_scale",
}


def load_run_config(
    run: Path, options: list[str], spec: TrainerSpec = DIFFUSION_SPEC
) -> ConfigDict:
    """Load the config that `run` was trained with; fields added since have their defaults."""
    return apply_overrides(saved_config.load_run_config(run, spec), options, spec)


def load_config_file(
    path: str, options: list[str], spec: TrainerSpec = DIFFUSION_SPEC
) -> ConfigDict:
    """Load path/to/config.py, path/to/config.py:preset or a preset by name.

    Raises:
        UserError: If the config belongs to another kind of model.
    """
    argument = f"--config={resolve_config_file(path, spec.preset_file)}"
    config = overrides.load_checked_config([sys.argv[0], argument, *options], spec)
    if spec.other_script(config):
        raise UserError(
            "belongs to another kind of model",
            field="--config",
            value=path,
            hint=f"use one like {spec.example}",
        )
    return apply_overrides(config, options, spec)


def check_eval_fields(options: Sequence[str], config: ConfigDict) -> None:
    """Reject an override of a training field where the evaluation uses a separate field."""
    given = {option.removeprefix("--config.").partition("=")[0] for option in options}
    values = dict(flatten_fields(config.to_dict()))
    for field, eval_field in EVAL_FIELDS.items():
        is_set = (
            bool(config.eval_reward_fn)
            if field == "reward_fn"
            else values[eval_field] not in (None, "", 0)
        )
        is_given = any(name == field or name.startswith(f"{field}.") for name in given)
        if is_given and eval_field not in given and is_set:
            raise UserError(
                f"has no effect: this script uses {eval_field}, which the config sets",
                field=f"--config.{field}",
                hint=f"set --config.{eval_field}",
            )


def apply_overrides(
    config: ConfigDict, options: list[str], spec: TrainerSpec = DIFFUSION_SPEC
) -> ConfigDict:
    """Apply options of the form --config.FIELD=VALUE.

    Raises:
        UserError: If a field is unknown, or a value has the wrong type.
    """
    for option in options:
        name, equals, value = option.removeprefix("--config.").partition("=")
        overrides.check_field_name(name, config, spec, value if equals else None)
    values = flags.FlagValues()
    original_argv = sys.argv
    try:
        sys.argv = [original_argv[0], *options]  # ml_collections reads overrides from here
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        values(sys.argv)
    except (flags.Error, TypeError, ValueError) as error:
        raise UserError(overrides.explain_flag_error(error, config, options)) from error
    finally:
        sys.argv = original_argv
    return values.config
