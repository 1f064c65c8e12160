"""What `--help` says of the config: every field, its value and the reason for it."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from types import ModuleType

from absl.flags import Flag
from ml_collections import ConfigDict

from flow_grpo.draw import fields
from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.files import dotted


def reasons(of: ModuleType = fields) -> dict[str, str]:
    """By field: the comments above it in fields.py, or what an algorithm's settings say of it."""
    lines = [line for part in of.PARTS for line in inspect.getsource(part).splitlines()]
    found = dict(_comments(lines))
    if of is not fields:
        return found
    for name, algorithm in ALGORITHMS.items():
        for each in dataclasses.fields(algorithm.Settings):
            found[f"{name}.{each.name}"] = each.metadata["reason"]
    for name in fields.FLOW_GRPO_NAMES:
        found[f"train.{name}"] = f"Flow-GRPO's name of grpo.{name}."
    return found


def _comments(lines: list[str]) -> Iterator[tuple[str, str]]:
    """A comment is of the field below it, and of those that follow without a comment or a gap."""
    sections, comment, ended = {"config": ""}, [], True
    for line in map(str.strip, lines):
        if section := re.match(r"config\.(\w+) = (\w+) = ConfigDict", line):
            sections[section[2]] = f"{section[1]}."
        elif line.startswith("#"):
            text = line.removeprefix("#").strip()
            comment = ([] if ended else comment) + ([] if text.startswith("---") else [text])
            ended = False
        elif field := re.match(r"(\w+)\.([\w.]+) = ", line):
            ended = True
            if field[1] in sections:
                yield sections[field[1]] + field[2], " ".join(comment)
        elif not line:
            comment, ended = [], True


def usage(
    description: str, flags: Iterable[Flag], config: ConfigDict, of: ModuleType = fields
) -> str:
    lines = [f"  --{flag.name}\n        {flag.help}" for flag in flags]
    parts = [description.strip(), "", "options:", *lines, "", "fields, as this config has them:"]
    return "\n".join([*parts, field_list(config, of=of)])


def field_list(config: ConfigDict, width: int = 88, of: ModuleType = fields) -> str:
    """--config.NAME=VALUE of this config, each with its reason below."""
    why, lines, values = reasons(of), [], config.to_dict()
    empty = [(name, value) for name, value in values.items() if value == {}]
    for name, value in sorted([*dotted(values), *empty], key=lambda field: field[0]):
        lines.append(f"  --config.{name}={value!r}")
        lines += textwrap.wrap(
            why.get(name, ""), width, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return "\n".join(lines)
