"""Training of the video VAE, the audio VAE and the vocoder on synthetic videos and sounds."""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video
from diffusers.pipelines.ltx2 import LTX2Vocoder
from tiny.graphs import Step, capture_cuda_graph
from tiny.loop import Learner, fit
from torch import Tensor, nn

from flow_grpo.rewards.scorers.geneval.rules import RGB
from tiny_video.prompts import COLOURS, COUNTS, DIRECTIONS
from tiny_video.videos import (
    beep_waves,
    circle_masks,
    compose,
    draw_indices,
    draw_normal,
    log_mel,
)

SOUNDS = 2048
RATE = 2e-3  # peak learning rate
EMA_DECAY = 0.99
SHAPE_WEIGHT = (
    3.0  # additional weight of the pixels of the circle, which covers an eighth of a frame
)
LATENT_PENALTY = 1e-4
LATENT_NOISE = 0.2  # of the latents' scale
LOSS_SCALE = 10.0


def train_on(
    modules: list[nn.Module],
    loss: Step,
    generator: torch.Generator,
    *,
    steps: int,
    seconds: float,
    name: str,
) -> list[dict]:
    """Minimize a loss, which draws its own batches, and keep the averaged weights."""
    learner = Learner((p for module in modules for p in module.parameters()), EMA_DECAY)

    def step(generator: torch.Generator) -> Tensor:
        learner.begin()
        value = loss(generator)
        learner.update(value)
        return value.detach()

    train_step = capture_cuda_graph(step, generator)
    limits = {"steps": steps, "seconds": seconds}
    log = fit(learner, lambda _: train_step, **limits, peak_lr=RATE, name=name)
    learner.use_average()
    return log


class VideoSource:
    """Random videos with their masks; the masks are drawn once."""

    def __init__(self, generator: torch.Generator, paths: int) -> None:
        directions = torch.arange(len(DIRECTIONS)).repeat(paths)
        self.masks = circle_masks(directions, generator)
        self.colours = torch.tensor([RGB[name] for name in COLOURS], device=generator.device)

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return videos (B, 3, F, 32, 32) in [0, 1] and masks (B, F, 32, 32)."""
        rows = draw_indices(len(self.masks), size, generator)
        colours = draw_indices(len(self.colours), size, generator)
        return compose(self.masks[rows], self.colours[colours]), self.masks[rows]


def reconstruction_loss(decoded: Tensor, videos: Tensor, masks: Tensor) -> Tensor:
    """Return the squared error of decoded videos in [-1, 1], larger weights on the circle."""
    error = (decoded / 2 + 0.5 - videos).square()
    return LOSS_SCALE * (error * (1 + SHAPE_WEIGHT * masks[:, None])).mean()


def train_video_vae(
    vae: AutoencoderKLLTX2Video,
    source: VideoSource,
    generator: torch.Generator,
    *,
    batch: int,
    steps: int,
    seconds: float,
) -> list[dict]:
    """Train encoder and decoder; with noise on the latents, as sampled ones are imperfect."""

    def loss(generator: torch.Generator) -> Tensor:
        videos, masks = source.batch(batch, generator)
        latents = vae.encode(2 * videos - 1).latent_dist.mode()
        noise = draw_normal(latents.shape, generator)
        decoded = vae.decode(latents + LATENT_NOISE * latents.detach().std() * noise).sample
        penalty = LATENT_PENALTY * latents.square().mean()
        return reconstruction_loss(decoded, videos, masks) + penalty

    return train_on([vae], loss, generator, steps=steps, seconds=seconds, name="video VAE")


def train_sound(
    vae: AutoencoderKLLTX2Audio,
    vocoder: LTX2Vocoder,
    generator: torch.Generator,
    *,
    batch: int,
    steps: int,
    seconds: float,
) -> dict[str, list[dict]]:
    """Train the audio VAE on log-mel spectrograms, then the vocoder on what it decodes."""
    waves = beep_waves(1 + draw_indices(len(COUNTS), SOUNDS, generator), generator)
    mels = log_mel(waves)

    def reconstruct(target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(target).latent_dist
        decoded = vae.decode(posterior.sample(generator=generator)).sample
        return decoded, posterior.kl().mean() / posterior.mean[0].numel()

    def vae_loss(generator: torch.Generator) -> Tensor:
        target = mels[draw_indices(SOUNDS, batch, generator)]
        decoded, divergence = reconstruct(target, generator)
        return F.mse_loss(decoded, target) / 4 + 1e-3 * divergence

    def vocoder_loss(generator: torch.Generator) -> Tensor:
        rows = draw_indices(SOUNDS, batch // 2, generator)
        with torch.no_grad():
            decoded, _ = reconstruct(mels[rows], generator)
        wave, target = vocoder(decoded), waves[rows, None].repeat(1, 2, 1)
        return F.l1_loss(wave, target) + F.mse_loss(wave, target)

    limits = {"steps": steps, "seconds": seconds / 2}
    return {
        "audio_vae": train_on([vae], vae_loss, generator, **limits, name="audio VAE"),
        "vocoder": train_on([vocoder], vocoder_loss, generator, **limits, name="vocoder"),
    }
