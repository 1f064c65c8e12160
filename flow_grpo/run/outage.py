"""When so many scores are missing that an epoch should not be trained on."""

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from flow_grpo.rewards import WeightedReward


def describe_outage(
    accelerator: Accelerator,
    reward: WeightedReward,
    scores: dict[str, np.ndarray],  # gathered: the same on all processes
    limit: float,
) -> str | None:
    """Which reward failed for more than a share `limit` of the samples, and why; None if none did.

    Call it on all processes: the error may have happened on any.
    """
    for name in reward.weights:
        failed = np.isnan(scores[name])
        if failed.mean() > limit or failed.all():
            errors = gather_object([reward.last_errors.get(name, "")])
            last = next((error for error in errors if error), "none recorded")
            return (
                f"reward {name!r} gave no score for {failed.sum()} of {len(failed)} {reward.kind}s "
                f"(max_failed_fraction={limit:g}); last error: {last}"
            )
    reward.forget_errors()
    return None
