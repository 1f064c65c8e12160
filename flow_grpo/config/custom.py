"""Import custom code named in a config: "package.module:NAME" or "path/to/file.py:NAME"."""

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

from flow_grpo.config.renamed_members import check_renamed_members
from flow_grpo.errors import UserError, did_you_mean_file, first_line

# Settings that name custom classes; each trainer has some of them.
CUSTOM_CLASS_FIELDS = ("custom_algorithms", "custom_losses", "custom_models")


def import_object(path: str, field: str, who: str, kind: str = "Class") -> Any:
    """Import the object at `path`.

    Args:
        path: "package.module:NAME" or "path/to/file.py:NAME".
        field: Setting that holds the path, for messages.
        who: What needs the object, for messages.
        kind: Placeholder for NAME in messages.

    Raises:
        UserError: If the path is malformed or the import fails.
    """
    module_name, _, attribute = str(path).rpartition(":")
    if not module_name or not attribute:
        raise UserError(
            f"must have the form 'package.module:{kind}' or 'path/to/file.py:{kind}'",
            field=field,
            value=path,
        )
    check_file_exists(path, who)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for modules in the current directory
    try:
        if module_name.endswith(".py"):
            return getattr(_import_file(module_name), attribute)
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError, OSError) as error:
        raise UserError(f"{who}: cannot import {path!r} ({error})") from error
    except Exception as error:
        raise UserError(f"{who}: cannot import {path!r} ({_describe_error(error)})") from error


@contextmanager
def as_user_error(field: str, own: type) -> Iterator[None]:
    """Convert an exception in custom code to a UserError that names its line.

    Args:
        field: Setting that names the class.
        own: The custom class.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        file = getattr(sys.modules.get(own.__module__), "__file__", "")
        raise UserError(
            f"fails in a test call: {_describe_error(error, file)}", field=field
        ) from error


def _describe_error(error: Exception, file: str = "") -> str:
    """Return type, message and line of an exception; the line is in `file` if it passed there."""
    frames = traceback.extract_tb(error.__traceback__)
    place = ([f for f in frames if f.filename == file] or frames)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"{type(error).__name__}: {first_line(error)} ({where})"


def check_file_exists(path: str, who: str) -> None:
    """Reject a path to a missing file; a missing module is reported on import."""
    file = str(path).rpartition(":")[0]
    if file.endswith(".py") and not os.path.isfile(file):
        raise UserError(
            f"{who}: cannot import {path!r} (no such file)", hint=did_you_mean_file(file, "*.py")
        )


@cache  # importing a file twice would make two classes
def import_class(field: str, path: str) -> Any:
    """Import the class at `path` (module.name or file.py:Name); `field` is named in errors."""
    return import_object(path, field, field)


def _import_file(path: str) -> ModuleType:
    """Import a file as a separate module, even if another module has its name."""
    spec = importlib.util.spec_from_file_location(f"own_file_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve their types there
    spec.loader.exec_module(module)
    return module


def check_class(field: str, found: Any, base: type, **has: Any) -> None:
    """Check that an imported object implements the interface of `base`.

    Args:
        field: Setting that names it, for messages.
        found: The imported object.
        base: Class that it has to subclass.
        **has: Attributes that it must have, with their values.

    Raises:
        UserError: If it is not a subclass, is abstract, or a method has other arguments.
    """
    if not isinstance(found, type) or not issubclass(found, base):
        raise UserError(f"must name a subclass of {base.__module__}.{base.__name__}", field=field)
    check_renamed_members(field, found, base)
    for name, value in has.items():
        actual = getattr(found, name, None)
        if actual != value:
            raise UserError(
                f"names a class with {name}={actual!r}", field=field, hint=f"set it to {value!r}"
            )
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(
            f"names {found.__name__}, which does not implement {', '.join(lacking)} of "
            f"{base.__module__}.{base.__name__}",
            field=field,
        )
    for name in (name for name in dir(base) if not name.startswith("_")):
        expected, actual = getattr(base, name), getattr(found, name)
        overridden = inspect.isroutine(expected) and actual is not expected
        if overridden and not _accepts_arguments_of(actual, expected):
            raise UserError(
                f"has an incompatible method {found.__name__}.{name}, which is called as "
                f"{name}({', '.join(inspect.signature(expected).parameters)})",
                field=field,
            )


def _accepts_arguments_of(actual: Any, expected: Callable) -> bool:
    """Return whether `actual` can be called with the arguments of `expected`."""
    given = inspect.signature(expected).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = {each.name: None for each in given if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(actual).bind(*(None for each in given if each.kind in plain), **named)
    except (TypeError, ValueError):  # also if it is not callable
        return False
    return True


def check_settings_class(field: str, settings: Any, known: Collection[str] = ()) -> None:
    """Check that `settings` is a dataclass whose fields, except those in `known`, have defaults."""
    if not is_dataclass(settings):
        raise UserError(
            "needs Settings that are a dataclass of setting(default, help)", field=field
        )
    for each in fields(settings):
        if each.name not in known and each.default is each.default_factory is MISSING:
            raise UserError(
                f"needs a default for its setting {each.name}",
                field=field,
                hint="declare it as setting(default, help)",
            )
