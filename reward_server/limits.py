"""Limits on requests, queues and memory of the server."""

from dataclasses import dataclass, field

from flow_grpo.host_memory import memory_limit


@dataclass(frozen=True)
class Limits:
    """Limits of the server; `GET /v1/rewards` returns them."""

    max_images: int = 256  # per request
    max_pixels: int = 4096 * 4096  # per image
    max_body_bytes: int = 64 * 2**20
    max_queue: int = 1024  # images per reward that are queued or being scored
    max_queue_pixels: int = 2**30  # of these images; 4 GiB when decoded
    max_memory_bytes: int = field(default_factory=lambda: memory_limit() // 2)
    max_connections: int = 512

    def __post_init__(self) -> None:
        # A request must fit into the queue.
        object.__setattr__(self, "max_images", min(self.max_images, self.max_queue))
