"""Pairwise judges that prefer the brighter image: a chat server's reply and a custom reward."""

import numpy as np
from openai_server import ChatRequest
from PIL import Image

CALLS: list[list[str]] = []  # the prompts of each call of `Brighter`


def mean_brightness(image: Image.Image) -> float:
    return float(np.asarray(image).mean())


def prefer_brighter(request: ChatRequest) -> str:
    """Return the reply of a judge that compares two images."""
    one, two = map(mean_brightness, request.images)
    return f"Look at them.\nBetter: {'tie' if one == two else 1 if one > two else 2}"


class Brighter:
    """Reward of an image: the fraction of the images with its prompt that are darker."""

    compares_groups = True

    def __call__(self, images, prompts, metadata):
        CALLS.append(prompts)
        brightness = [mean_brightness(image) for image in images]
        return [
            np.mean([one > two for two, p in zip(brightness, prompts, strict=True) if p == prompt])
            for one, prompt in zip(brightness, prompts, strict=True)
        ]
