"""Bytes for pictures, shared by all rewards: a request waits for its part, or is turned away."""

import ctypes
import threading

from reward_server.errors import RETRY_AFTER, ApiError, Busy

PATIENCE = 1.0  # seconds that a request waits for others to free their part
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # M_... of glibc's malloc.h
LARGE = 8 * 2**20


class Memory:
    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0
        self._freed = threading.Condition()

    def lease(self, size: int, *, at_first: int = 0) -> "Lease":
        """`size` bytes, and `at_first` more until `Lease.settle`. It may wait: not for the event
        loop, and not for who holds a lease already."""
        wanted = size + at_first
        if wanted > self._total:
            raise ApiError(
                "too_many_pixels",
                f"the images take {wanted} bytes to decode, at most {self._total} are allowed; "
                "send fewer or smaller ones in one request, or start the server with more "
                "--max-memory-mb",
            )
        with self._freed:
            if not self._freed.wait_for(lambda: self._taken + wanted <= self._total, PATIENCE):
                raise Busy(
                    "queue_full",
                    f"images of {self._taken} bytes are in memory, {wanted} more would exceed "
                    f"{self._total}; try again later",
                    RETRY_AFTER,
                )
            self._taken += wanted
        return Lease(self, size, at_first)

    def free(self, size: int) -> None:
        with self._freed:
            self._taken -= size
            self._freed.notify_all()


class Lease:
    """Memory with one or more holders; the last to let go frees it."""

    def __init__(self, memory: Memory, size: int, at_first: int) -> None:
        self._memory = memory
        self._size = size
        self._at_first = at_first
        self._holders = 1
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Free what was needed at first only."""
        self._memory.free(self._at_first)
        self._at_first = 0

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._memory.free(self._size)


def return_large_blocks() -> None:
    """Make malloc give the memory of a large picture back to the system as soon as it is freed.

    By itself glibc keeps blocks of up to 32 MiB for later, in every thread that decodes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc and some others
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE)
        mallopt(TRIM_THRESHOLD, 2 * LARGE)  # glibc's own rule, which ends with the line above
