"""Detects flat shapes of one color on a grey background, as the tiny models generate them."""

from collections.abc import Sequence

import cv2
import numpy as np
from PIL import Image

from flow_grpo.rewards.option_checks import check_choice
from flow_grpo.rewards.scorers.geneval.rules import RGB, SHAPES, Detection, Task

UNKNOWN_SHAPE = "smudge"  # a colored region of another shape
MIN_CHROMA = 0.25  # largest minus smallest channel; pixels below it are background
UPSCALE_BELOW = 256  # smaller images are upscaled, because edges are a pixel wide
UPSCALE_FACTOR = 4
MIN_AREA_FRACTION = 0.01  # of the image that a shape covers
MIN_IOU = 0.8  # intersection over union with the ideal shape
MAX_ASPECT_RATIO = 1.6  # longer to shorter side


class ShapeDetector:
    """Detector for the shapes and colors that tiny models draw; needs no network."""

    def release_memory(self) -> None:
        """Do nothing: the detector uses no GPU memory."""

    def check(self, task: Task) -> None:
        """Raise `UserError` for a shape or color that is never detected."""
        for required in task.required_objects:
            check_choice("class", required.name, SHAPES)
            if required.colour is not None:
                check_choice("color", required.colour, RGB)

    def __call__(
        self, images: Sequence[Image.Image], tasks: Sequence[Task]
    ) -> list[list[Detection]]:
        return [detect(image) for image in images]


def detect(image: Image.Image) -> list[Detection]:
    """Return the shapes in an image with their colors; `score` is the IoU with the ideal shape."""
    scale = UPSCALE_FACTOR if max(image.size) < UPSCALE_BELOW else 1
    size = scale * image.width, scale * image.height
    image = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32) / 255
    red, green, blue = np.moveaxis(pixels, 2, 0)
    highest = np.maximum(np.maximum(red, green), blue)
    lowest = np.minimum(np.minimum(red, green), blue)
    coloured = highest - lowest > MIN_CHROMA
    palette = np.array(list(RGB.values()), dtype=np.float32)
    similarity = _hues(pixels[coloured]) @ _hues(palette).T  # (colored pixels, colors)
    label = np.full(coloured.shape, -1)
    label[coloured] = similarity.argmax(axis=1)
    found = []
    for number, colour in enumerate(RGB):
        found += _detect_colour(label == number, colour, scale)
    return found


def _hues(colours: np.ndarray) -> np.ndarray:
    """Return the hues of colors as unit vectors, without brightness and saturation."""
    flat = colours - colours.mean(axis=-1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=-1, keepdims=True), 1e-6)


def _detect_colour(mask: np.ndarray, colour: str, scale: int) -> list[Detection]:
    """Return the shapes among the connected components of a mask (H, W), one color of an image.

    Args:
        mask: Pixels of the color, (H, W) bool.
        colour: Its name.
        scale: Factor by which the image was enlarged; boxes are divided by it.
    """
    found = []
    number, parts, boxes, _ = cv2.connectedComponentsWithStats(
        mask.astype(np.uint8), connectivity=4
    )
    for part in range(1, number):  # 0 is the background
        left, top, width, height, area = boxes[part].tolist()
        if area < MIN_AREA_FRACTION * mask.size:
            continue
        component = parts[top : top + height, left : left + width] == part
        ious = {name: _iou(component, _render_shape(name, width, height)) for name in SHAPES}
        name = max(ious, key=ious.get)
        if ious[name] < MIN_IOU or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            name = UNKNOWN_SHAPE
        edges = (left, top, left + width, top + height)
        box = tuple(edge / scale for edge in edges)  # in pixels before upscaling
        found.append(Detection(name, ious.get(name, 1.0), box, colour))
    return found


def _render_shape(name: str, width: int, height: int) -> np.ndarray:
    """Return the mask of a shape that fills a box."""
    y, x = np.mgrid[0.5:height, 0.5:width]
    across = x / width - 0.5  # from the center
    down = y / height  # from the top
    if name == "square":
        return np.ones((height, width), dtype=bool)
    if name == "circle":
        return across**2 + (down - 0.5) ** 2 <= 0.25
    return np.abs(across) <= down / 2


def _iou(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())
