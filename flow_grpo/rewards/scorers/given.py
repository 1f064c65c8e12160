"""Reward functions that live in this process only, like those of a notebook: a config names them
"flow_grpo.rewards.scorers.given:NAME"."""

import sys
from collections.abc import Callable
from typing import Any

_GIVEN: dict[str, Callable] = {}


def path_of(function: Callable, name: str) -> str:
    """By which a config can name it: its own, where any process could import it."""
    module, own = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    importable = module not in ("", "__main__", None) and own.isidentifier()
    if importable and getattr(sys.modules.get(module), own, None) is function:
        return f"{module}:{own}"
    _GIVEN[name] = function
    return f"{__name__}:{name}"


def __getattr__(name: str) -> Any:
    if name in _GIVEN:
        return _GIVEN[name]
    raise AttributeError(
        f"no function {name!r} was given in this process; a run that took one goes on where it is "
        "given again"
    )
