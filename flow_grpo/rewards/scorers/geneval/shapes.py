"""Finds flat shapes of plain colours on a grey ground, as the small model draws them."""

from collections.abc import Sequence

import cv2
import numpy as np
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.scorers.geneval.rules import RGB, SHAPES, Detection, Task

SMUDGE = "smudge"  # a coloured patch that is no shape
GREY = 0.25  # what has less colour than this, as the distance of its channels, is ground
LARGE, SCALE = 256, 4  # smaller pictures are looked at so much larger: edges are a pixel wide
SMALLEST = 0.01  # share of the picture that a shape covers
LIKE = 0.8  # overlap over union with the shape it is taken for
LONGEST = 1.6  # of its two sides, one to the other


class Shapes:
    def rest(self) -> None:
        """Nothing of it is on a GPU."""

    def check(self, task: Task) -> None:
        for wanted in task.wanted:
            if wanted.name not in SHAPES or wanted.colour not in (None, *RGB):
                known = f"{', '.join(SHAPES)} in {', '.join(RGB)}"
                raise UserError(f"{wanted.colour or ''} {wanted.name}: the detector knows {known}")

    def __call__(
        self, images: Sequence[Image.Image], tasks: Sequence[Task]
    ) -> list[list[Detection]]:
        return [detect(image) for image in images]


def detect(image: Image.Image) -> list[Detection]:
    """Shapes with their colours; `score` is how well the shape is drawn."""
    scale = SCALE if max(image.size) < LARGE else 1
    size = scale * image.width, scale * image.height
    image = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32) / 255
    red, green, blue = np.moveaxis(pixels, 2, 0)
    highest, lowest = (
        np.maximum(np.maximum(red, green), blue),
        np.minimum(np.minimum(red, green), blue),
    )
    coloured = highest - lowest > GREY
    palette = np.array(list(RGB.values()), dtype=np.float32)
    alike = _hues(pixels[coloured]) @ _hues(palette).T  # (coloured pixels, colours)
    label = np.full(coloured.shape, -1)
    label[coloured] = alike.argmax(axis=1)
    found = []
    for number, colour in enumerate(RGB):
        found += _of_colour(label == number, colour, scale)
    return found


def _hues(colours: np.ndarray) -> np.ndarray:
    """What is left of colours without their brightness and strength, of length 1."""
    flat = colours - colours.mean(axis=-1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=-1, keepdims=True), 1e-6)


def _of_colour(mask: np.ndarray, colour: str, scale: int) -> list[Detection]:
    found = []
    number, parts, boxes, _ = cv2.connectedComponentsWithStats(
        mask.astype(np.uint8), connectivity=4
    )
    for part in range(1, number):  # 0 is all the rest
        left, top, width, height, area = boxes[part].tolist()
        if area < SMALLEST * mask.size:
            continue
        own = parts[top : top + height, left : left + width] == part
        alike = {name: _overlap(own, _drawn(name, width, height)) for name in SHAPES}
        name = max(alike, key=alike.get)
        if alike[name] < LIKE or max(width, height) > LONGEST * min(width, height):
            name = SMUDGE
        edges = (left, top, left + width, top + height)
        box = tuple(edge / scale for edge in edges)  # in the picture's own pixels
        found.append(Detection(name, alike.get(name, 1.0), box, colour))
    return found


def _drawn(name: str, width: int, height: int) -> np.ndarray:
    """The shape that fills a box."""
    y, x = np.mgrid[0.5:height, 0.5:width]
    across, down = x / width - 0.5, y / height  # from the middle, from the top
    if name == "square":
        return np.ones((height, width), dtype=bool)
    if name == "circle":
        return across**2 + (down - 0.5) ** 2 <= 0.25
    return np.abs(across) <= down / 2


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())
