"""Evaluate a trained small model through the stock pipeline and write its model card."""

import random
import textwrap
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.report.grid import image_grid
from tiny.images import HEIGHT, WIDTH, Degradation
from tiny.prompts import scenes_by_kind, sign_prompt
from tiny.saving import format_parameters
from tiny.words import split_words

SAMPLING_STEPS = 10


def sample(
    pipeline: StableDiffusion3Pipeline,
    prompts: list[str],
    *,
    guidance: float,
    t5_length: int,
    batch_size: int = 32,
) -> list[Image.Image]:
    """Sample one image per prompt with diffusers, one seed per prompt."""
    images: list[Image.Image] = []
    for start in range(0, len(prompts), batch_size):
        chunk = prompts[start : start + batch_size]
        seeds = range(start, start + len(chunk))
        images += pipeline(
            chunk,
            height=HEIGHT,
            width=WIDTH,
            num_inference_steps=SAMPLING_STEPS,
            guidance_scale=guidance,
            max_sequence_length=t5_length,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        ).images
    return images


def score_signs(
    pipeline: StableDiffusion3Pipeline, num_words: int, t5_lengths: tuple[int, int]
) -> dict[str, float] | None:
    """Return the mean OCR score on held-out words by setting, or None without OCR installed."""
    from flow_grpo.rewards.scorers.ocr import OcrScorer

    prompts = [sign_prompt(word) for word in split_words()[1][:num_words]]
    short, long = t5_lengths
    settings = [(1.0, long), (1.0, short), (4.5, long)]
    try:
        scorer = OcrScorer()
    except UserError as error:
        print(f"signs are not scored: {error}")
        return None
    with scorer:
        return {
            f"guidance {guidance:g}, {t5_length} T5 tokens": _mean(
                scorer(sample(pipeline, prompts, guidance=guidance, t5_length=t5_length), prompts)
            )
            for guidance, t5_length in settings
        }


def _mean(scores: list[float]) -> float:
    return round(sum(scores) / len(scores), 4)


def sample_grid(
    pipeline: StableDiffusion3Pipeline, *, t5_length: int, columns: int = 4, rows: int = 12
) -> Image.Image:
    """Return a grid of held-out signs and scenes with their prompts."""
    rng = random.Random(0)
    half = columns * rows // 2
    signs = [sign_prompt(word) for word in rng.sample(split_words()[1], half)]
    scenes = [str(rng.choice(kind)) for kind in scenes_by_kind() for _ in range(half // 3)]
    prompts = signs + scenes
    images = sample(pipeline, prompts, guidance=1.0, t5_length=t5_length)
    captions = [prompt.removeprefix("a sign that says ") for prompt in prompts]
    return image_grid(images, captions, columns=columns, min_width=3 * WIDTH)


def write_card(
    folder: Path,
    *,
    degradation: Degradation,
    scores: dict[str, float] | None,
    num_words: int,
    command: str,
    minutes: float,
    device: str,
    steps_done: dict[str, int],
    parameters: dict[str, int],
) -> None:
    """Write the model card README.md: sizes, scores and the command that trained the model."""
    rows = "\n".join(f"| {setting} | {value:.2f} |" for setting, value in (scores or {}).items())
    measured = (
        f"The table shows the mean OCR score on {num_words} held-out words with {SAMPLING_STEPS} "
        "steps and one seed per prompt,\ncomputed by `flow_grpo.rewards.scorers.ocr`.\n\n"
        f"| setting | score |\n|---|---|\n{rows}"
        if scores
        else "Not evaluated: OCR was not installed when this model was trained."
    )
    folder.joinpath("README.md").write_text(
        _CARD.format(
            summary=textwrap.fill(_SUMMARY.format(sizes=format_parameters(parameters)), 100),
            measured=measured,
            command=command,
            minutes=f"{minutes:.1f}",
            device=device,
            vae_steps=steps_done["vae"],
            flow_steps=steps_done["flow"],
            **{name: f"{value:g}" for name, value in vars(degradation).items()},
        )
    )


_SUMMARY = (
    "A small Stable Diffusion 3 pipeline that can be trained on a laptop. It uses diffusers' own "
    "classes and generates 32 x 96 images (height x width) of signs and of coloured shapes. "
    "Parameters: {sizes}."
)
_CARD = """\
---
license: mit
library_name: diffusers
pipeline_tag: text-to-image
---

# tiny-sd3

{summary}

![samples](samples.png)

```python
from diffusers import StableDiffusion3Pipeline

pipeline = StableDiffusion3Pipeline.from_pretrained("assets/tiny-sd3")
image = pipeline(
    'a sign that says "HELLO"', height=32, width=96, num_inference_steps=10, guidance_scale=1.0
).images[0]
```

## Intended use

A base model for testing reinforcement learning of flow-matching models. It is imperfect on purpose,
so that there is something to learn. It is not useful for image generation.

## Prompts

- `a sign that says "WORD"`: three to six capital letters.
- `two red circles`, `a blue square left of a yellow triangle`,
  `three green circles and an orange square`: one to four shapes (circle, square, triangle) in all,
  in six colours (red, orange, yellow, green, blue, purple).

## Data

Images are synthetic and generated during training (`scripts/tiny/images.py`). Nine in ten words are
random strings and one in ten is an English word; the held-out words of `dataset/ocr/test.txt` are
excluded. Some images are degraded on purpose, with the same prompts:

- signs: a fraction of {blur_share} is blurred (Gaussian, up to {blur_sigma} pixels) and a \
fraction of {low_contrast_share} is pale
  (at most {low_contrast} of the contrast);
- scenes: a fraction of {wrong_share} has a wrong count or a wrong colour.

## Recipe

    {command}

This took {minutes} minutes on {device}: {vae_steps} steps for the VAE (L1, L2, edges, hue, a little
KL), then {flow_steps} steps of flow matching for the text encoders and the transformer together,
with uniform sigmas shifted by the scheduler and one empty prompt in ten.
Weights are averaged and stored in half precision. Losses are in `training.json`.

## Measured

{measured}

## Limitations

It also generates degraded images, as in its training data. It supports one font and one text size,
but no lower-case letters, digits or spaces, no other image size and no other prompts.
"""
