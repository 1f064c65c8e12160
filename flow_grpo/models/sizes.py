"""Sizes in pixels and frames, and the latents they stand for."""

from dataclasses import dataclass
from typing import NamedTuple

from flow_grpo.errors import UserError


class Size(NamedTuple):
    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True)
class Grid:
    """How pixels become latents, and latents tokens."""

    channels: int
    scale: int  # pixels per latent, in height and width
    patch: int = 2  # latents per token
    most: int | None = None  # pixels, in height and width
    frame_scale: int = 0  # frames per latent, after the first; 0: pictures only


def latent_shape(grid: Grid, size: Size) -> tuple[int, ...]:
    """(C, H, W), or (C, F, H, W) of a model of videos; refuses what cannot be drawn."""
    unit = grid.scale * grid.patch
    for name, pixels in (("height", size.height), ("width", size.width)):
        if pixels < unit or pixels % unit or (grid.most and pixels > grid.most):
            limit = f" and at most {grid.most}" if grid.most else ""
            raise UserError(f"{name}={pixels} must be a multiple of {unit}{limit}")
    space = size.height // grid.scale, size.width // grid.scale
    if not grid.frame_scale:
        if size.frames != 1:
            raise UserError(f"frames={size.frames} must be 1: this model draws pictures")
        return grid.channels, *space
    if size.frames < 1 or (size.frames - 1) % grid.frame_scale:
        raise UserError(
            f"frames={size.frames} must be 1 more than a multiple of {grid.frame_scale}"
        )
    return grid.channels, (size.frames - 1) // grid.frame_scale + 1, *space
