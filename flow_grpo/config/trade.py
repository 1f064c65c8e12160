"""The two kinds of runs, of models that draw and of models that answer: what the command line, the
help and the check of a config have to know of each."""

import importlib
import math
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.access import NEWEST
from flow_grpo.config import old_names
from flow_grpo.config.custom import CUSTOM, import_class, import_named
from flow_grpo.config.fields import ModelFields, RewardFields, SharedFields
from flow_grpo.config.places import find
from flow_grpo.config.settings import check_settings, freeze, second_names, to_config, walk
from flow_grpo.errors import UserError, nearest, with_nearest
from flow_grpo.files import dotted, refuse_halves

Unchecked = ConfigDict  # as a config file returns it: nothing but checks should read it
# dicts with names of the user's
OPEN_FIELDS = (
    *(each.name for each in fields(RewardFields) if each.type is dict),
    *(*CUSTOM, "environment_options"),
)
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


class OtherTrade(UserError):
    """A config of the other training script."""


@dataclass(frozen=True)
class Trade:
    """A kind of run: its fields, and what is said and asked of them."""

    settings: Callable[[], type]  # the dataclass of all fields
    first: tuple[str, ...]  # fields that the short help has
    presets_in: str  # the module with `get_config(preset)`, PRESETS and MODELS
    marker: str  # a file that every model has
    example: str  # a preset
    rewards: Mapping[str, str]  # where each is imported from
    check_rewards: Callable[[SharedFields], None]  # their names and weights
    # what reward_options of a reward, by its name and path, takes; None where that may be anything
    option_names: Callable[[str, str], list[str] | None]
    # fields that name classes of the user's own, and where the function is that takes one
    custom: Mapping[str, str] = field(default_factory=dict)
    # where the function is that tells what it can of a run by settings and disk alone
    check_early: str = ""

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

    @property
    def preset_file(self) -> str:
        """The config file that has the presets."""
        return self.example.partition(":")[0]

    @property
    def presets(self) -> ModuleType:
        return importlib.import_module(self.presets_in)

    def models(self) -> list[str]:
        """Hub ids that people train."""
        return [self.get_config().pretrained.model, *self.presets.MODELS]

    def reasons(self) -> dict[str, str]:
        """Why each field is there, by its full name."""
        known = walk(self.settings())
        return {name: each.metadata.get("reason", "") for name, each in known}

    def describe(self, config: ConfigDict, section: str = "") -> str:
        """--config.NAME=VALUE of every field, or of those of a section, with its reason below."""
        why, values = self.reasons(), config.to_dict()
        if section:
            sections = [name for name, value in values.items() if isinstance(value, dict)]
            if section not in sections:
                message = f"--help={section}: the sections are {', '.join(sections)}"
                raise UserError(with_nearest(message, section, sections))
            values = {section: values[section]}
        own = ConfigDict(values)
        empty = [(name, {}) for name, value in all_fields(own) if value == ConfigDict()]
        fields = sorted([*dotted(values), *empty], key=lambda field: field[0])
        return "\n".join(entry(f"--config.{n}={v!r}", why.get(n, "")) for n, v in fields)

    def load_custom(self, config: Mapping[str, Any] | ConfigDict) -> bool:
        """Import the classes that a config names, which may bring fields of their own; whether
        there are other fields now."""
        before = self.settings()
        for field_name, takes in self.custom.items():
            named = config.get(field_name)
            for name, path in named.items() if isinstance(named, dict | ConfigDict) else ():
                where = f"{field_name}.{name}"
                import_named(takes, where, where)(where, name, import_class(where, str(path)))
        return self.settings() is not before

    def check(self, config: Unchecked | SharedFields) -> Any:
        """Its values, frozen, once each is known to be one that its field may have."""
        if isinstance(config, ConfigDict):
            check_keys(config)
            self.load_custom(config)
            self._check_fields(config)
        settings = self.freeze(config)
        check_settings("", settings)
        _check_run_name(settings.run_name)
        for name in ("run_name", "logdir"):
            _check_folder_name(name, getattr(settings, name))
        if not settings.logdir:
            raise UserError("logdir='' must name a folder; '.' is the current one")
        _check_revision(settings.pretrained)
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

    def check_kind(self, config: ConfigDict) -> None:
        """Reject a config of the other training script.

        Raises:
            OtherTrade: If `config` has a field that only the other script's configs have.
        """
        known = self.get_config()
        for name, script in SCRIPTS.items():
            if name in config and name not in known:
                raise OtherTrade(
                    f"this is a config of {script}; run that, or start from {self.example}"
                )

    def _check_fields(self, config: ConfigDict) -> None:
        """Refuse other fields than there are, and values of other types."""
        default = self.get_config()
        known, given = dict(all_fields(default)), dict(all_fields(config))
        for name in known.keys() & given.keys():
            if isinstance(known[name], ConfigDict):
                _check_type(name, given[name], ConfigDict)
        self.check_kind(config)
        dicts = {n: v.to_dict() for n, v in given.items() if isinstance(v, ConfigDict)}
        chosen = {n: v for n, v in given.items() if n in known and v != known[n]}
        old = old_names.among({**given, **dicts}, known, chosen)
        unknown = [name for name in given if name not in known]
        hints = {name: suggestion(name, known, chosen, cutoff=0.75) for name in unknown}
        shown = {name: f"{name} ({hint})" if hint else name for name, hint in hints.items()}
        others = [shown.pop(name) for name in unknown if name not in old]
        problems = []
        if unknown:
            named = [*shown.values(), *([_some(others)] if others else [])]
            problems.append(f"it has unknown fields: {', '.join(named)}")
        problems += [
            old_names.TOLD.format(name, dicts.get(name, given[name]))
            for name in old
            if name in known
        ]
        absent = [name for name in known if name not in given]
        # of a section that is not there, only its name
        if missing := [name for name in absent if name.rpartition(".")[0] not in absent]:
            problems.append(f"it lacks {_some(missing)}")
        if ours := {n: v for new in old.values() for n, v in new.items()}:
            problems.append("write " + "; ".join(f"config.{n} = {v!r}" for n, v in ours.items()))
        if others or missing:
            preset = self.example.partition(":")[2]
            problems.append(
                f"start from the nearest preset, {self.presets_in}.get_config({preset!r}) for one, "
                "and change what differs"
            )
        if problems:
            raise UserError(f"the config does not fit: {'; '.join(problems)}")
        for name, value in dotted(config.to_dict()):
            _check_text(name, value)
        for name, value in given.items():
            section, _, key = name.rpartition(".")
            kind = (default[section] if section else default).get_type(key)
            _check_value(name, value, known[name], kind)


def entry(option: str, why: str) -> str:
    """One entry of a help text."""
    indent = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}
    return "\n".join([f"  {option}", *textwrap.wrap(why, 88, **indent)])


def suggestion(
    name: str,
    known: Collection[str],
    chosen: Mapping[str, Any] = old_names.NONE,
    *,
    cutoff: float,
) -> str:
    """What a field may have been meant to be called; nothing where nothing is near. `chosen` are
    fields that have a value already."""
    if told := old_names.hint(name, known, chosen):
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
    """Every field and section with its full name; dicts named in `closed`, and those within a
    section, count as one value."""
    for key, value in config.items():
        yield prefix + key, value
        if isinstance(value, ConfigDict) and not prefix and key not in closed:
            yield from all_fields(value, f"{prefix}{key}.", closed)


def _check_run_name(name: str) -> None:
    """Reject a run directory outside `logdir`, or `logdir` itself."""
    if name and (os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] in ("..", ".")):
        raise UserError(
            f"run_name={name!r} must name a folder inside logdir; set --config.logdir to write "
            "elsewhere"
        )


def _check_folder_name(name: str, value: str) -> None:
    """Reject names that a shell or a report would display differently."""
    if value != value.strip() or not value.isprintable():
        raise UserError(
            f"{name}={value!r} must not start or end with spaces, or contain control characters"
        )


def _check_revision(pretrained: ModelFields) -> None:
    """Reject a revision of a local folder, which has none."""
    model, revision = find(pretrained.model), pretrained.revision
    if revision != NEWEST and os.path.exists(model):
        raise UserError(
            f"pretrained.revision={revision!r} is for models of the hub, and pretrained.model="
            f"{pretrained.model!r} is a folder; leave it at {NEWEST!r}"
        )


def check_keys(config: ConfigDict, prefix: str = "") -> None:
    """Reject keys that are not strings: readers of a config join them with dots."""
    for key, value in config.items():
        if not isinstance(key, str):
            section = prefix.rstrip(".") or "the config"
            raise UserError(f"{section}: the name {key!r} must be a string, such as {str(key)!r}")
        if isinstance(value, ConfigDict):
            check_keys(value, f"{prefix}{key}.")


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
