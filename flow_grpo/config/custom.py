"""Code of the user's own that a config names: "package.module:NAME" or "path/to/file.py:NAME"."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flow_grpo.errors import UserError, with_nearest_file

# fields that name classes, of which each trade has those that it takes
CUSTOM = ("custom_algorithms", "custom_losses", "custom_models")


def import_named(path: str, field: str, who: str, kind: str = "Class") -> Any:
    """The object that `field` names by its path."""
    module_name, _, attribute = str(path).rpartition(":")
    if not module_name or not attribute:
        raise UserError(
            f"{field}={path!r} must read 'package.module:{kind}' or 'path/to/file.py:{kind}'"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module beside one's own config
    try:
        if module_name.endswith(".py"):
            return getattr(_run_file(module_name), attribute)
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError, OSError) as error:
        message = f"{who}: cannot import {path!r} ({error})"
        if isinstance(error, FileNotFoundError):
            message = with_nearest_file(message, module_name, "*.py")
        raise UserError(message) from error


@cache  # a class is registered as it is made
def import_class(field: str, path: str) -> Any:
    return import_named(path, field, field)


def _run_file(path: str) -> ModuleType:
    """As a module of its own, so that two files of one name do not mix."""
    spec = importlib.util.spec_from_file_location(f"own_file_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for what its types are
    spec.loader.exec_module(module)
    return module


def check_class(field: str, found: Any, base: type, **has: Any) -> None:
    """Refuse what is no subclass of `base`, or has not these attributes."""
    if not isinstance(found, type) or not issubclass(found, base):
        raise UserError(f"{field} must name a subclass of {base.__module__}.{base.__name__}")
    for name, value in has.items():
        own = getattr(found, name, None)
        if own != value:
            raise UserError(f"{field} names a class with {name}={own!r}; make it {value!r}")


def check_defaults(field: str, settings: Any, known: Collection[str] = ()) -> None:
    """Refuse settings that cannot be fields of a config, but for those that are."""
    if not is_dataclass(settings):
        raise UserError(f"{field}: its Settings must be a dataclass of setting(default, reason)")
    for each in fields(settings):
        if each.name not in known and each.default is each.default_factory is MISSING:
            raise UserError(f"{field}: {each.name} needs a default: setting(default, reason)")
