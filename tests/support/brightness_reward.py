"""A smooth reward for tests that compare runs.

If a pixel is rounded differently, this reward hardly changes, whereas the size of a JPEG file can
change by a byte.
"""

import numpy as np

BRIGHTNESS_REWARD = {
    "reward_fn": "{'light': 1.0}",
    "custom_rewards": "{'light': 'brightness_reward:score'}",
}
# without a KL term, constant groups have no gradient
CONSTANT_FOR_SOME_GROUPS = {
    "reward_fn": "{'flat': 1.0}",
    "custom_rewards": "{'flat': 'brightness_reward:constant_for_some_groups'}",
    "train__beta": 0.0,
}


def score(images, prompts, metadata):
    """Return the mean absolute difference of each image from its source, or from black."""
    sources = [np.asarray(row.get("source", 0), float) for row in metadata]
    pairs = zip(images, sources, strict=True)
    return [float(np.abs(np.asarray(image) - source).mean()) / 255 for image, source in pairs]


def constant_for_some_groups(images, prompts, metadata):
    """Return `score` for every third prompt and 0 for the others."""
    scores = score(images, prompts, metadata)
    numbers = [int(prompt.split()[-1]) for prompt in prompts]
    return [0.0 if n % 3 else s for n, s in zip(numbers, scores, strict=True)]
