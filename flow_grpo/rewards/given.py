"""Rewards as a config names them: "package.module:function", "path/to/file.py:function", or, of a
function that lives in this process only, like one of a notebook, "flow_grpo.rewards.given:NAME"."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flow_grpo.errors import UserError

_GIVEN: dict[str, Callable] = {}


def path_of(function: Callable, name: str) -> str:
    """By which a config can name it: its own, where any process could import it."""
    module, own = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    importable = module not in ("", "__main__", None) and own.isidentifier()
    if importable and getattr(sys.modules.get(module), own, None) is function:
        return f"{module}:{own}"
    _GIVEN[name] = function
    return f"{__name__}:{name}"


def import_scorer(name: str, path: str) -> Any:
    """The function, object or class that a config names by its path."""
    module_name, _, attribute = str(path).rpartition(":")
    if not module_name or not attribute:
        raise UserError(
            f"custom_rewards.{name}={path!r} must read 'package.module:function' or "
            "'path/to/file.py:function'"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a reward module beside one's own config
    try:
        if module_name == __name__:
            scorer = __getattr__(attribute)  # also of one with the name of something here
        elif module_name.endswith(".py"):
            scorer = getattr(_run_file(module_name), attribute)
        else:
            scorer = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError, OSError) as error:
        raise UserError(f"reward {name!r}: cannot import {path!r} ({error})") from error
    if not callable(scorer):
        raise UserError(f"reward {name!r}: {path!r} is a {type(scorer).__name__}, not callable")
    return scorer


def __getattr__(name: str) -> Callable:
    """A function of this process, as an attribute of this module."""
    if name not in _GIVEN:
        raise AttributeError(
            f"no function {name!r} was given in this process; a run that took one goes on where "
            "it is given again"
        )
    return _GIVEN[name]


def _run_file(path: str) -> ModuleType:
    """As a module of its own, so that rewards of two files of one name do not mix."""
    spec = importlib.util.spec_from_file_location(f"reward_file_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
