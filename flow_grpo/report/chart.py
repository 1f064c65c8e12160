"""Line charts as images, drawn with Pillow: cards and pages need no other library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

SCALE = 2  # pixels per unit, for screens with a high resolution
WIDTH, HEIGHT = 640, 280  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 40  # margins
FONT_SIZE = 13
COLOURS = ("#1f6feb", "#d1700f", "#2f8f46", "#8250df", "#b0324a")
INK, FAINT, GRID = "#1f2328", "#656d76", "#e3e6ea"
MAX_MARKERS = 40  # points of a line that are marked
STEPS = (1, 2, 2.5, 5, 10)  # of ticks, times a power of ten


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name and its points."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """A chart with one pair of axes."""

    title: str
    lines: Sequence[Line]


def draw_panels(panels: Sequence[Panel], *, x: str, mark: float | None = None) -> Image.Image:
    """Return panels below each other, with a common range of x.

    Args:
        panels: Charts, each with at least one point.
        x: Label of the horizontal axis.
        mark: Position of a dashed vertical line.
    """
    positions = [p[0] for panel in panels for line in panel.lines for p in line.points]
    low, high = min(positions), max(positions)
    if low == high:
        low, high = low - 1, high + 1
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE * len(panels)), "white")
    for index, panel in enumerate(panels):
        _draw_panel(image, panel, index * HEIGHT, (low, high), x, mark)
    return image


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that cover the range from `low` to `high`."""
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in STEPS if each * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _draw_panel(
    image: Image.Image,
    panel: Panel,
    offset: int,
    x_range: tuple[float, float],
    x: str,
    mark: float | None,
) -> None:
    """Draw a panel whose upper edge is at `offset`."""
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE * SCALE)
    values = [p[1] for line in panel.lines for p in line.points]
    levels = ticks(min(values), max(values))
    x_low, x_high = x_range

    def place(point: tuple[float, float]) -> tuple[float, float]:
        """Return the pixel of a point."""
        across = (point[0] - x_low) / (x_high - x_low)
        up = (point[1] - levels[0]) / (levels[-1] - levels[0])
        inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return (
            (LEFT + across * inner_width) * SCALE,
            (offset + TOP + (1 - up) * inner_height) * SCALE,
        )

    for level in levels:
        start, end = place((x_low, level)), place((x_high, level))
        pen.line([start, end], GRID, SCALE)
        pen.text((start[0] - 8 * SCALE, start[1]), f"{level:.4g}", FAINT, font, anchor="rm")
    for position in ticks(x_low, x_high, 8):
        if x_low <= position <= x_high and position == round(position):
            below = place((position, levels[0]))
            pen.text((below[0], below[1] + 6 * SCALE), f"{position:.0f}", FAINT, font, anchor="mt")
    if mark is not None and x_low <= mark <= x_high:
        _draw_dashes(pen, place((mark, levels[-1])), place((mark, levels[0])))
    for number, line in enumerate(panel.lines):
        colour = COLOURS[number % len(COLOURS)]
        _draw_line(pen, [place(point) for point in line.points], colour)
    pen.text((LEFT * SCALE, (offset + 8) * SCALE), panel.title, INK, font)
    _draw_legend(pen, font, panel.lines, (offset + 8) * SCALE)
    pen.text(((WIDTH - RIGHT) * SCALE, (offset + HEIGHT - 6) * SCALE), x, FAINT, font, anchor="rs")


def _draw_line(pen: ImageDraw.ImageDraw, pixels: list[tuple[float, float]], colour: str) -> None:
    if len(pixels) > 1:
        pen.line(pixels, colour, 2 * SCALE, joint="curve")
    radius = 3 * SCALE
    for across, down in pixels if len(pixels) <= MAX_MARKERS else ():
        pen.ellipse([across - radius, down - radius, across + radius, down + radius], colour)


def _draw_dashes(
    pen: ImageDraw.ImageDraw, top: tuple[float, float], bottom: tuple[float, float]
) -> None:
    dash = 4 * SCALE
    for down in range(int(top[1]), int(bottom[1]), 2 * dash):
        pen.line([(top[0], down), (top[0], min(down + dash, bottom[1]))], FAINT, SCALE)


def _draw_legend(
    pen: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont, lines: Sequence[Line], down: float
) -> None:
    """Draw the names of the lines at the right, in their colours."""
    across = (WIDTH - RIGHT) * SCALE
    for number in reversed(range(len(lines))):
        across -= pen.textlength(lines[number].name, font)
        pen.text((across, down), lines[number].name, COLOURS[number % len(COLOURS)], font)
        across -= 16 * SCALE
