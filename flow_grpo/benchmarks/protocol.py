"""Protocols of benchmarks: what is sampled, how, and how it is scored; read from protocols.toml.

A `Settings` is what one evaluation actually uses. `find_deviations` compares it with the protocol;
every difference is printed and stored with the scores.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from flow_grpo.errors import UserError, did_you_mean

TABLE = Path(__file__).with_name("protocols.toml")
DEFAULT_FAMILY = "default"
PARENT_KEY = "like"
SEED = 42
T = TypeVar("T")


@dataclass(frozen=True)
class ScorerInfo:
    """A scorer of the table: its weights, where it is published, and why it is not built in."""

    weights: str
    paper: str
    missing: str = ""


@dataclass(frozen=True)
class PromptSource:
    """Prompt files of a benchmark, pinned to a commit and a checksum."""

    source: str  # "github OWNER/NAME", "hub OWNER/NAME" or "bundled"
    files: str  # path in it, or a glob for all files of a folder
    count: int  # distinct prompts or questions
    sha256: str = ""  # "" if it is not known
    commit: str = ""
    column: str = ""  # of the text; "" for the default of the trainer
    tag: str = ""  # column of the category
    license: str = ""
    options: dict[str, str] = field(default_factory=dict)  # further settings of the data

    @property
    def repository(self) -> str:
        return self.source.partition(" ")[2]

    @property
    def is_glob(self) -> bool:
        return "*" in self.files


@dataclass(frozen=True)
class ImageSampling:
    """How the images of a benchmark are sampled."""

    steps: int
    guidance: float
    height: int
    width: int


@dataclass(frozen=True)
class ResponseSampling:
    """How the responses of a benchmark are sampled; temperature 0 is greedy decoding."""

    temperature: float
    max_new_tokens: int
    question_format: str = ""  # "" keeps that of the config


@dataclass(frozen=True)
class Protocol:
    """The pinned protocol of a benchmark."""

    name: str
    title: str
    trainer: Literal["diffusion", "vlm"]
    paper: str
    prompts: PromptSource
    samples: int  # images or responses per prompt
    sampling: dict[str, ImageSampling | ResponseSampling]  # by model family
    scorers: dict[str, dict[str, Any]]  # options by name
    formula: str
    settings_from: str  # where the settings and the formula are published
    notes: str = ""
    preset: str = ""  # config without --config and run, for the small models
    layout: str = ""  # "geneval": images are also arranged for the authors' scorer
    seed: int = SEED

    def sampling_of(self, family: str) -> ImageSampling | ResponseSampling:
        """Return the sampling settings of a model family."""
        return self.sampling.get(family, self.sampling[DEFAULT_FAMILY])

    def missing_scorers(self) -> dict[str, str]:
        """Return the scorers that are not built in, and why."""
        known = scorer_infos()
        return {name: known[name].missing for name in self.scorers if known[name].missing}

    def to_json(self) -> dict[str, Any]:
        """Return the protocol as stored in results.json, with the scorers' weights."""
        known = scorer_infos()
        weights = {name: known[name].weights for name in self.scorers}
        return {**asdict(self), "scorer_weights": weights}


@dataclass(frozen=True)
class Settings:
    """What an evaluation of a benchmark uses; compared with the protocol."""

    prompts: int  # distinct prompts or questions
    samples: int
    seed: int
    sampling: ImageSampling | ResponseSampling
    scorers: dict[str, dict[str, Any]]  # options by name
    prompts_sha256: str
    scorer_origins: dict[str, str] = field(default_factory=dict)  # of those that are not built in

    def to_json(self) -> dict[str, Any]:
        flat = asdict(self)
        sampling = flat.pop("sampling")
        return {**flat, **sampling}


@dataclass(frozen=True)
class Deviation:
    """A setting that differs from the protocol."""

    setting: str
    protocol: Any
    used: Any

    def __str__(self) -> str:
        return f"{self.setting}: {_shown(self.used)} (protocol: {_shown(self.protocol)})"


def find_deviations(protocol: Protocol, used: Settings, family: str) -> list[Deviation]:
    """Return the settings that differ from those of the protocol for a model family."""
    source = protocol.prompts
    pinned = Settings(
        prompts=source.count,
        samples=protocol.samples,
        seed=protocol.seed,
        sampling=protocol.sampling_of(family),
        scorers=protocol.scorers,
        prompts_sha256=source.sha256 or used.prompts_sha256,
    )
    expected, found = pinned.to_json(), used.to_json()
    return [
        Deviation(name, expected[name], found[name])
        for name in expected
        if expected[name] != found[name]
    ]


def benchmark_names() -> list[str]:
    """Return the names of all benchmarks, in the order of the table."""
    return list(_table()["benchmark"])


def get_protocol(name: str) -> Protocol:
    """Return the protocol of a benchmark; raise a UserError for an unknown name."""
    names = benchmark_names()
    if name not in names:
        hint = did_you_mean(name, names) or f"choose one of {', '.join(names)}"
        raise UserError("is not a benchmark", field="NAME", value=name, hint=hint)
    values = _inherited(name)
    trainer = values.get("trainer")
    sampling = ImageSampling if trainer == "diffusion" else ResponseSampling
    values["prompts"] = _build(PromptSource, values["prompts"], f"{name}.prompts")
    values["sampling"] = {
        family: _build(sampling, each, f"{name}.sampling.{family}")
        for family, each in values["sampling"].items()
    }
    return _build(Protocol, {"name": name, **values}, name)


@cache
def scorer_infos() -> dict[str, ScorerInfo]:
    """Return the scorers of the table by name."""
    return {
        name: _build(ScorerInfo, each, f"scorer.{name}")
        for name, each in _table()["scorer"].items()
    }


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text("utf-8"))


def _inherited(name: str) -> dict[str, Any]:
    """Return the entry of a benchmark, completed by that of its parent."""
    own = dict(_table()["benchmark"][name])
    parent = own.pop(PARENT_KEY, None)
    return {**_inherited(parent), **own} if parent else own


def _build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a table; raise ValueError for unknown and missing keys."""
    known = {each.name for each in fields(kind)}
    required = {
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    }
    if wrong := {*values} - known or required - {*values}:
        raise ValueError(f"{TABLE.name}: {where} has unknown or missing keys: {sorted(wrong)}")
    return kind(**values)


def _shown(value: Any) -> str:
    """Return a value for messages: scorers with their options, and the start of a checksum."""
    if isinstance(value, dict):
        shown = [f"{name} {each}" if each else name for name, each in value.items()]
        return ", ".join(shown) or "built in"
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text
