"""The two kinds of runs, of models that draw and of models that answer: what the command line, the
help and the check of a config have to know of each."""

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config import old_names
from flow_grpo.config.fields import RewardFields, SharedFields
from flow_grpo.config.settings import check_settings, freeze, second_names, to_config, walk
from flow_grpo.errors import UserError, nearest
from flow_grpo.files import dotted, refuse_halves

Unchecked = ConfigDict  # as a config file returns it: nothing but checks should read it
# dicts with names of the user's
OPEN_FIELDS = tuple(each.name for each in fields(RewardFields) if each.type is dict)
TYPES = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    tuple: ((tuple, list), "a tuple"),
    ConfigDict: (ConfigDict, "a ConfigDict"),
}
PATHS = ("dataset", "logdir", "run_name", "resume", "pretrained.model", "train.lora_path")
LONGEST = 255  # bytes of a file's name, in all file systems of Linux
NAMED = 5  # of many wrong fields, as many are named
# by a field that the configs of one script have
SCRIPTS = {"algorithm": "scripts/train.py", "question_format": "scripts/train_vlm.py"}


@dataclass(frozen=True)
class Trade:
    """A kind of run: its fields, and what is said and asked of them."""

    settings: Callable[[], type]  # the dataclass of all fields
    source: str  # the module with `get_config()`
    example: str  # a preset
    rewards: Mapping[str, str]  # where each is imported from
    # what reward_options of a reward, by its name and path, takes; None where that may be anything
    option_names: Callable[[str, str], list[str] | None]

    def get_config(self) -> ConfigDict:
        """All fields at their defaults."""
        return to_config(self.settings())

    def freeze(self, config: Unchecked | SharedFields) -> Any:
        """Its values, to be read like the config itself; what is frozen stays as it is."""
        return freeze(self.settings(), config)

    def second_names(self) -> dict[str, str]:
        """Fields that have one value with another, and which."""
        return second_names(self.settings())

    def algorithms(self) -> tuple[str, ...]:
        """Sections of which a run uses one."""
        known = dict(walk(self.settings()))
        return known["algorithm"].metadata["choices"] if "algorithm" in known else ()

    def reasons(self) -> dict[str, str]:
        """Why each field is there, by its full name."""
        return {name: each.metadata["reason"] for name, each in walk(self.settings())}

    def describe(self, config: ConfigDict, width: int = 88) -> str:
        """--config.NAME=VALUE of every field, each with its reason below."""
        why, lines, values = self.reasons(), [], config.to_dict()
        empty = [(name, value) for name, value in values.items() if value == {}]
        for name, value in sorted([*dotted(values), *empty], key=lambda field: field[0]):
            lines.append(f"  --config.{name}={value!r}")
            indent = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}
            lines += textwrap.wrap(why.get(name, ""), width, **indent)
        return "\n".join(lines)

    def check(self, config: Unchecked | SharedFields) -> Any:
        """Its values, frozen, once each is known to be one that its field may have."""
        if isinstance(config, ConfigDict):
            self._check_fields(config)
        settings = self.freeze(config)
        check_settings("", settings)
        for name, other in self.second_names().items():
            value, other_value = (_get(settings, each) for each in (name, other))
            if value != other_value:  # in a config whose references were resolved
                raise UserError(
                    f"{name}={value!r} and {other}={other_value!r} are two names of one field; "
                    "give both the same value"
                )
        if settings.train.offload_optimizer and settings.train.use_8bit_adam:
            raise UserError(
                "train.offload_optimizer=True does not go with train.use_8bit_adam=True"
            )
        return settings

    def _check_fields(self, config: ConfigDict) -> None:
        """Refuse other fields than there are, and values of other types."""
        default = self.get_config()
        known, given = dict(all_fields(default)), dict(all_fields(config))
        for name in known.keys() & given.keys():
            if isinstance(known[name], ConfigDict):
                _check_type(name, given[name], ConfigDict)
        for name, script in SCRIPTS.items():
            if name in given and name not in known:
                raise UserError(
                    f"this is a config of {script}; run that, or start from {self.example}"
                )
        problems = []
        if unknown := [name for name in given if name not in known]:
            hints = [suggestion(name, known, cutoff=0.75) for name in unknown]
            shown = [f"{n} ({h})" if h else n for n, h in zip(unknown, hints, strict=True)]
            problems.append(f"it has unknown fields: {_some(shown)}")
        absent = [name for name in known if name not in given]
        # of a section that is not there, only its name
        if missing := [name for name in absent if name.rpartition(".")[0] not in absent]:
            problems.append(f"it lacks {_some(missing)}")
        if problems:
            way_out = f"start from {self.source}.get_config() and change what differs"
            raise UserError(f"the config does not fit: {'; '.join([*problems, way_out])}")
        for name, value in dotted(config.to_dict()):
            _check_text(name, value)
        for name, value in given.items():
            section, _, key = name.rpartition(".")
            kind = (default[section] if section else default).get_type(key)
            _check_value(name, value, known[name], kind)


def suggestion(name: str, known: Collection[str], *, cutoff: float) -> str:
    """What a field may have been meant to be called; nothing where nothing is near."""
    if told := old_names.hint(name, known):
        return told
    near = nearest(name, known, cutoff=cutoff)
    return f"did you mean {near}?" if near else ""


def _get(settings: Any, name: str) -> Any:
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def all_fields(
    config: ConfigDict, prefix: str = "", closed: Collection[str] = OPEN_FIELDS
) -> Iterator[tuple[str, Any]]:
    """Fields and sections by their full names; what is in `closed` as a whole."""
    for key, value in config.items():
        yield prefix + key, value
        if isinstance(value, ConfigDict) and key not in closed:
            yield from all_fields(value, f"{prefix}{key}.", closed)


def _check_value(name: str, value: Any, default: Any, kind: type) -> None:
    if value is None and default is None:
        return
    if value is None and default == "":
        raise UserError(f"{name}=None must be a string; '' is for none")
    _check_type(name, value, kind)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name}={value} must be a finite number")
    if kind is tuple:
        if len(value) != len(default):
            raise UserError(f"{name}={value} must have {len(default)} values")
        for one, one_default in zip(value, default, strict=True):
            _check_value(name, one, one_default, type(one_default))


def _check_text(name: str, value: Any) -> None:
    """Also of the fields whose names are the user's; what is not text is passed over."""
    for text in (name, value) if isinstance(value, str) else (name,):
        refuse_halves(text, ascii(name))
        if "\0" in text:
            raise UserError(f"{name}={value!r} has a zero byte in it; leave it out")
    parts = re.split("[/,]", value) if name in PATHS and isinstance(value, str) else []
    if any(len(part.encode()) > LONGEST for part in parts):
        raise UserError(f"{name}={value[:60]}... is too long for a path; name a shorter one")


def _check_type(name: str, value: Any, kind: type) -> None:
    allowed, words = TYPES[kind]
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name}={value!r} must be {words}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
