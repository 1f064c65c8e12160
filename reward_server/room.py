"""Room for the images of one reward, so that a flood is turned away before it fills the memory."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType

from reward_server.errors import RETRY_AFTER, ApiError, Busy
from reward_server.limits import Limits
from reward_server.memory import Lease, Memory


class ClientGone(Exception):
    """Nobody waits for this request any more."""


class Room:
    """Counts the images, and their pixels, that are accepted and not answered yet."""

    def __init__(self, limits: Limits, memory: Memory, bytes_per_pixel: int) -> None:
        self.images = 0
        self.memory = memory
        self.bytes_per_pixel = bytes_per_pixel  # of a picture that waits or is being scored
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
            self.images -= place.images
            self._pixels -= place.pixels


class Place:
    """What one request takes up, until the end of the `with`; memory is freed with its last user,
    which may be a thread that decodes or scores for a client that has gone."""

    def __init__(self, room: Room, images: int) -> None:
        self._room = room
        self._lease: Lease | None = None
        self._lock = threading.Lock()
        self.images = images
        self.pixels = 0
        self.left = False

    @contextlib.contextmanager
    def claim(self, pixels: int, at_work: int) -> Iterator[Callable[[], None]]:
        """From the thread that decodes, which may come after the client has gone."""
        self._room.take_pixels(self, pixels)
        lease = self._room.memory.lease(pixels * self._room.bytes_per_pixel, at_first=at_work)
        kept = False
        try:
            yield self._check_wanted
            with self._lock:
                if not self.left:
                    self._lease, kept = lease, True
        finally:
            lease.settle()
            if not kept:
                lease.let_go()

    def used_by(self, users: "Iterable[Future]") -> None:
        """The pictures are in memory until these are done, also when the request has ended."""
        for user in users:
            self._lease.hold()
            user.add_done_callback(lambda _, lease=self._lease: lease.let_go())

    def _check_wanted(self) -> None:
        if self.left:
            raise ClientGone

    def __enter__(self) -> "Place":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self.left = True
        self._room.leave(self)
        if self._lease is not None:
            self._lease.let_go()
