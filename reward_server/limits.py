"""Limits on requests, queues and memory of the server."""

import os
from dataclasses import dataclass, field
from pathlib import Path

CGROUP_FILES = (
    "/sys/fs/cgroup/memory.max",  # version 2; "max" if there is no limit
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",  # version 1
)


def available_memory() -> int:
    """Return the memory of the machine or, if smaller, of the container, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, CGROUP_FILES):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


@dataclass(frozen=True)
class Limits:
    """Limits of the server; `GET /v1/rewards` returns them."""

    max_images: int = 256  # per request
    max_pixels: int = 4096 * 4096  # per image
    max_body_bytes: int = 64 * 2**20
    max_queue: int = 1024  # images per reward that are queued or being scored
    max_queue_pixels: int = 2**30  # of these images; 4 GiB when decoded
    max_memory_bytes: int = field(default_factory=lambda: available_memory() // 2)
    max_connections: int = 512

    def __post_init__(self) -> None:
        # A request must fit into the queue.
        object.__setattr__(self, "max_images", min(self.max_images, self.max_queue))
