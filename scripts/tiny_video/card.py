"""Evaluate the trained small video model through the stock pipeline and write its model card."""

import argparse
import textwrap
from pathlib import Path

import torch
from diffusers import LTX2Pipeline
from PIL import Image
from tiny.saving import describe_device, format_parameters

from flow_grpo.audio import Audio
from flow_grpo.report.grid import image_grid
from flow_grpo.rewards.frames import frame_indices, to_pil
from flow_grpo.rewards.protocol import AUDIO
from flow_grpo.rewards.scorers.moving_shape import MovingShape
from tiny_video.model import TEXT_LENGTH
from tiny_video.prompts import Task
from tiny_video.videos import FRAMES, SIZE

SAMPLING_STEPS = 10
NUM_SHOWN, FRAMES_SHOWN = 8, 6
COMPONENTS = ("transformer", "connectors", "text_encoder", "vae", "audio_vae", "vocoder")
UNGUIDED = {  # the other guidance terms of the pipeline
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
}


def sample_tasks(
    pipeline: LTX2Pipeline, tasks: list[Task], seed: int
) -> tuple[list[list[Image.Image]], list[Audio]]:
    """Return a video and its sound for each task."""
    sampled = pipeline(
        [task.text for task in tasks],
        height=SIZE,
        width=SIZE,
        num_frames=FRAMES,
        num_inference_steps=SAMPLING_STEPS,
        max_sequence_length=TEXT_LENGTH,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        **UNGUIDED,
    )
    rate = pipeline.vocoder.config.output_sampling_rate
    sounds = [Audio(wave.float().cpu().numpy(), rate) for wave in sampled.audio]
    return to_pil(sampled.frames), sounds


def score_tasks(
    tasks: list[Task], videos: list[list[Image.Image]], sounds: list[Audio]
) -> dict[str, float]:
    """Return the fractions of videos that are right, in all and in each respect."""
    rows = [{**task.row(), AUDIO: sound} for task, sound in zip(tasks, sounds, strict=True)]
    scores, parts = MovingShape()(videos, [task.text for task in tasks], rows)
    everything = {"moving_shape": scores, **parts}
    return {name: round(sum(each) / len(each), 4) for name, each in everything.items()}


def sample_grid(tasks: list[Task], videos: list[list[Image.Image]]) -> Image.Image:
    """Return a grid with one video per row, as evenly spaced frames."""
    numbers = frame_indices(FRAMES, f"mean of {FRAMES_SHOWN}")
    rows = list(zip(tasks, videos, strict=True))[:NUM_SHOWN]
    shown = [video[number] for _, video in rows for number in numbers]
    captions = [text for task, _ in rows for text in (task.text, *[""] * (FRAMES_SHOWN - 1))]
    return image_grid(shown, captions, columns=FRAMES_SHOWN, min_width=3 * SIZE).quantize(64)


def write_card(
    folder: Path,
    args: argparse.Namespace,
    pipeline: LTX2Pipeline,
    *,
    scores: dict[str, float],
    minutes: float,
    log: dict[str, list[dict]],
) -> None:
    """Write the model card README.md: sizes, scores and the command that trained the model."""
    counts = {name: getattr(pipeline, name).num_parameters() for name in COMPONENTS}
    values = {
        "sizes": format_parameters(counts),
        "minutes": f"{minutes:.1f}",
        "device": describe_device(torch.device(args.device)),
        "steps": ", ".join(f"{name} {rows[-1]['step'] + 1}" for name, rows in log.items()),
        "prompts": args.eval_prompts,
        "sampling": SAMPLING_STEPS,
        **{f"wrong_{name}": f"{value:g}" for name, value in vars(args.wrong).items()},
    }
    folder.joinpath("README.md").write_text(
        _CARD.format(
            command=args.command,
            length=TEXT_LENGTH,
            scores="\n".join(f"| {name} | {value:.2f} |" for name, value in scores.items()),
            **{n: textwrap.fill(text.format(**values), 100) for n, text in _PARAGRAPHS.items()},
        )
    )


_PARAGRAPHS = {
    "summary": (
        "A small LTX-2 pipeline of video with sound that can be trained on a laptop. It uses "
        "diffusers' own classes and generates 17 frames of 32 x 32 pixels, in which a coloured "
        "circle moves, with 0.7 s of sound at 8 kHz, in which it beeps. Parameters: {sizes}."
    ),
    "data": (
        "All videos and sounds are synthetic (`scripts/tiny_video`). A fifth of the "
        "combinations is held out. Some training videos are wrong on purpose: independently of "
        "each other, a fraction of {wrong_color} has another colour, {wrong_direction} another "
        "direction and {wrong_beeps} another number of beeps."
    ),
    "recipe": (
        "This took {minutes} minutes on {device}. Steps of each stage: {steps}. The video VAE "
        "is trained with noise on its latents; then the audio VAE "
        "on log-mel spectrograms of 16 bins, and the vocoder on what it decodes; then the "
        "transformer and the connectors by flow matching. The text encoder is random: it only "
        "tells words apart. Weights are averaged and stored in half precision. Losses are in "
        "`training.json`."
    ),
    "measured": (
        "The table shows fractions of samples for {prompts} held-out prompts with {sampling} "
        "steps, scored by the reward `moving_shape`: 1 if all of the following parts are right."
    ),
}
_CARD = """\
---
license: mit
library_name: diffusers
pipeline_tag: text-to-video
---

# tiny-video

{summary}

![six frames of each of eight videos](samples.png)

```python
from diffusers import LTX2Pipeline

pipeline = LTX2Pipeline.from_pretrained("assets/tiny-video")
video, sound = pipeline(
    "a red circle moves left, then beeps twice",
    height=32,
    width=32,
    num_frames=17,
    num_inference_steps=10,
    guidance_scale=1.0,
    max_sequence_length={length},
    return_dict=False,
)
```

## Intended use

A base model for testing reinforcement learning of video models with sound. It is imperfect on
purpose, so that there is something to learn. It is not useful for video generation.

## Prompts

`a red circle moves left, then beeps twice`, with six colours (red, orange, yellow, green, blue,
purple), four directions (left, right, up, down), one to three beeps (`once`, `twice`, `three
times`), and `slides` or `flies` for `moves`, which mean the same.

## Data

{data}

## Recipe

    {command}

{recipe}

## Measured

{measured}

| | fraction |
|---|---|
{scores}

## Limitations

As in its training data, it often shows another colour or direction or beeps too often or too
rarely. It supports no other size and no other prompts.
"""
