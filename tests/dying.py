"""Runs a script that is killed (SIGKILL, from which nothing can be saved), or gets another signal,
as it calls a function for the N-th time.

    python tests/dying.py flow_grpo.run.checkpoint:_finish 1 SCRIPT ARGUMENTS
    python tests/dying.py flow_grpo.run.session:write_at_end 1:SIGINT SCRIPT ARGUMENTS
"""

import functools
import importlib
import itertools
import os
import runpy
import signal
import sys
from typing import Any


def arm(target: str, number: int, deadly_signal: int = signal.SIGKILL) -> None:
    """`target` is module:function or module:Class.method."""
    module, _, name = target.partition(":")
    *path, last = name.split(".")
    owner: Any = functools.reduce(getattr, path, importlib.import_module(module))
    function, calls = getattr(owner, last), itertools.count(1)

    @functools.wraps(function)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), deadly_signal)
        return function(*args, **kwargs)

    setattr(owner, last, deadly)


if __name__ == "__main__":
    _, target, number, *sys.argv = sys.argv
    number, _, name = number.partition(":")
    arm(target, int(number), signal.Signals[name or "SIGKILL"])
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
