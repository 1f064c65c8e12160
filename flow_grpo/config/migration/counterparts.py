"""Settings of other trainers and their equivalents here.

Each module of this package has the table of one trainer: plain data, with the repository and paths
it was taken from. `PROJECTS` in `flow_grpo.config.migration.projects` lists them.
"""

import ast
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

DIFFUSION, VLM = "train", "train-vlm"  # commands of `flow-grpo`
# Targets that are options of the launcher instead of settings.
GPUS, NODES, ZERO_STAGE, SHARDED = "launch.gpus", "launch.nodes", "launch.zero", "launch.fsdp2"
LAUNCH = (GPUS, NODES, ZERO_STAGE, SHARDED)
WORDS = {"true": True, "false": False, "null": None, "none": None}
Settings = dict[str, Any]


@dataclass(frozen=True)
class Counterpart:
    """Our equivalent of a setting of another trainer.

    Attributes:
        setting: Our setting; empty if there is none.
        note: Why there is none, and what to do instead.
        values: Its values, mapped to values of `setting` or to several of our settings; None keeps
            the value.
        derived: Whether the project's `derive` computes our value, from several of its settings.
        ignored: Values that change nothing here and need not be reported.
    """

    setting: str = ""
    note: str = ""
    values: Mapping[Any, Any] | None = None
    derived: bool = False
    ignored: tuple[Any, ...] = ()


def to(setting: str, values: Mapping[Any, Any] | None = None) -> Counterpart:
    """Return a counterpart with the same meaning; `values` translates its values."""
    return Counterpart(setting, values=values)


def derived(setting: str) -> Counterpart:
    """Return a counterpart whose value depends on several settings of the other trainer."""
    return Counterpart(setting, derived=True)


def none(note: str, *ignored: Any) -> Counterpart:
    """Return a missing counterpart; `ignored` are values that change nothing here."""
    return Counterpart(note=note, ignored=ignored)


def _derive_nothing(_: Mapping[str, Any]) -> Settings:
    return {}


@dataclass(frozen=True)
class Project:
    """Another trainer.

    Attributes:
        name: Its name, for messages.
        source: Repository, commit and paths of the source of the table.
        trainer: Our command that corresponds to it.
        keys: Each of its settings.
        groups: Patterns of settings without a counterpart, with the reason.
        defaults: Its defaults, which apply to settings that are not given.
        derive: Computes our settings that depend on several of its settings together.
        programs: Modules and scripts that identify its command lines.
        page: Its page below docs/migrating.
    """

    name: str
    source: str
    trainer: str
    keys: Mapping[str, Counterpart]
    groups: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    derive: Callable[[Mapping[str, Any]], Settings] = _derive_nothing
    programs: tuple[str, ...] = ()
    page: str = ""

    def find(self, key: str, *, guess: bool = True) -> Counterpart | None:
        """Return the counterpart of a setting, or None if it is unknown.

        Args:
            key: Its full name.
            guess: Whether a pattern may match a name that this trainer might not have.
        """
        if key in self.keys:
            return self.keys[key]
        for pattern, note in self.groups.items():
            if fnmatchcase(key, pattern) if guess else key == pattern:
                return Counterpart(note=note)
        return None

    def targets(self) -> Iterator[str]:
        """Yield each of our settings that the table names."""
        for counterpart in self.keys.values():
            if counterpart.setting:
                yield counterpart.setting
            for value in (counterpart.values or {}).values():
                yield from value if isinstance(value, dict) else ()


@dataclass(frozen=True)
class Translation:
    """A config of another trainer, translated.

    Attributes:
        settings: Our settings and values, and options of the launcher.
        missing: Settings without a counterpart, as (name, value, reason).
    """

    settings: Settings
    missing: tuple[tuple[str, Any, str], ...]


def translate(project: Project, given: Mapping[str, Any], known: Collection[str]) -> Translation:
    """Translate settings of another trainer.

    Args:
        project: The trainer.
        given: Its settings by their full names.
        known: Our settings.
    """
    settings: Settings = {}
    missing = []
    values = {**project.defaults, **given}
    for key, value in values.items():
        found = project.find(key)
        reported = key in given and value is not None
        if found is None:
            if reported:
                missing.append((key, value, f"unknown setting of {project.name}"))
        elif not found.setting:
            if reported and not _contains(found.ignored, value):
                missing.append((key, value, found.note))
        elif not found.derived and value is not None:
            new = translate_value(found, value)
            settings |= new
            if not new and reported:
                missing.append((key, value, f"{found.setting} has no equivalent value"))
    settings |= project.derive(values)
    for name in [each for each in settings if each not in known and each not in LAUNCH]:
        missing.append((name, settings.pop(name), "not a setting of this version"))
    return Translation(settings, tuple(missing))


def translate_value(found: Counterpart, value: Any) -> Settings:
    """Return our settings for one value; empty if the value has no counterpart."""
    if found.values is None:
        return {found.setting: value}
    if not _contains(found.values, value):
        return {}
    ours = found.values[value]
    return ours if isinstance(ours, dict) else {found.setting: ours}


def parse_value(text: str) -> Any:
    """Return the value of a word of a command line: a literal, a YAML list, or the text itself."""
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if text[:1] in ("[", "{"):
        import yaml  # slow, and rarely needed

        with suppress(yaml.YAMLError):
            return yaml.safe_load(text)
    return text


def _contains(values: Collection[Any], value: Any) -> bool:
    """Return whether a value is among others; lists are unhashable and never are."""
    try:
        return value in values
    except TypeError:
        return False


def value_of(values: Mapping[str, Any], name: str, default: float = 0) -> float:
    """Return a number among settings, or a default if it is missing or not a number."""
    value = values.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else default


def ratio(values: Mapping[str, Any], above: Sequence[str], below: Sequence[str]) -> int:
    """Return prod(above) / prod(below), rounded and at least 1; 0 if a setting is missing or 0."""
    top = math.prod(value_of(values, name) for name in above)
    bottom = math.prod(value_of(values, name) for name in below)
    return max(1, round(top / bottom)) if top and bottom else 0


def critic_of(model: Any, policy: Any) -> Settings:
    """Return the settings of a critic with its own weights, which other trainers use with GAE.

    Args:
        model: Model that the critic starts from; None for the policy's model.
        policy: The policy's model.
    """
    ours: Settings = {"train.critic": "separate"}
    if model and model != policy:
        ours["train.critic_model"] = model
    return ours


def dataset_of(train: Any, test: Any = None) -> str:
    """Return our `dataset` for the files of another trainer: a hub name, a directory or a file.

    `owner/name@train` is a hub name with a split, and `dir/train.x` with `dir/test.x` a directory.
    """
    if isinstance(train, list | tuple) and train:
        train = train[0]
    if isinstance(test, list | tuple) and test:
        test = test[0]
    if not isinstance(train, str) or not train:
        return ""
    name = train.partition("@")[0]
    folder, _, file = name.rpartition("/")
    other_folder, _, other_file = str(test).partition("@")[0].rpartition("/")
    if folder and folder == other_folder and file.startswith("train."):
        return folder if other_file.startswith("test.") else name
    return name


def datasets_of(train: Any, test: Any) -> Settings:
    """Return `dataset`, and `eval_dataset` if the test file belongs to another dataset."""
    dataset = dataset_of(train, test)
    other = dataset_of(test)
    if not dataset:
        return {}
    is_own = not other or other == dataset or other.rpartition("/")[0] == dataset
    return {"dataset": dataset} if is_own else {"dataset": dataset, "eval_dataset": other}


def modules_of(names: Any) -> Settings:
    """Return `train.lora_target_modules` for the modules of a LoRA; "auto" is our default too."""
    text = names if isinstance(names, str) else ",".join(map(str, names or ()))
    return {} if text in ("", "auto") else {"train.lora_target_modules": text}


def trackers_of(loggers: Any) -> str:
    """Return our `log_with` for a list of loggers."""
    ours = ("wandb", "tensorboard", "swanlab", "trackio", "mlflow")
    names = loggers if isinstance(loggers, list | tuple) else [loggers]
    return ",".join(name for name in names if name in ours)
