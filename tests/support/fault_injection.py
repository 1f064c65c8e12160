"""Run a script that is killed, or receives another signal, at the N-th call of a function.

    python tests/support/fault_injection.py flow_grpo.training.trackers:append_metrics 1 SCRIPT ...
    python tests/support/fault_injection.py MODULE:FUNCTION 1:SIGINT SCRIPT ...

SIGKILL is the default: nothing can be saved after it. If the main thread calls the function, a
checkpoint that is being written in the background is completed first, so that the state of the disk
does not depend on timing.
"""

import functools
import importlib
import itertools
import os
import runpy
import signal
import sys
import threading
from typing import Any

WRITER_THREAD = "checkpoint"  # of flow_grpo.training.checkpoint_writer.BackgroundWriter


def inject_signal(target: str, number: int, signal_number: int = signal.SIGKILL) -> None:
    """`target` is module:function or module:Class.method."""
    module, _, name = target.partition(":")
    *path, last = name.split(".")
    owner: Any = functools.reduce(getattr, path, importlib.import_module(module))
    function, calls = getattr(owner, last), itertools.count(1)

    @functools.wraps(function)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            if threading.current_thread() is threading.main_thread():
                for thread in threading.enumerate():
                    if thread.name == WRITER_THREAD:
                        thread.join()
            os.kill(os.getpid(), signal_number)
        return function(*args, **kwargs)

    setattr(owner, last, interrupted)


if __name__ == "__main__":
    _, target, number, *sys.argv = sys.argv
    number, _, name = number.partition(":")
    inject_signal(target, int(number), signal.Signals[name or "SIGKILL"])
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
