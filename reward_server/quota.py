"""Quota for the images of one reward, so that overload is rejected before it fills the memory."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from reward_server.errors import RETRY_AFTER, ApiError, ServerBusy
from reward_server.limits import Limits
from reward_server.memory import Lease, MemoryBudget


class ClientDisconnected(Exception):
    """The client of this request has disconnected."""


class ImageQuota:
    """Count images and pixels that are queued or being scored, up to the limits."""

    def __init__(self, limits: Limits, memory: MemoryBudget, bytes_per_pixel: int) -> None:
        self.images = 0
        self.memory = memory
        self.bytes_per_pixel = bytes_per_pixel  # while an image is queued or being scored
        self._pixels = 0
        self._limits = limits
        self._lock = threading.Lock()

    def acquire(self, images: int) -> "Reservation":
        """Reserve quota for the images of a request, or raise `ServerBusy`."""
        limit = self._limits.max_queue
        with self._lock:
            if self.images + images > limit:
                raise ServerBusy(
                    "queue_full",
                    f"{self.images} images are queued, {images} more would exceed the limit of "
                    f"{limit}; try again later",
                    RETRY_AFTER,
                )
            self.images += images
        return Reservation(self, images)

    def acquire_pixels(self, reservation: "Reservation", pixels: int) -> None:
        """Add the pixels of its images to a reservation, or raise `ApiError`."""
        limit = self._limits.max_queue_pixels
        if pixels > limit:
            raise ApiError(
                "too_many_pixels",
                f"the images have {pixels} pixels in total, at most {limit} are allowed; send "
                "fewer per request",
            )
        with self._lock:
            if self._pixels + pixels > limit:
                raise ServerBusy(
                    "queue_full",
                    f"images of {self._pixels} pixels are queued, {pixels} more would exceed the "
                    f"limit of {limit}; try again later",
                    RETRY_AFTER,
                )
            if not reservation.released:
                self._pixels += pixels
                reservation.pixels += pixels

    def release(self, reservation: "Reservation") -> None:
        """Give back the images and pixels of a reservation."""
        with self._lock:
            self.images -= reservation.images
            self._pixels -= reservation.pixels


class Reservation:
    """The quota of one request, returned at the end of the `with` block.

    Memory is freed by its last user, which may be a thread that still decodes or scores for a
    client that has disconnected.
    """

    def __init__(self, quota: ImageQuota, images: int) -> None:
        self._quota = quota
        self._lease: Lease | None = None
        self._lock = threading.Lock()
        self.images = images
        self.pixels = 0
        self.released = False

    @contextlib.contextmanager
    def reserve_memory(self, pixels: int, decoder_bytes: int) -> Iterator[Callable[[], None]]:
        """Reserve memory in the decoding thread; yields a check for a disconnected client."""
        self._quota.acquire_pixels(self, pixels)
        lease = self._quota.memory.lease(
            pixels * self._quota.bytes_per_pixel, scratch_bytes=decoder_bytes
        )
        kept = False
        try:
            yield self._check_connected
            with self._lock:
                if not self.released:
                    self._lease, kept = lease, True
        finally:
            lease.release_scratch()
            if not kept:
                lease.release()

    def keep_memory_until_done(self, users: "Iterable[Future]") -> None:
        """Keep the memory reserved until these futures are done, even if the request ends."""
        for user in users:
            self._lease.acquire()
            user.add_done_callback(lambda _, lease=self._lease: lease.release())

    def _check_connected(self) -> None:
        if self.released:
            raise ClientDisconnected

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        """Return the quota, and release the memory unless scoring still uses it."""
        with self._lock:
            self.released = True
        self._quota.release(self)
        if self._lease is not None:
            self._lease.release()
