"""VAEs of videos."""

import torch
from torch import Tensor

from flow_grpo.models.base import Config


def standardised(latents: Tensor, vae: Config) -> Tensor:
    """(B, C, F, H, W) as such a VAE takes them: with the mean and deviation of its own."""
    mean, std = (
        torch.tensor(vae[name], dtype=latents.dtype).to(latents.device)[:, None, None, None]
        for name in ("latents_mean", "latents_std")
    )
    return latents * std + mean
