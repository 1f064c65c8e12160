"""Whether torch can compile here."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.utils._triton import has_triton


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
    """A small function in few kernels, for tensors of any size; as it is where nothing compiles."""
    return function if missing_tool() else torch.compile(function, dynamic=True)
