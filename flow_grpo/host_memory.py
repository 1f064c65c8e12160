"""Memory of the machine or, if that is less, of the container that the process runs in."""

import os
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")


class CgroupFiles(NamedTuple):
    """The files that describe the memory of a container, under `CGROUPS`."""

    limit: str
    usage: str
    statistics: str
    page_cache: tuple[str, str]  # statistics of the part of the usage that the kernel can free


VERSIONS = (
    CgroupFiles(  # version 2; the limit is "max" if there is none
        "memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")
    ),
    CgroupFiles(  # version 1; the limit is a huge number if there is none
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
)


def memory_limit() -> int:
    """Return the memory in bytes, used or not."""
    limits = (_read_number(files.limit) for files in VERSIONS)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit in limits if limit is not None)])


def available_memory() -> int:
    """Return the memory in bytes that can be allocated without swapping or an OOM kill."""
    import psutil

    available = [psutil.virtual_memory().available]
    for files in VERSIONS:
        limit, usage = _read_number(files.limit), _read_number(files.usage)
        if limit is not None and usage is not None:
            available.append(max(0, limit - usage + _page_cache(files)))
    return min(available)


def _page_cache(files: CgroupFiles) -> int:
    """Return the bytes of files that are cached and counted as used."""
    lines = (line.partition(" ") for line in _read(files.statistics).splitlines())
    return sum(int(value) for name, _, value in lines if name in files.page_cache)


def _read_number(name: str) -> int | None:
    text = _read(name).strip()
    return int(text) if text.isdecimal() else None


def _read(name: str) -> str:
    """Return the content of a file, or "" if it cannot be read."""
    try:
        return (CGROUPS / name).read_text()
    except OSError:
        return ""
