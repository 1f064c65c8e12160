"""Flow matching of the small video model: latents encoded once, prompts with some wrong videos."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import LTX2Pipeline
from tiny.graphs import capture_cuda_graph
from tiny.loop import Learner, fit
from torch import Tensor

from tiny_video.model import TEXT_LENGTH
from tiny_video.prompts import COLOURS, COUNTS, DIRECTIONS, Task, split_tasks
from tiny_video.videos import FPS, beep_waves, draw, draw_indices, draw_normal, log_mel, render

SOUNDS = 512  # per number of beeps
SIGMA_MEAN, SIGMA_SPREAD = 0.5, 1.2  # of the logit of sigma
AUDIO_WEIGHT = 0.5
EMA_DECAY = 0.998
WATCH_EVERY = 1000  # steps


@dataclass(frozen=True)
class Wrong:
    """Fractions of the training videos that are wrong on purpose, in each respect."""

    color: float = 0.15
    direction: float = 0.2
    beeps: float = 0.2


class Pool:
    """Normalized, packed latents of all videos and sounds, and the texts of the training prompts.

    Sets the statistics of the latents in both VAEs.
    """

    @torch.no_grad()
    def __init__(
        self,
        pipeline: LTX2Pipeline,
        generator: torch.Generator,
        videos: int,
        sounds: int = SOUNDS,
    ) -> None:
        parts = [
            [Task(color, direction, 1)] * videos for color in COLOURS for direction in DIRECTIONS
        ]
        encoded = torch.stack(
            [pipeline.vae.encode(2 * render(p, generator) - 1).latent_dist.mode() for p in parts]
        )
        self.grid = encoded.shape[3:]  # frames, rows, columns
        self.videos = normalize(pipeline.vae, encoded.flatten(3).transpose(2, 3))
        heard = [torch.full((sounds,), number) for number in COUNTS]
        mels = torch.stack([log_mel(beep_waves(part, generator)) for part in heard])
        latents = pipeline.audio_vae.encode(mels.flatten(0, 1)).latent_dist.mode()
        latents = latents.transpose(1, 2).flatten(2).unflatten(0, mels.shape[:2])
        self.sounds = normalize(pipeline.audio_vae, latents)
        tasks = split_tasks()["train"]
        self.states, self.mask, *_ = pipeline.encode_prompt(
            [task.text for task in tasks],
            do_classifier_free_guidance=False,
            max_sequence_length=TEXT_LENGTH,
            device=generator.device,
        )
        rows = [
            (
                COLOURS.index(task.color),
                DIRECTIONS.index(task.direction),
                task.beeps - 1,
            )
            for task in tasks
        ]
        self.tasks = torch.tensor(rows, device=generator.device)

    def batch(
        self, size: int, wrong: Wrong, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return video latents, audio latents and the indices of their prompts."""
        row = draw_indices(len(self.tasks), size, generator)
        colour, direction, beeps = self.tasks[row].unbind(1)
        colour = _corrupt(colour, len(COLOURS), wrong.color, generator)
        direction = _corrupt(direction, len(DIRECTIONS), wrong.direction, generator)
        beeps = _corrupt(beeps, len(COUNTS), wrong.beeps, generator)
        kind = colour * len(DIRECTIONS) + direction
        number = draw_indices(self.videos.shape[1], size, generator)
        sound = draw_indices(self.sounds.shape[1], size, generator)
        return self.videos[kind, number], self.sounds[beeps, sound], row


def normalize(vae: torch.nn.Module, latents: Tensor) -> Tensor:
    """Normalize latents (..., C) and store their statistics in the VAE."""
    rows = latents.flatten(0, -2)
    vae.latents_mean.copy_(rows.mean(0))
    vae.latents_std.copy_(rows.std(0))
    return ((latents - vae.latents_mean) / vae.latents_std).contiguous()


def _corrupt(values: Tensor, count: int, share: float, generator: torch.Generator) -> Tensor:
    """Replace a share of the values, integers below `count`, by other ones."""
    other = values + 1 + draw_indices(count - 1, len(values), generator)
    is_wrong = draw(values.shape, generator) < share
    return torch.where(is_wrong, other % count, values)


def train_flow(
    pipeline: LTX2Pipeline,
    pool: Pool,
    generator: torch.Generator,
    *,
    wrong: Wrong,
    batch: int,
    steps: int,
    seconds: float,
    peak_lr: float,
    watch: Callable[[int], None] = lambda step: None,
) -> list[dict]:
    """Train connectors and transformer; the text encoder stays random.

    Args:
        pipeline: Its transformer and connectors are trained in place.
        pool: The latents and prompts.
        generator: Draws the batches.
        wrong: Fractions of wrong videos and sounds.
        batch: Number of videos per step.
        steps: Maximum number of steps.
        seconds: Time limit.
        peak_lr: Peak learning rate.
        watch: Called every thousand steps, with the averaged weights in place.
    """
    transformer, connectors = pipeline.transformer, pipeline.connectors
    learner = Learner([*transformer.parameters(), *connectors.parameters()], EMA_DECAY)
    # Prepared in advance: a CUDA graph cannot copy constants to the GPU.
    coords = {
        "video_coords": transformer.rope.prepare_video_coords(
            batch, *pool.grid, generator.device, fps=FPS
        ),
        "audio_coords": transformer.audio_rope.prepare_audio_coords(
            batch, pool.sounds.shape[2], generator.device
        ),
    }

    def step(generator: torch.Generator) -> Tensor:
        learner.begin()
        video, sound, row = pool.batch(batch, wrong, generator)
        sigma = torch.sigmoid(SIGMA_MEAN + SIGMA_SPREAD * draw_normal(batch, generator))
        noise = draw_normal(video.shape, generator)
        sound_noise = draw_normal(sound.shape, generator)
        embeds, audio_embeds, _ = connectors(
            pool.states[row], pool.mask[row], padding_side=pipeline.tokenizer.padding_side
        )
        weight, timestep = sigma[:, None, None], 1000 * sigma
        velocity, sound_velocity = transformer(
            hidden_states=torch.lerp(video, noise, weight),
            audio_hidden_states=torch.lerp(sound, sound_noise, weight),
            encoder_hidden_states=embeds,
            audio_encoder_hidden_states=audio_embeds,
            timestep=timestep,
            audio_timestep=timestep,
            sigma=timestep,
            **coords,
            use_cross_timestep=True,
            return_dict=False,
        )
        loss = F.mse_loss(velocity, noise - video)
        loss = loss + AUDIO_WEIGHT * F.mse_loss(sound_velocity, sound_noise - sound)
        learner.update(loss)
        return loss.detach()

    train_step = capture_cuda_graph(step, generator)

    def step_at(number: int) -> Callable[[], Tensor]:
        if number and number % WATCH_EVERY == 0:
            trained = [parameter.detach().clone() for parameter in learner.parameters]
            learner.use_average()
            watch(number)
            with torch.no_grad():
                torch._foreach_copy_(learner.parameters, trained)
        return train_step

    log = fit(
        learner,
        step_at,
        steps=steps,
        seconds=seconds,
        peak_lr=peak_lr,
        name="flow matching",
    )
    learner.use_average()
    return log
