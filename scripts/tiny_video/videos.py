"""Synthetic videos of a moving circle, and the sound of beeps, in a few tensor operations."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.rewards.scorers.geneval.rules import RGB
from tiny_video.prompts import DIRECTIONS, Task

SIZE, FRAMES, FPS = 32, 17, 24
DIAMETER = 13  # pixels
TRAVEL = 13  # pixels between the first and the last frame
BACKGROUND = 0.94
STEPS = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, -1.0], [0.0, 1.0]])  # x, y per direction

SAMPLE_RATE, HOP, WINDOW = 8000, 80, 256
MEL_BINS, MEL_FRAMES = 16, 69  # as many as 18 audio latents decode to
BEEP_HZ, BEEP_SECONDS, PERIOD_SECONDS = 1000.0, 0.09, 0.2
RAMP_SECONDS, AMPLITUDE = 0.005, 0.6
MIN_MEL = 1e-5


def draw(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return uniform random numbers on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device)


def draw_normal(shape: int | Sequence[int], generator: torch.Generator) -> Tensor:
    """Return normal random numbers on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device)


def draw_indices(below: int, size: int, generator: torch.Generator) -> Tensor:
    """Return random integers of at least 0 on the generator's device."""
    return torch.randint(below, (size,), generator=generator, device=generator.device)


def circle_masks(directions: Tensor, generator: torch.Generator) -> Tensor:
    """Return the coverage of each pixel by a circle that moves, at a random place.

    Args:
        directions: (B,) indices of `DIRECTIONS`.
        generator: Draws the places, on its device.

    Returns:
        (B, F, 32, 32) in [0, 1].
    """
    device = generator.device
    step = STEPS.to(device)[directions.to(device)]
    free = (SIZE - DIAMETER - step.abs() * TRAVEL - 1) / 2  # from the center, (B, 2)
    middle = SIZE / 2 + free * (2 * draw(step.shape, generator) - 1)
    time = torch.linspace(-0.5, 0.5, FRAMES, device=device)
    center = middle[:, None] + TRAVEL * time[:, None] * step[:, None]  # (B, F, 2)
    grid = torch.arange(SIZE, device=device) + 0.5
    x, y = (grid - center[..., i : i + 1] for i in (0, 1))  # (B, F, 32)
    distance = (x[..., None, :].square() + y[..., :, None].square()).sqrt()
    return (DIAMETER / 2 - distance + 0.5).clamp(0, 1)


def render(tasks: list[Task], generator: torch.Generator) -> Tensor:
    """Return videos of tasks at random places, (B, 3, F, 32, 32) in [0, 1]."""
    directions = torch.tensor([DIRECTIONS.index(task.direction) for task in tasks])
    colours = torch.tensor([RGB[task.color] for task in tasks], device=generator.device)
    return compose(circle_masks(directions, generator), colours)


def sound_of(tasks: list[Task], generator: torch.Generator) -> Tensor:
    """Return the waveforms of tasks, (B, samples)."""
    return beep_waves(torch.tensor([task.beeps for task in tasks]), generator)


def compose(masks: Tensor, colours: Tensor) -> Tensor:
    """Return videos (B, 3, F, 32, 32) in [0, 1] of masks (B, F, 32, 32) and colours (B, 3)."""
    return BACKGROUND + (colours[:, :, None, None, None] - BACKGROUND) * masks[:, None]


def beep_waves(counts: Tensor, generator: torch.Generator) -> Tensor:
    """Return waveforms (B, samples) of `counts` beeps (B,) that start at a random time."""
    counts = counts.to(generator.device)
    time = torch.arange(MEL_FRAMES * HOP, device=counts.device) / SAMPLE_RATE
    total = MEL_FRAMES * HOP / SAMPLE_RATE
    lasting = (counts - 1) * PERIOD_SECONDS + BEEP_SECONDS
    start = 0.02 + (total - 0.03 - lasting) * draw(counts.shape, generator)
    since = time - start[:, None]
    number = (since / PERIOD_SECONDS).floor()
    within = since - number * PERIOD_SECONDS
    edge = torch.minimum(within, BEEP_SECONDS - within) / RAMP_SECONDS
    is_beep = (number >= 0) & (number < counts[:, None])
    envelope = torch.where(is_beep, edge.clamp(0, 1), 0.0)
    return AMPLITUDE * envelope * torch.sin(2 * math.pi * BEEP_HZ * time)


def mel_filters() -> Tensor:
    """Return triangular filters, equally spaced on the mel scale, (bins, frequencies)."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, MEL_BINS + 2) / 2595) - 1)
    hertz = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)


def log_mel(waves: Tensor) -> Tensor:
    """Return log-mel spectrograms (B, 2, 69, bins), both channels equal, of waves (B, samples)."""
    window = torch.hann_window(WINDOW, device=waves.device)
    spectrum = torch.stft(waves, WINDOW, HOP, window=window, return_complex=True).abs()
    filters = mel_filters().to(waves.device)
    mel = (filters @ spectrum[..., :MEL_FRAMES]).clamp(min=MIN_MEL).log()
    return mel.transpose(1, 2)[:, None].repeat(1, 2, 1, 1)
