"""A reward for runs that should be equal: a pixel that is rounded the other way hardly moves it,
whereas it can add a byte to a JPEG file."""

import numpy as np

LIGHT = {"reward_fn": "{'light': 1.0}", "custom_rewards": "{'light': 'light:score'}"}
# no KL, and no gradient for some groups
FLAT_FOR_SOME = {
    "reward_fn": "{'flat': 1.0}",
    "custom_rewards": "{'flat': 'light:flat_for_some'}",
    "train__beta": 0.0,
}


def score(images, prompts, metadata):
    """How far each is from black, or from its source."""
    sources = [np.asarray(own.get("source", 0), float) for own in metadata]
    pairs = zip(images, sources, strict=True)
    return [float(np.abs(np.asarray(image) - source).mean()) / 255 for image, source in pairs]


def flat_for_some(images, prompts, metadata):
    scores = score(images, prompts, metadata)
    numbers = [int(prompt.split()[-1]) for prompt in prompts]
    return [0.0 if n % 3 else s for n, s in zip(numbers, scores, strict=True)]
