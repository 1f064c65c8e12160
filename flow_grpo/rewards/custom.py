"""Custom rewards as a config names them: "package.module:function" or "path/to/file.py:function".

A function that exists only in this process, such as one defined in a notebook, is registered here
and named "flow_grpo.rewards.custom:NAME".
"""

import sys
from collections.abc import Callable
from typing import Any

from flow_grpo.config.custom import import_object
from flow_grpo.errors import UserError

# Renamed modules, so that saved configs with their old paths still resolve.
RENAMED_MODULES = {
    "flow_grpo.rewards.given": __name__,
    "flow_grpo.rewards.answers": "flow_grpo.rewards.text",
    "flow_grpo.rewards.answers.reward_model": "flow_grpo.rewards.text.reward_model",
}
_IN_PROCESS: dict[str, Callable] = {}


def import_path(function: Callable, name: str) -> str:
    """Return an import path of a custom reward for the config, registering the reward if necessary.

    Args:
        function: A reward function or class.
        name: Name to register it under if it exists only in this process, such as in a notebook.
    """
    module = getattr(function, "__module__", "")
    qualified_name = getattr(function, "__qualname__", "")
    importable = module not in ("", "__main__", None) and qualified_name.isidentifier()
    if importable and getattr(sys.modules.get(module), qualified_name, None) is function:
        return f"{module}:{qualified_name}"
    _IN_PROCESS[name] = function
    return f"{__name__}:{name}"


def current_import_path(path: str) -> str:
    """Return an import path with the current name of a module that was renamed."""
    module, _, attribute = str(path).rpartition(":")
    return f"{RENAMED_MODULES[module]}:{attribute}" if module in RENAMED_MODULES else path


def import_scorer(name: str, path: str) -> Any:
    """Return the function, object or class at `path`, the reward called `name`.

    Raises:
        UserError: If the import fails, or the object is not callable.
    """
    path = current_import_path(path)
    module, _, attribute = str(path).rpartition(":")
    reward = f"reward {name!r}"
    if module == __name__ and attribute in _IN_PROCESS:
        scorer = _IN_PROCESS[attribute]  # even if this module has an attribute of that name
    else:
        scorer = import_object(path, f"custom_rewards.{name}", reward, "function")
    if not callable(scorer):
        raise UserError(
            f"must be callable, not {type(scorer).__name__}",
            field=f"custom_rewards.{name}",
            value=path,
        )
    return scorer


def __getattr__(name: str) -> Callable:
    """Return a function that `import_path` registered in this process, as a module attribute."""
    if name not in _IN_PROCESS:
        raise AttributeError(
            f"no function {name!r} is registered in this process; to resume its run, pass the "
            "function again"
        )
    return _IN_PROCESS[name]
