"""What a model is given beside the latents: noise levels and texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.errors import UserError
from flow_grpo.speed.transfer import send

Inputs = dict[str, Tensor]  # what a model is given of prompts, by name, (prompts, ...) each


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


@dataclass(frozen=True)
class Schedule:
    """The model's own noise schedule, on the host so that no step waits for the device."""

    sigmas: tuple[float, ...]  # num_steps + 1, from 1 (about) down to 0
    timesteps: tuple[float, ...]  # num_steps, as the model's scheduler gives them

    def __post_init__(self) -> None:
        if not 0 < len(self.timesteps) == len(self.sigmas) - 1:
            raise ValueError(
                f"a Schedule needs time steps and one more sigma than these, and has "
                f"{len(self.timesteps)} and {len(self.sigmas)}"
            )
        for before, after in pairwise(self.sigmas):
            if not before > after:  # nor where one is NaN
                raise UserError(
                    f"the model's scheduler gives the noise level {after:g} after {before:g}, and "
                    "they must decrease; correct shift in its scheduler_config.json"
                )

    def __len__(self) -> int:
        return len(self.timesteps)

    def dt(self, i: int) -> float:
        """How far step i goes, below 0."""
        return self.sigmas[i + 1] - self.sigmas[i]


@dataclass(frozen=True)
class Conditioning:
    """What the model is given for each sample of a batch, each distinct thing held once.

    What is on the CPU, like the texts' lengths, stays there: a model may take it apart without
    waiting for the device.
    """

    inputs: Inputs
    positive: Tensor  # (B,) the inputs of each sample, on the CPU
    negative: Tensor | None  # (B,) those of its negative prompt; None when nothing is guided

    def __len__(self) -> int:
        return len(self.positive)

    def __getitem__(self, part: slice | Tensor) -> "Conditioning":
        negative = None if self.negative is None else self.negative[part]
        return replace(self, positive=self.positive[part], negative=negative)

    def of(self, index: Tensor) -> Inputs:
        """The inputs with these numbers."""
        return {k: each[send(index, each.device)] for k, each in self.inputs.items()}

    @staticmethod
    def join(parts: "Sequence[Conditioning]") -> "Conditioning":
        counts = [len(next(iter(p.inputs.values()))) for p in parts]
        moved = list(zip(parts, accumulate(counts, initial=0), strict=False))
        guided = parts[0].negative is not None
        return Conditioning(
            {name: cat_padded([p.inputs[name] for p in parts]) for name in parts[0].inputs},
            positive=torch.cat([p.positive + start for p, start in moved]),
            negative=torch.cat([p.negative + start for p, start in moved]) if guided else None,
        )


def cat_padded(tensors: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """Texts one after another, those with fewer tokens filled up with zeros behind."""
    if tensors[0].ndim < 3:
        return torch.cat(list(tensors))
    most = max(t.shape[1] for t in tensors)
    most += -most % multiple
    return torch.cat([F.pad(t, (0, 0, 0, most - t.shape[1])) for t in tensors])


def source_mask(lengths: Tensor, before: int, device: torch.device) -> dict[str, Tensor] | None:
    """What attention is told where prompts have sources of several `lengths`, behind `before`
    tokens that all have; None where all are alike."""
    most = int(lengths.max())
    if int(lengths.min()) == most:
        return None
    mask = torch.arange(before + most) < before + lengths[:, None]
    return {"attention_mask": send(mask[:, None, None], device)}


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) to (B, H/2 W/2, 4 C)."""
    patches = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(packed: Tensor, height: int, width: int) -> Tensor:
    """Back to (B, C, H, W)."""
    patches = packed.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def shift_of(scheduler, tokens: int) -> float:
    """By how much the scheduler shifts noise levels for so many tokens."""
    config = scheduler.config
    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )


def shifted_schedule(
    scheduler, num_steps: int, mu: float, sigmas: Sequence[float] | None = None
) -> Schedule:
    """From 1 to 1/num_steps in equal steps, or `sigmas`, shifted by `mu`."""
    if sigmas is None:
        sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
    if scheduler.config.get("use_flow_sigmas"):
        sigmas = None
    timesteps, _ = retrieve_timesteps(scheduler, num_steps, "cpu", sigmas=sigmas, mu=mu)
    return Schedule(tuple(scheduler.sigmas.tolist()), tuple(timesteps.tolist()))
