"""Draw the images of the questions: up to four coloured shapes in a row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vlm.texts import COLOURS, ONE_COLOUR, SHAPES, TWO_SHAPES

HEIGHT, WIDTH, SLOTS = 32, 96, 4  # a slot is a column that holds one shape or none
SLOT_WIDTH = WIDTH // SLOTS
# as in Qwen-VL: 2 x 2 patches per token, two frames per image
PATCH = 8
MERGE = 2
FRAMES = 2
ROWS, COLUMNS = HEIGHT // PATCH, WIDTH // PATCH
PATCHES = ROWS * COLUMNS
TOKENS = PATCHES // MERGE**2
CIRCLE, SQUARE = range(2)  # anything else is a triangle
# probabilities that a shape matches the question; several, so that every count occurs
MATCH_PROBABILITIES = (0.15, 0.5, 0.85)
NOISE = 0.06  # maximum, as a fraction of full brightness


@dataclass(frozen=True)
class Scenes:
    """Contents of each slot of N images, and the two addends of the answer."""

    filled: Tensor  # (N, SLOTS), bool
    shape: Tensor  # (N, SLOTS), index of SHAPES
    colour: Tensor  # (N, SLOTS), index of COLOURS
    first: Tensor  # (N,)
    second: Tensor  # (N,)


class RandomNumbers:
    """Random numbers of one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.generator, device=self.generator.device)

    def below(self, limit: int, *size: int) -> Tensor:
        return torch.randint(limit, size, generator=self.generator, device=self.generator.device)


def draw_scenes(
    task: Tensor, asked: Tensor, also_asked: Tensor, asked_colour: Tensor, rng: RandomNumbers
) -> Scenes:
    """Draw scenes for questions, all (N,); addends count both shapes, or left and right half."""
    n = len(task)
    task, asked, also_asked, asked_colour = (
        x[:, None] for x in (task, asked, also_asked, asked_colour)
    )
    rank = rng.uniform(n, SLOTS).argsort(1).argsort(1)
    filled = rank < 1 + rng.below(SLOTS, n, 1)
    probabilities = torch.tensor(MATCH_PROBABILITIES, device=task.device)
    probability = probabilities[rng.below(len(MATCH_PROBABILITIES), n, 1)]
    matches = rng.uniform(n, SLOTS) < probability
    other = (task == TWO_SHAPES) & (rng.uniform(n, SLOTS) < 0.5)
    shape = torch.where(
        matches, torch.where(other, also_asked, asked), rng.below(len(SHAPES), n, SLOTS)
    )
    of_colour = task == ONE_COLOUR
    colour = torch.where(matches & of_colour, asked_colour, rng.below(len(COLOURS), n, SLOTS))
    counted = filled & (shape == asked) & (~of_colour | (colour == asked_colour))
    both = task[:, 0] == TWO_SHAPES
    half = SLOTS // 2
    first = torch.where(both, counted.sum(1), counted[:, :half].sum(1))
    second = torch.where(both, (filled & (shape == also_asked)).sum(1), counted[:, half:].sum(1))
    return Scenes(filled, shape, colour, first, second)


def paint(scenes: Scenes, rng: RandomNumbers, noise: float = 0.0) -> Tensor:
    """Return images (N, 3, HEIGHT, WIDTH), multiples of 1/255.

    Each image has uniform noise of a random width, at most `noise`.
    """
    n, device = len(scenes.first), scenes.filled.device
    radius = 6 + 4 * rng.uniform(n, SLOTS)
    x = SLOT_WIDTH / 2 + (2 * rng.uniform(n, SLOTS) - 1) * (SLOT_WIDTH / 2 - 0.5 - radius)
    y = HEIGHT / 2 + (2 * rng.uniform(n, SLOTS) - 1) * (HEIGHT / 2 - 0.5 - radius)
    dx = (torch.arange(SLOT_WIDTH, device=device) + 0.5 - x[..., None])[:, :, None, :]
    dy = (torch.arange(HEIGHT, device=device) + 0.5 - y[..., None])[:, :, :, None]
    radius, shape = radius[..., None, None], scenes.shape[..., None, None]
    # signed distances to the edge, for anti-aliasing
    circle = radius - (dx * dx + dy * dy).sqrt()
    square = 0.88 * radius - torch.maximum(dx.abs(), dy.abs())
    triangle = torch.minimum(0.85 * radius - dy, 0.5 * (dy + radius) - dx.abs())
    inside = torch.where(shape == CIRCLE, circle, torch.where(shape == SQUARE, square, triangle))
    cover = (inside + 0.5).clamp(0, 1) * scenes.filled[..., None, None]
    cover = cover[:, None]  # (N, 1, SLOTS, HEIGHT, SLOT_WIDTH)
    colours = torch.tensor(list(COLOURS.values()), device=device)[scenes.colour]
    colours = (colours + 0.1 * (rng.uniform(n, SLOTS, 3) - 0.5)).permute(0, 2, 1)
    background = 0.25 * rng.uniform(n, 1, 1, 1, 1)
    images = background * (1 - cover) + colours[..., None, None] * cover
    images = images.transpose(2, 3).reshape(n, 3, HEIGHT, WIDTH)
    if noise:
        strength = noise * rng.uniform(n, 1, 1, 1)
        images = images + strength * (rng.uniform(n, 3, HEIGHT, WIDTH) - 0.5)
    return (images.clamp(0, 1) * 255).round() / 255


def to_patches(images: Tensor) -> Tensor:
    """Return patches (N * PATCHES, values) in the layout of the Qwen-VL image processor."""
    blocks = (2 * images - 1).view(
        len(images), 3, ROWS // MERGE, MERGE, PATCH, COLUMNS // MERGE, MERGE, PATCH
    )
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
    frames = blocks.expand(-1, -1, -1, -1, -1, -1, FRAMES, -1, -1)
    return frames.reshape(len(images) * PATCHES, 3 * FRAMES * PATCH**2)
