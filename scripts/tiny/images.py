"""Training images of the small model, 32 x 96, composed on the device in a few tensor ops.

An image is a row of cells: each pixel column takes its mask from the glyph or shape of its cell.
Some images are degraded on purpose and have the same prompts as the clean ones, so that the base
model samples a mixture that reinforcement learning can improve.
"""

from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flow_grpo.rewards.frames import to_pil
from flow_grpo.rewards.scorers.geneval.rules import RGB
from tiny.prompts import COLOURS, MAX_SHAPES, SHAPES, Scene, parse_scene, parse_sign

HEIGHT, WIDTH = 32, 96
MAX_LETTERS = 6
GLYPH_CELL = WIDTH // MAX_LETTERS
SHAPE_CELL = WIDTH // MAX_SHAPES
BLANK = len(ascii_uppercase)

_SHADE = 0.06  # colours of shapes vary by this much
_SHARP = 0.05  # a blur this narrow is the identity


@dataclass(frozen=True)
class Degradation:
    """Fractions of degraded images and the strength of the degradation.

    A sign is blurred, pale or clean; a scene has a wrong count, a wrong colour, or is correct.
    """

    blur_share: float = 0.3
    blur_sigma: float = 9.0  # pixels; sampled between 60 % and 100 % of this
    low_contrast_share: float = 0.15
    low_contrast: float = 0.02  # of the full contrast; sampled between 30 % and 100 % of this
    wrong_share: float = 0.35

    def __post_init__(self) -> None:
        shares = (self.blur_share, self.low_contrast_share, self.wrong_share)
        if min(shares) < 0 or max(shares) > 1 or self.blur_share + self.low_contrast_share > 1:
            raise ValueError(
                "the shares and the sum of blur and low contrast must be in [0, 1]: blur "
                f"{self.blur_share}, low contrast {self.low_contrast_share}, "
                f"wrong {self.wrong_share}"
            )


CLEAN = Degradation(blur_share=0.0, low_contrast_share=0.0, wrong_share=0.0)


@dataclass(frozen=True)
class ImageBatch:
    images: Tensor  # (B, 3, 32, 96) in [0, 1]
    degraded: Tensor  # (B,) bool


def encode_word(word: str) -> list[int]:
    """Return letter indices, padded with blanks to six."""
    letters = [ascii_uppercase.index(letter) for letter in word]
    return letters + [BLANK] * (MAX_LETTERS - len(letters))


def encode_scene(scene: Scene) -> list[int]:
    """Return (count, colour, shape) of the left and the right group; count 0 if missing."""
    numbers = [
        number
        for group in scene.left_to_right
        for number in (group.count, COLOURS.index(group.colour), SHAPES.index(group.shape))
    ]
    return numbers + [0] * (6 - len(numbers))


class Painter:
    """Composes batches of images from glyph and shape masks on a device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.glyphs = _glyph_masks().to(device)  # (27, 16, 32): symbol, column, row
        self.shapes = _shape_masks().to(device)  # (4, 24, 32)
        self.colours = torch.tensor([RGB[name] for name in COLOURS]).to(device)  # (6, 3)
        self.device = torch.device(device)

    def signs(
        self, letters: Tensor, degradation: Degradation, generator: torch.Generator
    ) -> ImageBatch:
        """Draw signs; letters: (B, 6) from `encode_word`."""
        size = len(letters)
        draw = self._uniform(generator, size, 10)
        blurred = draw[:, 0] < degradation.blur_share
        pale = ~blurred & (draw[:, 0] < degradation.blur_share + degradation.low_contrast_share)

        used = (letters != BLANK).sum(1)
        symbol, column, _ = _cells(letters, used, GLYPH_CELL, BLANK)
        mask = self.glyphs[symbol, column]  # (B, 96, 32)
        sigma = degradation.blur_sigma * (0.6 + 0.4 * draw[:, 1])
        mask = _blur(mask, sigma.masked_fill(~blurred, _SHARP))

        # One colour is dark and one is light: contrast without rejection sampling.
        dark, light = 0.4 * draw[:, 2:5], 0.6 + 0.4 * draw[:, 5:8]
        swap = draw[:, 8:9] < 0.5
        background, ink = torch.where(swap, light, dark), torch.where(swap, dark, light)
        strength = degradation.low_contrast * (0.3 + 0.7 * draw[:, 9])
        ink = background + (ink - background) * strength.masked_fill(~pale, 1.0)[:, None]
        return ImageBatch(_compose(mask, background[:, None], ink[:, None]), blurred | pale)

    def scenes(
        self, numbers: Tensor, degradation: Degradation, generator: torch.Generator
    ) -> ImageBatch:
        """Draw scenes; numbers: (B, 6) from `encode_scene`."""
        size = len(numbers)
        draw = self._uniform(generator, size, 6)
        count, colour, shape, count_2, colour_2, shape_2 = numbers.unbind(1)

        wrong = draw[:, 0] < degradation.wrong_share
        max_count = MAX_SHAPES - count_2  # of the left group
        miscount = wrong & (draw[:, 1] < 0.5) & (max_count > 1)
        other_count = 1 + (count + (draw[:, 2] * (max_count - 1)).long()) % max_count
        other_colour = (colour + 1 + (draw[:, 2] * (len(COLOURS) - 1)).long()) % len(COLOURS)
        count = torch.where(miscount, other_count, count)
        colour = torch.where(wrong & ~miscount, other_colour, colour)

        place = torch.arange(MAX_SHAPES, device=self.device).expand(size, -1)
        used = count + count_2
        is_left = place < count[:, None]
        shapes = torch.where(is_left, shape[:, None], shape_2[:, None])
        colours = self.colours[torch.where(is_left, colour[:, None], colour_2[:, None])]
        colours = colours + _SHADE * (2 * self._uniform(generator, size, MAX_SHAPES, 3) - 1)

        grey = torch.where(draw[:, 3] < 0.5, 0.85 + 0.15 * draw[:, 4], 0.12 * draw[:, 4])
        return ImageBatch(self.place(shapes, used, colours.clamp(0, 1), grey), wrong)

    def place(self, shapes: Tensor, used: Tensor, colours: Tensor, background: Tensor) -> Tensor:
        """Draw rows of shapes, centred.

        Args:
            shapes: (B, 4) indices.
            used: (B,) number of cells that are drawn.
            colours: (B, 4, 3) in [0, 1].
            background: (B,) grey level in [0, 1].

        Returns:
            (B, 3, 32, 96) in [0, 1].
        """
        symbol, column, cell = _cells(shapes, used, SHAPE_CELL, len(SHAPES))
        mask = self.shapes[symbol, column]  # (B, 96, 32)
        ink = colours.gather(1, cell[..., None].expand(-1, -1, 3))  # (B, 96, 3)
        return _compose(mask, background[:, None, None].expand(-1, -1, 3), ink)

    def _uniform(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=self.device)


def draw(prompt: str, *, degradation: Degradation = CLEAN, seed: int = 0) -> Image.Image:
    """Draw one training image for a prompt."""
    generator = torch.Generator().manual_seed(seed)
    painter = Painter()
    word, scene = parse_sign(prompt), parse_scene(prompt)
    if word is not None:
        batch = painter.signs(torch.tensor([encode_word(word)]), degradation, generator)
    elif scene is not None:
        batch = painter.scenes(torch.tensor([encode_scene(scene)]), degradation, generator)
    else:
        raise ValueError(f"{prompt!r} is neither a sign nor a scene of tiny.prompts")
    return to_pil(batch.images)[0]


def _cells(symbols: Tensor, used: Tensor, cell: int, blank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return symbol, column within its mask and cell index of each pixel column, all (B, 96)."""
    start = (WIDTH - used * cell) // 2
    x = torch.arange(WIDTH, device=symbols.device) - start[:, None]
    inside = (x >= 0) & (x < used[:, None] * cell)
    x = x.clamp(0, WIDTH - 1)
    number = (x // cell).clamp(max=symbols.shape[1] - 1)
    return symbols.gather(1, number).masked_fill(~inside, blank), x % cell, number


def _blur(mask: Tensor, sigma: Tensor) -> Tensor:
    """Blur (B, 96, 32) masks with a Gaussian of sigma (B,), as two matrix products."""
    return _blur_matrix(WIDTH, sigma) @ mask @ _blur_matrix(HEIGHT, sigma).transpose(1, 2)


def _blur_matrix(size: int, sigma: Tensor) -> Tensor:
    x = torch.arange(size, device=sigma.device, dtype=torch.float32)
    distance = (x[:, None] - x).square()
    return torch.softmax(-distance / (2 * sigma.square()[:, None, None]), dim=-1)


def _compose(mask: Tensor, background: Tensor, ink: Tensor) -> Tensor:
    """Blend by mask (B, 96, 32); colours broadcast to (B, 96, 3); returns (B, 3, 32, 96)."""
    background, ink = background.transpose(1, 2)[:, :, None], ink.transpose(1, 2)[:, :, None]
    return background + (ink - background) * mask.transpose(1, 2)[:, None]


def _glyph_masks() -> Tensor:
    """Return masks of DejaVu Sans Mono Bold capitals and a blank, (27, 16, 32)."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    font = ImageFont.truetype(str(path), 6.5 * GLYPH_CELL)  # advances 3.9 of 4 cells: no overlap
    masks = []
    for letter in ascii_uppercase:
        # 4 times the width but 3.3 times the height: downscaling stretches letters vertically.
        canvas = Image.new("L", (4 * GLYPH_CELL, 106))
        ImageDraw.Draw(canvas).text((2 * GLYPH_CELL, 90), letter, 255, font, anchor="ms")
        masks.append(_shrink(canvas, GLYPH_CELL))
    return torch.stack([*masks, torch.zeros(GLYPH_CELL, HEIGHT)])


def _shape_masks() -> Tensor:
    """Return masks of the shapes and a blank, (4, 24, 32)."""
    left, right, top, bottom = 8, 88, 24, 104  # on a canvas four times the cell
    masks = []
    for shape in SHAPES:
        canvas = Image.new("L", (4 * SHAPE_CELL, 4 * HEIGHT))
        pen = ImageDraw.Draw(canvas)
        if shape == "circle":
            pen.ellipse((left, top, right, bottom), 255)
        elif shape == "square":
            pen.rectangle((left + 4, top + 4, right - 4, bottom - 4), 255)
        else:
            pen.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), 255)
        masks.append(_shrink(canvas, SHAPE_CELL))
    return torch.stack([*masks, torch.zeros(SHAPE_CELL, HEIGHT)])


def _shrink(canvas: Image.Image, cell: int) -> Tensor:
    """Downscale to (cell, 32), columns first."""
    small = canvas.resize((cell, HEIGHT), Image.Resampling.BOX)
    return torch.from_numpy(np.asarray(small, dtype=np.float32).T.copy()) / 255
