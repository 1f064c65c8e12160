"""How much the server takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    max_images: int = 256  # of one request
    max_pixels: int = 4096 * 4096  # of one image
    max_body_bytes: int = 64 * 2**20
    max_queue: int = 1024  # images of one reward that are accepted and not answered yet
    max_queue_pixels: int = 2**30  # and their pixels: 3 GB when decoded

    def __post_init__(self) -> None:
        # One request must not be larger than the queue that it has to go through.
        object.__setattr__(self, "max_images", min(self.max_images, self.max_queue))
