"""What `--help` says of the config: every field, its value and the reason for it."""

import textwrap
from collections.abc import Iterable

from absl.flags import Flag
from ml_collections import ConfigDict

from flow_grpo.config.settings import dotted
from flow_grpo.config.trade import Trade


def usage(description: str, flags: Iterable[Flag], config: ConfigDict, trade: Trade) -> str:
    lines = [f"  --{flag.name}\n        {flag.help}" for flag in flags]
    parts = [description.strip(), "", "options:", *lines, "", "fields, as this config has them:"]
    return "\n".join([*parts, field_list(config, trade)])


def field_list(config: ConfigDict, trade: Trade, width: int = 88) -> str:
    """--config.NAME=VALUE of this config, each with its reason below."""
    why, lines, values = trade.reasons(), [], config.to_dict()
    empty = [(name, value) for name, value in values.items() if value == {}]
    for name, value in sorted([*dotted(values), *empty], key=lambda field: field[0]):
        lines.append(f"  --config.{name}={value!r}")
        lines += textwrap.wrap(
            why.get(name, ""), width, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return "\n".join(lines)
