"""What to say when the GPU's memory is short."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flow_grpo.errors import OutOfMemory


@contextmanager
def advice_when_short(advice: list[str]) -> Iterator[None]:
    """Running out of memory in here is told together with what may help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().split(". ")[0]
        options = f"try {', or '.join(advice)}" if advice else "use fewer or smaller pictures"
        raise OutOfMemory(f"{reason}; {options}; see docs/performance.md") from error
