"""A judge of images that fails after some batches, for as long as a file exists."""

import os
from pathlib import Path

import numpy as np

CALLS = []


def brightness(images, prompts, metadata):
    """Return the mean brightness; fail from the third call on while FAILING_JUDGE exists."""
    CALLS.append(len(images))
    if len(CALLS) > 2 and Path(os.environ["FAILING_JUDGE"]).exists():
        raise ValueError("the judge is down")
    return [float(np.asarray(image).mean()) / 255 for image in images]
