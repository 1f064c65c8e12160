"""Rewards as a config names them: "package.module:function", "path/to/file.py:function", or, of a
function that lives in this process only, like one of a notebook, "flow_grpo.rewards.given:NAME"."""

import sys
from collections.abc import Callable
from typing import Any

from flow_grpo.config.custom import import_named
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
    who, own = f"reward {name!r}", str(path).removeprefix(f"{__name__}:")
    if own in _GIVEN and own != path:
        scorer = _GIVEN[own]  # also one with the name of something here
    else:
        scorer = import_named(path, f"custom_rewards.{name}", who, "function")
    if not callable(scorer):
        raise UserError(f"{who}: {path!r} is a {type(scorer).__name__}, not callable")
    return scorer


def __getattr__(name: str) -> Callable:
    """A function of this process, as an attribute of this module."""
    if name not in _GIVEN:
        raise AttributeError(
            f"no function {name!r} was given in this process; a run that took one goes on where "
            "it is given again"
        )
    return _GIVEN[name]
