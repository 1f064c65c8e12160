"""Training of the video VAE, the audio VAE and the vocoder on synthetic videos and sounds."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video
from diffusers.pipelines.ltx2 import LTX2Vocoder
from tiny.loop import Learner, fit
from torch import Tensor, nn

from flow_grpo.rewards.scorers.geneval.rules import RGB
from tiny_video.prompts import COLOURS, COUNTS, DIRECTIONS
from tiny_video.videos import beep_waves, circle_masks, compose, log_mel

PATHS = 240  # videos per direction; colours are drawn for each batch
SOUNDS = 2048
RATE = 2e-3  # peak learning rate
EMA_DECAY = 0.99
SHAPE_WEIGHT = (
    3.0  # additional weight of the pixels of the circle, which covers an eighth of a frame
)
LATENT_PENALTY = 1e-4
LATENT_NOISE = 0.1  # of the latents' scale
LOSS_SCALE = 10.0


def train_on(
    modules: list[nn.Module], loss: Callable[[], Tensor], *, steps: int, seconds: float, name: str
) -> list[dict]:
    """Minimize a loss, which draws its own batches, and keep the averaged weights."""
    learner = Learner((p for module in modules for p in module.parameters()), EMA_DECAY)

    def step() -> Tensor:
        learner.begin()
        value = loss()
        learner.update(value)
        return value.detach()

    log = fit(learner, lambda _: step, steps=steps, seconds=seconds, peak_lr=RATE, name=name)
    learner.use_average()
    return log


class VideoSource:
    """Random videos with their masks; the masks are drawn once."""

    def __init__(self, generator: torch.Generator, paths: int = PATHS) -> None:
        directions = torch.arange(len(DIRECTIONS)).repeat(paths)
        self.masks = circle_masks(directions, generator)
        self.colours = torch.tensor([RGB[name] for name in COLOURS])
        self.generator = generator

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return videos (B, 3, F, 32, 32) in [0, 1] and masks (B, F, 32, 32)."""
        rows = torch.randint(len(self.masks), (size,), generator=self.generator)
        colours = torch.randint(len(self.colours), (size,), generator=self.generator)
        return compose(self.masks[rows], self.colours[colours]), self.masks[rows]


def reconstruction_loss(decoded: Tensor, videos: Tensor, masks: Tensor) -> Tensor:
    """Return the squared error of decoded videos in [-1, 1], larger weights on the circle."""
    error = (decoded / 2 + 0.5 - videos).square()
    return LOSS_SCALE * (error * (1 + SHAPE_WEIGHT * masks[:, None])).mean()


def train_video_vae(
    vae: AutoencoderKLLTX2Video, source: VideoSource, *, batch: int, steps: int, seconds: float
) -> list[dict]:
    """Train encoder and decoder; with noise on the latents, as sampled ones are imperfect."""

    def loss() -> Tensor:
        videos, masks = source.batch(batch)
        latents = vae.encode(2 * videos - 1).latent_dist.mode()
        noise = torch.randn(latents.shape, generator=source.generator)
        decoded = vae.decode(latents + LATENT_NOISE * latents.detach().std() * noise).sample
        penalty = LATENT_PENALTY * latents.square().mean()
        return reconstruction_loss(decoded, videos, masks) + penalty

    return train_on([vae], loss, steps=steps, seconds=seconds, name="video VAE")


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
    counts = torch.randint(1, 1 + len(COUNTS), (SOUNDS,), generator=generator)
    waves = beep_waves(counts, generator)
    mels = log_mel(waves)

    def reconstruct(target: Tensor) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(target).latent_dist
        decoded = vae.decode(posterior.sample(generator=generator)).sample
        return decoded, posterior.kl().mean() / posterior.mean[0].numel()

    def vae_loss() -> Tensor:
        target = mels[torch.randint(SOUNDS, (batch,), generator=generator)]
        decoded, divergence = reconstruct(target)
        return F.mse_loss(decoded, target) / 4 + 1e-3 * divergence

    def vocoder_loss() -> Tensor:
        rows = torch.randint(SOUNDS, (batch // 2,), generator=generator)
        with torch.no_grad():
            decoded, _ = reconstruct(mels[rows])
        wave, target = vocoder(decoded), waves[rows, None].repeat(1, 2, 1)
        return F.l1_loss(wave, target) + F.mse_loss(wave, target)

    limits = {"steps": steps, "seconds": seconds / 2}
    return {
        "audio_vae": train_on([vae], vae_loss, **limits, name="audio VAE"),
        "vocoder": train_on([vocoder], vocoder_loss, **limits, name="vocoder"),
    }
