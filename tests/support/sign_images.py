"""Images of signs for the OCR tests, rendered without the library under test."""

from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

# PP-OCR reads some Os of this font as zeros (OIL, TOOL, ZOO), so those words are not used.
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
    """Return a 96 x 32 image of the word, as large as fits, in colours derived from the word."""
    rng = np.random.default_rng(list(word.encode()))
    background, ink = rng.integers(0, 90, 3), rng.integers(180, 256, 3)
    image = Image.new("RGB", (96, 32), tuple(background.tolist()))
    size = min(28, int(90 / (0.602 * len(word))))
    ImageDraw.Draw(image).text(
        (48, 16), word, font=mono_bold(size), fill=tuple(ink.tolist()), anchor="mm"
    )
    return image.filter(ImageFilter.GaussianBlur(blur)) if blur else image


def prompt(word: str) -> str:
    return f'a sign that says "{word}"'
