"""Latents in packs of 2 x 2, and noise levels that are shifted by the size of the picture."""

import numpy as np
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from torch import Tensor

from flow_grpo.models.conditioning import Schedule


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) to (B, H/2 W/2, 4 C)."""
    patches = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(packed: Tensor, height: int, width: int) -> Tensor:
    """Back to (B, C, H, W)."""
    patches = packed.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def shifted_schedule(scheduler, num_steps: int, tokens: int) -> Schedule:
    """From 1 to 1/num_steps in equal steps, shifted as the scheduler says for so many tokens."""
    config = scheduler.config
    mu = calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
    if config.get("use_flow_sigmas"):
        sigmas = None
    timesteps, _ = retrieve_timesteps(scheduler, num_steps, "cpu", sigmas=sigmas, mu=mu)
    return Schedule(tuple(scheduler.sigmas.tolist()), tuple(timesteps.tolist()))
