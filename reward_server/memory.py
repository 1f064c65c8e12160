"""Memory budget for decoded images, shared by all rewards."""

import ctypes
import threading

from reward_server.errors import RETRY_AFTER, ApiError, ServerBusy

MEMORY_WAIT_SECONDS = 1.0  # how long a request waits for others to free memory
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of glibc's malloc.h
LARGE_BLOCK_BYTES = 8 * 2**20


class MemoryBudget:
    """Limits the bytes that leases reserve at the same time."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._freed = threading.Condition()

    def lease(self, size: int, *, scratch_bytes: int = 0) -> "Lease":
        """Reserve memory, waiting up to `MEMORY_WAIT_SECONDS` for it.

        It blocks, so it must not be called in the event loop or by the holder of another lease.

        Args:
            size: Bytes until `Lease.release`.
            scratch_bytes: Additional bytes until `Lease.release_scratch`.
        """
        wanted = size + scratch_bytes
        if wanted > self._total:
            raise ApiError(
                "too_many_pixels",
                f"decoding the images takes {wanted} bytes, at most {self._total} are allowed; "
                "send fewer or smaller ones per request, or raise --max-memory-mb of the server",
            )
        with self._freed:
            fits = self._freed.wait_for(
                lambda: self._used + wanted <= self._total, MEMORY_WAIT_SECONDS
            )
            if not fits:
                raise ServerBusy(
                    "queue_full",
                    f"images of {self._used} bytes are in memory, {wanted} more would exceed "
                    f"{self._total}; try again later",
                    RETRY_AFTER,
                )
            self._used += wanted
        return Lease(self, size, scratch_bytes)

    def free(self, size: int) -> None:
        """Give back reserved bytes, and wake up requests that wait for them."""
        with self._freed:
            self._used -= size
            self._freed.notify_all()


class Lease:
    """Reference-counted memory: the last holder to release it frees it."""

    def __init__(self, memory: MemoryBudget, size: int, scratch_bytes: int) -> None:
        self._memory = memory
        self._size = size
        self._scratch_bytes = scratch_bytes
        self._holders = 1
        self._lock = threading.Lock()

    def release_scratch(self) -> None:
        """Free the memory that only decoding needed."""
        self._memory.free(self._scratch_bytes)
        self._scratch_bytes = 0

    def acquire(self) -> None:
        """Add a holder."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Remove a holder; free the memory if it was the last."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._memory.free(self._size)


def configure_malloc_trim() -> None:
    """Make malloc return the memory of large images to the system as soon as they are freed.

    By default glibc keeps freed blocks of up to 32 MiB, in every thread that decodes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc and some others
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        # the ratio of glibc's dynamic thresholds, which the call above disables
        mallopt(TRIM_THRESHOLD, 2 * LARGE_BLOCK_BYTES)
