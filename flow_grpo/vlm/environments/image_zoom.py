"""Environment whose tool shows the model a crop of an image of its question.

    <tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 320, 240]}}</tool_call>

The box is [left, top, right, bottom]; the next turn contains the crop as an image. With several
images in the question, `"image": 2` selects the second one.
"""

import math
from typing import Any

from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.vlm.environment import MAX_OBSERVATION_PIXELS
from flow_grpo.vlm.environments.tool_calls import (
    ToolEnvironment,
    ToolError,
    ToolResult,
    check_option,
)

UNITS = {"pixels": None, "fraction": 1.0, "thousandths": 1000.0}  # coordinate of the far edge
MAX_ASPECT_RATIO = 100  # of a crop; image processors reject 200


class ImageZoom(ToolEnvironment):
    """Environment with the tool `zoom`.

    Args:
        units: Units of a box: "pixels" of the image in the dataset, "fraction" of its width and
            height (0 to 1), or "thousandths" of them (0 to 1000).
        size: Length in pixels to which the longer side of a crop is resized; 0 keeps its size.
        error_reward: Reward of a turn whose call fails.
    """

    name = "zoom"

    def __init__(self, units: str = "pixels", size: int = 0, error_reward: float = 0.0) -> None:
        super().__init__(error_reward)
        if not isinstance(units, str) or units not in UNITS:
            raise UserError(
                f"must be one of {', '.join(UNITS)}",
                field="environment_options.units",
                value=units,
            )
        self.far_edge = UNITS[units]
        self.size = check_option("size", size, 0, 4096, whole=True)
        self.images: list[Image.Image] = []

    def reset(self, row: dict[str, Any]) -> None:
        """Store the images of the question."""
        self.images = row["images"]

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Return the requested crop."""
        if not self.images:
            raise ToolError("the question has no image")
        number = arguments.get("image", 1)
        if type(number) is not int or not 1 <= number <= len(self.images):
            raise ToolError(f'"image" must be a number from 1 to {len(self.images)}')
        image = self.images[number - 1]
        left, top, right, bottom = pixel_box(arguments.get("box"), image.size, self.far_edge)
        if not self.size and (right - left) * (bottom - top) > MAX_OBSERVATION_PIXELS:
            raise ToolError(f"the box has more than {MAX_OBSERVATION_PIXELS:,} pixels")
        crop = image.crop((left, top, right, bottom))
        if self.size:
            scale = self.size / max(crop.size)
            crop = crop.resize([max(1, round(side * scale)) for side in crop.size])
        return "", [crop]


def pixel_box(box: Any, size: tuple[int, int], far_edge: float | None) -> tuple[int, ...]:
    """Return the smallest box in whole pixels that contains the requested box.

    Args:
        box: Left, top, right and bottom, as written by the model.
        size: Width and height of the image.
        far_edge: Coordinate of the right and bottom edges; None for pixels.

    Raises:
        ToolError: If it is not a box inside the image.
    """
    is_box = isinstance(box, list) and len(box) == 4
    if not is_box or not all(type(each) in (int, float) for each in box):
        raise ToolError('"box" must be a list of four numbers: left, top, right, bottom')
    edges = [far_edge or side for side in (*size, *size)]
    if not all(0 <= each <= edge for each, edge in zip(box, edges, strict=True)):  # False for NaN
        raise ToolError(
            f"the box must be inside the image, from 0 to {edges[0]:g} horizontally and from 0 to "
            f"{edges[1]:g} vertically"
        )
    if not (box[0] < box[2] and box[1] < box[3]):
        raise ToolError("the box is empty: left must be below right, and top below bottom")
    exact = [
        each / edge * side for each, edge, side in zip(box, edges, (*size, *size), strict=True)
    ]
    near = [math.floor(each + 1e-6) for each in exact[:2]]
    far = [math.ceil(each - 1e-6) for each in exact[2:]]
    near = [min(each, side - 1) for each, side in zip(near, size, strict=True)]
    far = [max(end, start + 1) for start, end in zip(near, far, strict=True)]
    width, height = far[0] - near[0], far[1] - near[1]
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ToolError("the box is too narrow")
    return *near, *far
