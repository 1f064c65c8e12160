"""Train the VAE of the small model."""

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from tiny.graphs import capture_cuda_graph
from tiny.loop import Learner, fit
from tiny.pool import PromptPool

KL_WEIGHT = 1e-4
EDGE_WEIGHT = 0.5  # letters are edges
# Hue errors are small next to brightness errors: with L1 only, the model stays grey for long.
SQUARE_WEIGHT, HUE_WEIGHT = 2.0, 2.0
SCENE_SHARE = 0.3
PEAK_LR = 2e-3


def train_vae(
    vae: AutoencoderKL,
    pool: PromptPool,
    *,
    batch_size: int,
    steps: int,
    seconds: float,
    generator: torch.Generator,
) -> list[dict]:
    """Train in place and set the scaling and shift that normalize the latents."""
    learner = Learner(vae.parameters())
    is_cuda = pool.device.type == "cuda"

    def step(generator: torch.Generator) -> Tensor:
        learner.begin()
        images, _ = pool.images(batch_size, SCENE_SHARE, generator)
        images = 2 * images - 1
        with torch.autocast(pool.device.type, torch.bfloat16, enabled=is_cuda):
            posterior = vae.encode(images).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator, device=pool.device)
            decoded = vae.decode(posterior.mean + posterior.std * noise).sample
        loss = reconstruction_loss(decoded.float(), images) + KL_WEIGHT * kl(
            posterior.mean.float(), posterior.logvar.float()
        )
        learner.update(loss)
        return loss.detach()

    train_step = capture_cuda_graph(step, generator)
    log = fit(
        learner,
        lambda _: train_step,
        steps=steps,
        seconds=seconds,
        peak_lr=PEAK_LR,
        name="vae",
    )
    learner.use_average()
    set_latent_scale(vae, pool, generator)
    return log


def reconstruction_loss(decoded: Tensor, images: Tensor) -> Tensor:
    """Return the L1 error plus weighted errors of edges, squares and hue."""
    error = decoded - images
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    hue = error - error.mean(dim=1, keepdim=True)
    return (
        error.abs().mean()
        + EDGE_WEIGHT * edges
        + SQUARE_WEIGHT * error.square().mean()
        + HUE_WEIGHT * hue.abs().mean()
    )


def kl(mean: Tensor, logvar: Tensor) -> Tensor:
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()


@torch.no_grad()
def set_latent_scale(vae: AutoencoderKL, pool: PromptPool, generator: torch.Generator) -> None:
    images, _ = pool.images(256, SCENE_SHARE, generator)
    latents = vae.encode(2 * images - 1).latent_dist.mean
    vae.register_to_config(
        shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item()
    )
