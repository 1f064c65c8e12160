"""What to do when the GPU's memory is short."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flow_grpo.errors import OutOfMemory
from flow_grpo.plan import BatchPlan


@contextmanager
def advice_when_short(plan: BatchPlan) -> Iterator[None]:
    """Running out of memory in here is told together with settings that need less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        advice = ["--config.train.gradient_checkpointing=True", "--config.offload_idle=True"]
        if smaller := plan.in_smaller_batches():
            advice = [f"{plan.options_for(smaller)} (the same epoch, smaller batches)", *advice]
        reason = str(error).strip().split(". ")[0]
        raise OutOfMemory(
            f"{reason}; try {', or '.join(advice)}; see docs/performance.md"
        ) from error
