"""Whether torch can compile on this machine, and compilation with a fallback to eager mode."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from flow_grpo.errors import first_line
from flow_grpo.perf.inductor import compiler_errors, has_triton

logger = logging.getLogger("flow_grpo")


def missing_compile_dependency() -> str:
    """Return what `torch.compile` needs on a GPU and is not installed, or ""."""
    if not has_triton():
        return "Triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler (gcc or clang)"
    # the default scheme of Debian names another directory
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return "" if header.is_file() else f"{header} (python3-dev)"


def compile_or_eager(
    function: Callable, *, dynamic: bool | None = True, fullgraph: bool = False
) -> Callable:
    """Compile a function, or return it unchanged if something that the compiler needs is missing.

    If compilation fails at a call, a warning is logged and the original function is used.

    Args:
        function: The function.
        dynamic: Whether one version serves tensors of any size; None: only in those dimensions
            that turn out to vary.
        fullgraph: Whether compilation fails where a part cannot be compiled.
    """
    if missing_compile_dependency():
        return function
    chosen = torch.compile(function, dynamic=dynamic, fullgraph=fullgraph)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        """Call the compiled function, or `function` once compilation has failed."""
        nonlocal chosen
        try:
            return chosen(*args, **options)
        except compiler_errors() as error:
            if chosen is function:
                raise
            logger.warning(
                "%s could not be compiled and will be slower: %s",
                function.__qualname__,
                first_line(error),
            )
            chosen = function
            return function(*args, **options)

    return call


# For functions that are looked up again in every step.
compile_once = cache(compile_or_eager)
