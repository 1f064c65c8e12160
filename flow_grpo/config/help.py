"""Texts of `--help`, which lists the common settings, `--help=all`, `--help=SECTION` and so on."""

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config.config_dicts import iter_config_fields
from flow_grpo.config.error_reporting import rewrite_examples
from flow_grpo.config.overrides import load_config, option_values, script_flags
from flow_grpo.config.trainer_spec import TrainerSpec
from flow_grpo.errors import UserError, did_you_mean
from flow_grpo.untrusted_files import flatten_fields

FOOTER = """\
--help=all      list all settings, with their values in the given --config
--help=train    list the settings of a section
--help=presets  list the presets
See docs/configuration.md for details."""


def short_help(argv: list[str], spec: TrainerSpec, common: Sequence[str]) -> str:
    """Return the description of the script, its options and the `common` settings."""
    help_texts = spec.help_texts()
    settings = [_format_entry(f"--config.{name}=...", help_texts[name]) for name in common]
    return "\n".join([*_describe_script(argv), "", "common settings:", *settings, "", FOOTER])


def full_help(argv: list[str], spec: TrainerSpec, part: str) -> str:
    """Return the help of `--help=part`: "presets", a section, or all settings."""
    if part == "presets":
        return "\n".join(spec.presets.PRESETS)
    paths = option_values(argv, "config")
    config = load_config(paths[-1], argv, spec) if paths else spec.get_config()
    settings = describe_settings(config.to_dict(), spec, "" if part in ("", "all") else part)
    return "\n".join(
        [*_describe_script(argv), "", "settings, with their values in this config:", settings]
    )


def describe_settings(values: dict[str, Any], spec: TrainerSpec, section: str = "") -> str:
    """Return `--config.NAME=VALUE` and the help of every setting, or of those of a section."""
    help_texts = spec.help_texts()
    if section:
        sections = [name for name, value in values.items() if isinstance(value, dict)]
        if section not in sections:
            raise UserError(
                f"must be a section: {', '.join(sections)}",
                field="--help",
                value=section,
                hint=did_you_mean(section, sections),
            )
        values = {section: values[section]}
    selected = iter_config_fields(ConfigDict(values))
    empty_dicts = [(name, {}) for name, value in selected if value == ConfigDict()]
    listed = sorted([*flatten_fields(values), *empty_dicts], key=lambda item: item[0])
    return "\n".join(
        _format_entry(f"--config.{name}={value!r}", help_texts.get(name, ""))
        for name, value in listed
    )


def _describe_script(argv: list[str]) -> list[str]:
    """Return the description and the options of the script."""
    # absl appends a line to the help of options that may be repeated
    helps = {
        flag.name: flag.help.partition(";\n    repeat this option")[0]
        for flag in script_flags(argv[0])
    }
    options = [_format_entry(f"--{name}", text) for name, text in helps.items()]
    about = (sys.modules["__main__"].__doc__ or "").strip()
    return [rewrite_examples(about), "", "options:", *options]


def _format_entry(option: str, help_text: str) -> str:
    """Return an option with its help, wrapped and indented below it."""
    indent = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}
    return "\n".join([f"  {option}", *textwrap.wrap(help_text, 88, **indent)])
