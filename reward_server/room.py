"""Room for the images of one reward, so that a flood is turned away before it fills the memory."""

import threading
from types import TracebackType

from reward_server.errors import ApiError, Busy
from reward_server.limits import Limits

RETRY_AFTER = 1  # seconds: the queue moves on all the time


class Room:
    """Counts the images, and their pixels, that are accepted and not answered yet."""

    def __init__(self, limits: Limits) -> None:
        self.images = 0
        self._pixels = 0
        self._limits = limits
        self._lock = threading.Lock()

    def hold(self, images: int) -> "Place":
        limit = self._limits.max_queue
        with self._lock:
            if self.images + images > limit:
                raise Busy(
                    "queue_full",
                    f"{self.images} images are waiting, {images} more would exceed the queue of "
                    f"{limit}; try again later",
                    RETRY_AFTER,
                )
            self.images += images
        return Place(self, images)

    def take_pixels(self, place: "Place", pixels: int) -> None:
        limit = self._limits.max_queue_pixels
        if pixels > limit:
            raise ApiError(
                "too_many_pixels",
                f"the images have {pixels} pixels together, at most {limit} are allowed; "
                "send fewer in one request",
            )
        with self._lock:
            if self._pixels + pixels > limit:
                raise Busy(
                    "queue_full",
                    f"images of {self._pixels} pixels are waiting, {pixels} more would exceed "
                    f"{limit}; try again later",
                    RETRY_AFTER,
                )
            if not place.left:
                self._pixels += pixels
                place.pixels += pixels

    def leave(self, place: "Place") -> None:
        with self._lock:
            place.left = True
            self.images -= place.images
            self._pixels -= place.pixels


class Place:
    """What one request takes up, until the end of the `with`."""

    def __init__(self, room: Room, images: int) -> None:
        self._room = room
        self.images = images
        self.pixels = 0
        self.left = False

    def claim_pixels(self, pixels: int) -> None:
        """From the thread that decodes, which may come after the client has gone."""
        self._room.take_pixels(self, pixels)

    def __enter__(self) -> "Place":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._room.leave(self)
