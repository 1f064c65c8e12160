"""Whether torch can compile here, and small functions compiled where it can."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._triton import has_triton

from flow_grpo.errors import first_line

logger = logging.getLogger("flow_grpo")
# Our operators that the compiler may look into, with what it sees. Their gradients stay ours.
OPEN: dict[Any, Callable] = {}


def missing_tool() -> str:
    """What torch.compile would need on a GPU and has not got, or nothing."""
    if not has_triton():
        return "Triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler (gcc or clang)"
    # Debian's own scheme names another folder
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return "" if header.is_file() else f"{header} (python3-dev)"


@cache
def fused(function: Callable) -> Callable:
    """A small function in few kernels, for tensors of any size; as it is where it does not
    compile."""
    if missing_tool():
        return function
    chosen = torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        nonlocal chosen
        try:
            return chosen(*args, **settings)
        except BackendCompilerFailed as error:
            name, why = function.__name__, first_line(error)
            logger.warning("%s is not compiled, and slower: %s", name, why)
            chosen = function
            return function(*args, **settings)

    return call
