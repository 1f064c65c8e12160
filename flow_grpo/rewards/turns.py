"""Rewards that share a GPU by turns, because their networks do not fit on it together."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TURNS = "turns"  # value of the option `offload`
_turn = threading.Lock()


@contextmanager
def device_turn(scorer: Any) -> Iterator[None]:
    """Wait until no other reward with offload="turns" scores; then move its network to the CPU.

    Args:
        scorer: The reward that is called in the context. With another value of `offload`, or
            without that option, it does not wait.
    """
    if getattr(scorer, "offload", None) != TURNS:
        yield
        return
    with _turn:
        try:
            yield
        finally:
            scorer.release_memory()
