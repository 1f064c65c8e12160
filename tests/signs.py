"""Signs drawn for the OCR tests, without the library under test."""

from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

# PP-OCR takes a few of this font's Os for zeros (OIL, TOOL, ZOO): those words are left out.
# fmt: off
WORDS = [
    "CAT", "DOG", "SUN", "MAP", "BUS", "TEA", "CODE", "FISH",
    "LAMP", "ROAD", "MILK", "WIND", "JUMP", "KIWI", "APPLE", "BREAD",
    "CHAIR", "HOUSE", "LIGHT", "QUIET", "ZEBRA", "POWER", "MUSIC", "TRAIN",
    "ORANGE", "PLANET", "SILVER", "WINTER", "GARDEN", "BRIDGE", "YELLOW",
]
# fmt: on


def mono_bold(size: int) -> ImageFont.FreeTypeFont:
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(fonts / "DejaVuSansMono-Bold.ttf"), size)


def sign(word: str, blur: float = 0.0) -> Image.Image:
    """A 32 x 96 sign with the word as large as fits, its colours chosen by the word."""
    rng = np.random.default_rng(list(word.encode()))
    paper, ink = rng.integers(0, 90, 3), rng.integers(180, 256, 3)
    image = Image.new("RGB", (96, 32), tuple(paper.tolist()))
    size = min(28, int(90 / (0.602 * len(word))))
    ImageDraw.Draw(image).text(
        (48, 16), word, font=mono_bold(size), fill=tuple(ink.tolist()), anchor="mm"
    )
    return image.filter(ImageFilter.GaussianBlur(blur)) if blur else image


def prompt(word: str) -> str:
    return f'a sign that says "{word}"'
