"""Let rewards take turns on a GPU on which their networks do not fit together."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TURNS = "turns"  # value of the option `offload`
_turn = threading.RLock()  # reentrant: callers may take the turn before the call


@contextmanager
def device_turn(scorer: Any, timeout: float = math.inf) -> Iterator[None]:
    """Wait until no other reward with offload="turns" scores; then move its network to the CPU.

    Args:
        scorer: The reward that is called in the context. With another value of `offload`, or
            without that option, it does not wait.
        timeout: Seconds to wait.

    Raises:
        TimeoutError: Another reward, which may hang, did not end its turn in time.
    """
    if getattr(scorer, "offload", None) != TURNS:
        yield
        return
    if not _turn.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
        raise TimeoutError(f"another reward with offload={TURNS!r} took more than {timeout:g} s")
    try:
        yield
    finally:
        try:
            scorer.release_memory()
        finally:
            _turn.release()
