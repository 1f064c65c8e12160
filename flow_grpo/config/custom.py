"""Code of the user's own that a config names: "package.module:NAME" or "path/to/file.py:NAME"."""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from flow_grpo.errors import UserError, first_line, with_nearest_file

# fields that name classes, of which each trade has those that it takes
CUSTOM = ("custom_algorithms", "custom_losses", "custom_models")


def import_named(path: str, field: str, who: str, kind: str = "Class") -> Any:
    """The object that `field` names by its path."""
    module_name, _, attribute = str(path).rpartition(":")
    if not module_name or not attribute:
        raise UserError(
            f"{field}={path!r} must read 'package.module:{kind}' or 'path/to/file.py:{kind}'"
        )
    check_file(path, who)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module beside one's own config
    try:
        if module_name.endswith(".py"):
            return getattr(_run_file(module_name), attribute)
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError, OSError) as error:
        raise UserError(f"{who}: cannot import {path!r} ({error})") from error
    except Exception as error:
        raise UserError(f"{who}: cannot import {path!r} ({_told(error)})") from error


@contextmanager
def told_in_one_line(field: str, own: type) -> Iterator[None]:
    """A mistake in the code of the class that `field` names is told with its line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        file = getattr(sys.modules.get(own.__module__), "__file__", "")
        raise UserError(f"{field} fails when it is tried: {_told(error, file)}") from error


def _told(error: Exception, file: str = "") -> str:
    """What it is and where, in `file` if it passed there."""
    frames = traceback.extract_tb(error.__traceback__)
    place = ([f for f in frames if f.filename == file] or frames)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"{type(error).__name__}: {first_line(error)} ({where})"


def check_file(path: str, who: str) -> None:
    """Refuse a file that is not there; a module is looked for when it is imported."""
    file = str(path).rpartition(":")[0]
    if file.endswith(".py") and not os.path.isfile(file):
        message = f"{who}: cannot import {path!r} (there is no such file)"
        raise UserError(with_nearest_file(message, file, "*.py"))


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
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(
            f"{field}: {found.__name__} lacks {', '.join(lacking)}, which "
            f"{base.__module__}.{base.__name__} asks for"
        )
    for name in (name for name in dir(base) if not name.startswith("_")):
        asked, own = getattr(base, name), getattr(found, name)
        if inspect.isroutine(asked) and own is not asked and not _takes(own, asked):
            raise UserError(
                f"{field}: {found.__name__}.{name} is called as "
                f"{name}({', '.join(inspect.signature(asked).parameters)}); take these arguments"
            )


def _takes(own: Any, asked: Callable) -> bool:
    """Whether it can be called with the arguments that `asked` has."""
    given = inspect.signature(asked).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = {each.name: None for each in given if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(own).bind(*(None for each in given if each.kind in plain), **named)
    except (TypeError, ValueError):  # also of what cannot be called
        return False
    return True


def check_defaults(field: str, settings: Any, known: Collection[str] = ()) -> None:
    """Refuse settings that cannot be fields of a config, but for those that are."""
    if not is_dataclass(settings):
        raise UserError(f"{field}: its Settings must be a dataclass of setting(default, reason)")
    for each in fields(settings):
        if each.name not in known and each.default is each.default_factory is MISSING:
            raise UserError(f"{field}: {each.name} needs a default: setting(default, reason)")
