"""Inputs of a model besides the latents: size, noise schedule and encoded prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.errors import UserError
from flow_grpo.perf.transfer import to_device

Inputs = dict[str, Tensor]  # encoded prompts by name, (N, ...) each


class Size(NamedTuple):
    """Size of images or videos, in pixels and frames."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True)
class LatentGrid:
    """Geometry that maps pixels to latents and latents to tokens."""

    channels: int
    scale: int  # pixels per latent, in height and width
    patch: int = 2  # latents per token
    max_pixels: int | None = None  # maximum height and width
    frame_scale: int = 0  # frames per latent frame after the first; 0: images only


def latent_shape(grid: LatentGrid, size: Size) -> tuple[int, ...]:
    """Return the shape of a sample's latents, (C, H, W), or (C, F, H, W) for video models.

    Raises:
        UserError: The model does not support the size.
    """
    unit = grid.scale * grid.patch
    for name, pixels in (("height", size.height), ("width", size.width)):
        if pixels < unit or pixels % unit or (grid.max_pixels and pixels > grid.max_pixels):
            limit = f" and at most {grid.max_pixels}" if grid.max_pixels else ""
            raise UserError(f"must be a multiple of {unit}{limit}", field=name, value=pixels)
    space = size.height // grid.scale, size.width // grid.scale
    if not grid.frame_scale:
        if size.frames != 1:
            raise UserError(
                "must be 1 for this model, which generates images",
                field="frames",
                value=size.frames,
            )
        return grid.channels, *space
    if size.frames < 1 or (size.frames - 1) % grid.frame_scale:
        raise UserError(
            f"must be 1 more than a multiple of {grid.frame_scale}",
            field="frames",
            value=size.frames,
        )
    return grid.channels, (size.frames - 1) // grid.frame_scale + 1, *space


@dataclass(frozen=True)
class Schedule:
    """Noise schedule of a model, as Python floats so that no step synchronizes with the device."""

    sigmas: tuple[float, ...]  # num_steps + 1, from about 1 down to 0
    timesteps: tuple[float, ...]  # num_steps, in the scheduler's units

    def __post_init__(self) -> None:
        """Raise ValueError for different lengths, UserError unless the noise levels decrease."""
        if not 0 < len(self.timesteps) == len(self.sigmas) - 1:
            raise ValueError(
                f"{len(self.sigmas)} sigmas must be one more than {len(self.timesteps)} timesteps, "
                "of which there must be at least one"
            )
        for before, after in pairwise(self.sigmas):
            if not before > after:  # also rejects NaN
                raise UserError(
                    f"the scheduler's sigmas must decrease, but {after:g} follows {before:g}",
                    hint="correct `shift` in scheduler_config.json",
                )

    def __len__(self) -> int:
        return len(self.timesteps)

    def dt(self, i: int) -> float:
        """Return sigma_{i+1} - sigma_i, which is negative."""
        return self.sigmas[i + 1] - self.sigmas[i]


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts of a batch, each distinct one stored once.

    Tensors on the CPU, such as lengths, stay there: families read them without a device sync.
    """

    inputs: Inputs
    positive: Tensor  # (B,), row of each sample's prompt in the inputs, on the CPU
    negative: Tensor | None  # (B,), row of its negative prompt; None without guidance

    def __len__(self) -> int:
        return len(self.positive)

    def __getitem__(self, part: slice | Tensor) -> "Conditioning":
        negative = None if self.negative is None else self.negative[part]
        return replace(self, positive=self.positive[part], negative=negative)

    def select(self, index: Tensor) -> Inputs:
        """Return these rows of the inputs."""
        return {k: each[to_device(index, each.device)] for k, each in self.inputs.items()}

    @staticmethod
    def concat(parts: "Sequence[Conditioning]") -> "Conditioning":
        """Concatenate batches; their prompts are padded to the longest."""
        counts = [len(next(iter(p.inputs.values()))) for p in parts]
        with_offset = list(zip(parts, accumulate(counts, initial=0), strict=False))
        guided = parts[0].negative is not None
        return Conditioning(
            {name: cat_padded([p.inputs[name] for p in parts]) for name in parts[0].inputs},
            positive=torch.cat([p.positive + start for p, start in with_offset]),
            negative=torch.cat([p.negative + start for p, start in with_offset])
            if guided
            else None,
        )


def cat_padded(tensors: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """Concatenate sequences (n, L, D), zero-padded to a common multiple of `multiple`."""
    if tensors[0].ndim < 3:
        return torch.cat(list(tensors))
    length = max(t.shape[1] for t in tensors)
    length += -length % multiple
    return torch.cat([F.pad(t, (0, 0, 0, length - t.shape[1])) for t in tensors])


def source_attention_kwargs(
    lengths: Tensor, before: int, device: torch.device
) -> dict[str, Tensor] | None:
    """Return an attention mask for source tokens of different lengths; None if all are equal.

    Args:
        lengths: Number of source tokens of each sample, (B,), on the CPU.
        before: Number of tokens in front of them, equal for all samples.
        device: Device of the mask.
    """
    max_length = int(lengths.max())
    if int(lengths.min()) == max_length:
        return None
    mask = torch.arange(before + max_length) < before + lengths[:, None]
    return {"attention_mask": to_device(mask[:, None, None], device)}


def pack_latents(latents: Tensor) -> Tensor:
    """Pack 2 x 2 latents into tokens: (B, C, H, W) to (B, H/2 W/2, 4 C)."""
    patches = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_latents(packed: Tensor, height: int, width: int) -> Tensor:
    """Invert `pack_latents`: (B, H/2 W/2, 4 C) to (B, C, H, W)."""
    patches = packed.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def compute_shift(scheduler: Any, tokens: int, *, default_max_shift: float = 1.15) -> float:
    """Return the scheduler's resolution-dependent shift mu for this number of tokens."""
    config = scheduler.config
    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", default_max_shift),
    )


def shifted_schedule(
    scheduler: Any, num_steps: int, mu: float | None, sigmas: Sequence[float] | None = None
) -> Schedule:
    """Return the schedule of a diffusers scheduler with dynamic or static shifting.

    Args:
        scheduler: The scheduler.
        num_steps: Number of steps.
        mu: Dynamic shift; None for a scheduler with a static one.
        sigmas: Noise levels before the shift; by default linear from 1 to 1 / num_steps.
    """
    if sigmas is None:
        sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
    if scheduler.config.get("use_flow_sigmas"):
        sigmas = None
    timesteps, _ = retrieve_timesteps(scheduler, num_steps, "cpu", sigmas=sigmas, mu=mu)
    return Schedule(tuple(scheduler.sigmas.tolist()), tuple(timesteps.tolist()))
