"""How much the server takes."""

import os
from dataclasses import dataclass, field
from pathlib import Path

CGROUP_FILES = (
    "/sys/fs/cgroup/memory.max",  # version 2; "max" where there is no limit
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",  # version 1
)


def available_memory() -> int:
    """Bytes that this process may use: the machine's, or its container's if that has fewer."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, CGROUP_FILES):
        text = path.read_text().strip() if path.is_file() else ""
        found += [int(text)] if text.isdecimal() else []
    return min(found)


@dataclass(frozen=True)
class Limits:
    max_images: int = 256  # of one request
    max_pixels: int = 4096 * 4096  # of one image
    max_body_bytes: int = 64 * 2**20
    max_queue: int = 1024  # images of one reward that are accepted and not answered yet
    max_queue_pixels: int = 2**30  # and their pixels: 4 GiB when decoded
    max_memory_bytes: int = field(default_factory=lambda: available_memory() // 2)
    max_connections: int = 512

    def __post_init__(self) -> None:
        # One request must not be larger than the queue that it has to go through.
        object.__setattr__(self, "max_images", min(self.max_images, self.max_queue))
