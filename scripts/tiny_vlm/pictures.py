"""Draws the pictures that the questions are about: up to four coloured shapes in a row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vlm.texts import COLOURS, ONE_COLOUR, SHAPES, TWO_SHAPES

HEIGHT, WIDTH, SLOTS = 32, 96, 4  # a slot is a column that holds one shape or none
SLOT_WIDTH = WIDTH // SLOTS
PATCH, MERGE, FRAMES = (
    8,
    2,
    2,
)  # as in a Qwen-VL: 2 x 2 patches make one token, a picture two frames
ROWS, COLUMNS = HEIGHT // PATCH, WIDTH // PATCH
PATCHES = ROWS * COLUMNS
TOKENS = PATCHES // MERGE**2
CIRCLE, SQUARE = range(2)  # and all else is a triangle
# how many of the shapes are drawn to be the ones asked for, so that every count turns up
LEANINGS = (0.15, 0.5, 0.85)
NOISE = 0.06  # strongest, as a share of full brightness


@dataclass(frozen=True)
class Scenes:
    """What stands in each slot of N pictures, and the two numbers that the answer adds up."""

    filled: Tensor  # (N, SLOTS), bool
    shape: Tensor  # (N, SLOTS), index of SHAPES
    colour: Tensor  # (N, SLOTS), index of COLOURS
    first: Tensor  # (N,)
    second: Tensor  # (N,)


class Dice:
    """Random numbers of one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.generator, device=self.generator.device)

    def below(self, limit: int, *size: int) -> Tensor:
        return torch.randint(limit, size, generator=self.generator, device=self.generator.device)


def draw_scenes(
    task: Tensor, asked: Tensor, also_asked: Tensor, asked_colour: Tensor, dice: Dice
) -> Scenes:
    """Scenes for the questions (N,); the two addends count both shapes, or left and right half."""
    n = len(task)
    task, asked, also_asked, asked_colour = (
        x[:, None] for x in (task, asked, also_asked, asked_colour)
    )
    place = dice.uniform(n, SLOTS).argsort(1).argsort(1)
    filled = place < 1 + dice.below(SLOTS, n, 1)
    leaning = torch.tensor(LEANINGS, device=task.device)[dice.below(len(LEANINGS), n, 1)]
    meant = dice.uniform(n, SLOTS) < leaning
    other = (task == TWO_SHAPES) & (dice.uniform(n, SLOTS) < 0.5)
    shape = torch.where(
        meant, torch.where(other, also_asked, asked), dice.below(len(SHAPES), n, SLOTS)
    )
    of_colour = task == ONE_COLOUR
    colour = torch.where(meant & of_colour, asked_colour, dice.below(len(COLOURS), n, SLOTS))
    counted = filled & (shape == asked) & (~of_colour | (colour == asked_colour))
    both = task[:, 0] == TWO_SHAPES
    half = SLOTS // 2
    first = torch.where(both, counted.sum(1), counted[:, :half].sum(1))
    second = torch.where(both, (filled & (shape == also_asked)).sum(1), counted[:, half:].sum(1))
    return Scenes(filled, shape, colour, first, second)


def paint(scenes: Scenes, dice: Dice, noise: float = 0.0) -> Tensor:
    """Pictures (N, 3, HEIGHT, WIDTH) in whole steps of 1/255; noise of a strength up to `noise`."""
    n, device = len(scenes.first), scenes.filled.device
    radius = 6 + 4 * dice.uniform(n, SLOTS)
    x = SLOT_WIDTH / 2 + (2 * dice.uniform(n, SLOTS) - 1) * (SLOT_WIDTH / 2 - 0.5 - radius)
    y = HEIGHT / 2 + (2 * dice.uniform(n, SLOTS) - 1) * (HEIGHT / 2 - 0.5 - radius)
    dx = (torch.arange(SLOT_WIDTH, device=device) + 0.5 - x[..., None])[:, :, None, :]
    dy = (torch.arange(HEIGHT, device=device) + 0.5 - y[..., None])[:, :, :, None]
    radius, shape = radius[..., None, None], scenes.shape[..., None, None]
    # signed distances to the edge, so that edges are smooth
    circle = radius - (dx * dx + dy * dy).sqrt()
    square = 0.88 * radius - torch.maximum(dx.abs(), dy.abs())
    triangle = torch.minimum(0.85 * radius - dy, 0.5 * (dy + radius) - dx.abs())
    inside = torch.where(shape == CIRCLE, circle, torch.where(shape == SQUARE, square, triangle))
    cover = (inside + 0.5).clamp(0, 1) * scenes.filled[..., None, None]
    cover = cover[:, None]  # (N, 1, SLOTS, HEIGHT, SLOT_WIDTH)
    colours = torch.tensor(list(COLOURS.values()), device=device)[scenes.colour]
    colours = (colours + 0.1 * (dice.uniform(n, SLOTS, 3) - 0.5)).permute(0, 2, 1)
    background = 0.25 * dice.uniform(n, 1, 1, 1, 1)
    pictures = background * (1 - cover) + colours[..., None, None] * cover
    pictures = pictures.transpose(2, 3).reshape(n, 3, HEIGHT, WIDTH)
    if noise:
        strength = noise * dice.uniform(n, 1, 1, 1)
        pictures = pictures + strength * (dice.uniform(n, 3, HEIGHT, WIDTH) - 0.5)
    return (pictures.clamp(0, 1) * 255).round() / 255


def to_patches(pictures: Tensor) -> Tensor:
    """(N * PATCHES, values of a patch), as the Qwen-VL image processor lays them out."""
    blocks = (2 * pictures - 1).view(
        len(pictures), 3, ROWS // MERGE, MERGE, PATCH, COLUMNS // MERGE, MERGE, PATCH
    )
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    frames = blocks.expand(-1, -1, -1, -1, -1, -1, FRAMES, -1, -1)
    return frames.reshape(len(pictures) * PATCHES, 3 * FRAMES * PATCH**2)
