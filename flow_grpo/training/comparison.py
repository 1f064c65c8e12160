"""Whether one model scores higher than another on the same prompts."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Of two means over the prompts that both models were scored on."""

    mean: float
    standard_error: float  # NaN for fewer than two prompts
    prompts: int


def paired_difference(scores: np.ndarray, reference: np.ndarray) -> Difference:
    """How much higher `scores` are, prompt by prompt; NaN marks a score that failed.

    Prompts differ more from one another than models do on the same prompt: the spread of the
    differences says how certain the mean of them is, the spread of the scores does not.
    """
    both = np.isfinite(scores) & np.isfinite(reference)
    higher = scores[both] - reference[both]
    count = len(higher)
    return Difference(
        mean=float(higher.mean()) if count else math.nan,
        standard_error=float(higher.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan,
        prompts=count,
    )
