"""Judges that like bright pictures, for tests of rewards that compare: what a server answers that
is asked about two pictures, and a reward of one's own."""

import numpy as np
from openai_server import Question
from PIL import Image

CALLS: list[list[str]] = []  # the prompts of each call of `Brighter`


def light(image: Image.Image) -> float:
    return float(np.asarray(image).mean())


def brighter(question: Question) -> str:
    one, two = map(light, question.images)
    return f"Look at them.\nBetter: {'tie' if one == two else 1 if one > two else 2}"


class Brighter:
    """Share of the pictures of its prompt, itself among them, that a picture is brighter than."""

    compares_groups = True

    def __call__(self, images, prompts, metadata):
        CALLS.append(prompts)
        lights = [light(image) for image in images]
        return [
            np.mean([one > two for two, p in zip(lights, prompts, strict=True) if p == prompt])
            for one, prompt in zip(lights, prompts, strict=True)
        ]
