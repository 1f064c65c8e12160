"""Measures a finished small model as its users will call it, and writes its model card."""

import random
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.show.grid import picture_grid
from tiny.pictures import HEIGHT, WIDTH, Degradation
from tiny.prompts import scenes_by_kind, sign_prompt
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
    """A plain pipeline call, one seed per prompt."""
    pictures: list[Image.Image] = []
    for start in range(0, len(prompts), batch_size):
        chunk = prompts[start : start + batch_size]
        seeds = range(start, start + len(chunk))
        pictures += pipeline(
            chunk,
            height=HEIGHT,
            width=WIDTH,
            num_inference_steps=SAMPLING_STEPS,
            guidance_scale=guidance,
            max_sequence_length=t5_length,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        ).images
    return pictures


def score_signs(
    pipeline: StableDiffusion3Pipeline, num_words: int, t5_lengths: tuple[int, int]
) -> dict[str, float] | None:
    """Mean OCR score on held-out words by setting; None where OCR is not installed."""
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
    """Held-out signs above, scenes below, each under its prompt."""
    rng = random.Random(0)
    half = columns * rows // 2
    signs = [sign_prompt(word) for word in rng.sample(split_words()[1], half)]
    scenes = [str(rng.choice(kind)) for kind in scenes_by_kind() for _ in range(half // 3)]
    prompts = signs + scenes
    pictures = sample(pipeline, prompts, guidance=1.0, t5_length=t5_length)
    captions = [prompt.removeprefix("a sign that says ") for prompt in prompts]
    return picture_grid(pictures, captions, columns=columns, min_width=3 * WIDTH)


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
    rows = "\n".join(f"| {setting} | {value:.2f} |" for setting, value in (scores or {}).items())
    measured = (
        f"Mean OCR score on {num_words} held-out words, {SAMPLING_STEPS} steps, one seed per "
        f"prompt, by\n`flow_grpo.rewards.scorers.ocr`:\n\n| setting | score |\n|---|---|\n{rows}"
        if scores
        else "OCR was not installed when this model was made: nothing was measured."
    )
    sizes = ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in parameters.items())
    folder.joinpath("README.md").write_text(
        _CARD.format(
            sizes=sizes,
            measured=measured,
            command=command,
            minutes=f"{minutes:.1f}",
            device=device,
            vae_steps=steps_done["vae"],
            flow_steps=steps_done["flow"],
            **{name: f"{value:g}" for name, value in vars(degradation).items()},
        )
    )


_CARD = """\
---
license: mit
library_name: diffusers
pipeline_tag: text-to-image
---

# tiny-sd3

A Stable Diffusion 3 pipeline of the real classes, small enough to train on a laptop: it draws
32 x 96 pictures (height x width) of signs and of coloured shapes. Parameters: {sizes}.

![samples](samples.png)

```python
from diffusers import StableDiffusion3Pipeline

pipeline = StableDiffusion3Pipeline.from_pretrained("assets/tiny-sd3")
picture = pipeline(
    'a sign that says "HELLO"', height=32, width=96, num_inference_steps=10, guidance_scale=1.0
).images[0]
```

## Intended use

A base model for trying out and testing reinforcement learning of flow-matching models. It is
imperfect on purpose, so that there is something to mend. It is of no use for pictures as such.

## Prompts

- `a sign that says "WORD"`: three to six capital letters.
- `two red circles`, `a blue square left of a yellow triangle`, `three green circles and an orange
  square`: one to four shapes (circle, square, triangle) in all, six colours (red, orange, yellow,
  green, blue, purple).

## Data

Pictures are drawn while training (`scripts/tiny/pictures.py`); no picture of anyone else is
used. Words are random strings and, one in ten, English words; the held-out words of
`dataset/ocr/test.txt` are left out. Spoiled on purpose, with the same prompts as the rest:

- signs: a share of {blur_share} is blurred (Gaussian, up to {blur_sigma} pixels) and a share of \
{low_contrast_share} is pale
  (at most {low_contrast} of the contrast);
- scenes: a share of {wrong_share} has a wrong count or a wrong colour.

## Recipe

    {command}

took {minutes} minutes on {device}: {vae_steps} steps of VAE (L1, L2, edges, hue, a little KL), then
{flow_steps} steps of flow matching for text encoders and transformer together, sigma uniform
through the scheduler's shift, one prompt in ten empty. Weights are averaged and stored in half
precision. Losses are in `training.json`.

## Measured

{measured}

## What it gets wrong

It draws spoiled pictures too, for the same prompts, as its training data has them. It knows one
font and one size of text, no small letters, digits or spaces, no other size of picture, and
nothing outside the prompts above.
"""
