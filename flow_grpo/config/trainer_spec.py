"""Description of a trainer (diffusion or VLM) for the command line, help and config validation."""

import importlib
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.config.config_dicts import check_names_and_types, check_string_keys
from flow_grpo.config.custom import import_class, import_object
from flow_grpo.config.fields import ModelFields, SharedFields
from flow_grpo.config.paths import resolve_path
from flow_grpo.config.settings import (
    build_default_config,
    check_settings,
    field_aliases,
    freeze,
    get_setting,
    iter_settings,
)
from flow_grpo.errors import UserError
from flow_grpo.hub_access import DEFAULT_REVISION

UncheckedConfig = ConfigDict  # as a config file returns it; only validation may read it
# Training scripts, by a setting that only their configs have.
TRAINING_SCRIPTS = {"algorithm": "scripts/train.py", "question_format": "scripts/train_vlm.py"}


class WrongTrainerConfig(UserError):
    """The config belongs to the other training script."""


@dataclass(frozen=True)
class TrainerSpec:
    """Settings of a trainer, and how to validate and describe them.

    Attributes:
        settings: Returns the dataclass of all settings; custom classes can add some.
        first: Settings that the short help lists.
        presets_module: Module with `get_config(preset)`, PRESETS and MODELS.
        marker: A file that every model directory has.
        example: A config with a preset, for messages.
        rewards: Import path of each reward.
        check_rewards: Validates reward names and weights.
        option_names: Returns the options of a reward, given its name and import path; None if any
            are allowed.
        custom: Settings that name custom classes, with the import path of the function that
            registers one.
        preflight_check: Import path of the check of settings and files before anything is loaded.
    """

    settings: Callable[[], type]
    first: tuple[str, ...]
    presets_module: str
    marker: str
    example: str
    rewards: Mapping[str, str]
    check_rewards: Callable[[SharedFields], None]
    option_names: Callable[[str, str], list[str] | None]
    custom: Mapping[str, str] = field(default_factory=dict)
    preflight_check: str = ""

    def get_config(self) -> ConfigDict:
        """Return a config with all settings at their defaults."""
        return build_default_config(self.settings())

    def freeze(self, config: UncheckedConfig | SharedFields) -> Any:
        """Convert a config to frozen settings, without validation."""
        return freeze(self.settings(), config)

    def field_aliases(self) -> dict[str, str]:
        """Return the aliases, mapped to the settings they stand for."""
        return field_aliases(self.settings())

    def algorithms(self) -> tuple[str, ...]:
        """Return the names of the algorithms, each of which has a section."""
        known = dict(iter_settings(self.settings()))
        return known["algorithm"].metadata["choices"] if "algorithm" in known else ()

    @property
    def preset_file(self) -> str:
        """Path of the config file that defines the presets."""
        return self.example.partition(":")[0]

    @property
    def presets(self) -> ModuleType:
        return importlib.import_module(self.presets_module)

    def models(self) -> list[str]:
        """Return the models of the default config and the presets, for suggestions."""
        default = dict(iter_settings(self.settings()))["pretrained.model"].default
        return [default, *self.presets.MODELS]

    def help_texts(self) -> dict[str, str]:
        """Return the help of every setting, by its full name."""
        known = iter_settings(self.settings())
        return {name: each.metadata.get("help", "") for name, each in known}

    def load_custom_classes(self, config: Mapping[str, Any] | ConfigDict) -> bool:
        """Import and register the custom classes that a config names.

        Returns:
            Whether they added settings.
        """
        before = self.settings()
        for setting_name, register in self.custom.items():
            named = config.get(setting_name)
            for name, path in named.items() if isinstance(named, dict | ConfigDict) else ():
                full_name = f"{setting_name}.{name}"
                found = import_class(full_name, str(path))
                import_object(register, full_name, full_name)(full_name, name, found)
        return self.settings() is not before

    def check(self, config: UncheckedConfig | SharedFields) -> Any:
        """Validate a config and return its frozen settings.

        Raises:
            UserError: For the first invalid, unknown or missing setting.
        """
        if isinstance(config, ConfigDict):
            check_string_keys(config)
            self.load_custom_classes(config)
            if script := self.other_script(config):
                raise WrongTrainerConfig(
                    f"this config belongs to {script}; run that script, or use a config such as "
                    f"{self.example}"
                )
            preset = self.example.partition(":")[2]
            example = f"{self.presets_module}.get_config({preset!r})"
            check_names_and_types(config, self.get_config(), example=example)
        settings = self.freeze(config)
        check_settings("", settings)
        _check_run_name(settings.run_name)
        for name in ("run_name", "logdir"):
            _check_folder_name(name, getattr(settings, name))
        if not settings.logdir:
            raise UserError(
                "must name a directory",
                field="logdir",
                value="",
                hint="use '.' for the current directory",
            )
        _check_revision(settings.pretrained)
        for name, other in self.field_aliases().items():
            value, other_value = get_setting(settings, name), get_setting(settings, other)
            if value != other_value:  # possible in a config whose references were resolved
                raise UserError(
                    f"differs from {other}={other_value!r}, of which it is an alias",
                    field=name,
                    value=value,
                    hint="set both to the same value",
                )
        return settings

    def other_script(self, config: Container[str]) -> str:
        """Return the training script that a config is for, or "" if it is this trainer's."""
        known = {each.name for each in fields(self.settings())}
        scripts = (
            s for name, s in TRAINING_SCRIPTS.items() if name in config and name not in known
        )
        return next(scripts, "")


def _check_run_name(name: str) -> None:
    """Reject a run directory outside `logdir`, or `logdir` itself."""
    if name and (os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] in ("..", ".")):
        raise UserError(
            "must name a directory inside logdir",
            field="run_name",
            value=name,
            hint="set --config.logdir to write elsewhere",
        )


def _check_folder_name(name: str, value: str) -> None:
    """Reject names that a shell or a report would display differently."""
    if value != value.strip() or not value.isprintable():
        raise UserError(
            "must not start or end with spaces, or contain control characters",
            field=name,
            value=value,
        )


def _check_revision(pretrained: ModelFields) -> None:
    """Reject a revision of a local directory, which has none."""
    model, revision = resolve_path(pretrained.model), pretrained.revision
    if revision != DEFAULT_REVISION and os.path.exists(model):
        raise UserError(
            f"is incompatible with pretrained.model={pretrained.model!r}, a local directory",
            field="pretrained.revision",
            value=revision,
            hint=f"set it to {DEFAULT_REVISION!r}",
        )
