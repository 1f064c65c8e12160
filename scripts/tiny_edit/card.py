"""Evaluate the trained small editing model through the stock pipeline and write its model card."""

import argparse
import textwrap
from pathlib import Path

import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from tiny.images import HEIGHT, WIDTH
from tiny.saving import describe_device, format_parameters

from flow_grpo.report.grid import image_grid
from flow_grpo.rewards.scorers.geneval import GenEval
from tiny_edit.data import source_images
from tiny_edit.edits import KINDS, Edit, geneval_task
from tiny_edit.tables import TEXT_LENGTH

SAMPLING_STEPS = 10
NUM_SHOWN = 16

EditsOnGrey = list[tuple[Edit, float]]  # each edit with its background grey level


def sample_tries(
    pipeline: FluxKontextPipeline, edits: EditsOnGrey, tries: int
) -> list[list[Image.Image]]:
    """Return `tries` lists of one image per edit, each image with its own seed."""
    sources = source_images(edits)
    return [
        pipeline(
            image=sources,
            prompt=[edit.text for edit, _ in edits],
            height=HEIGHT,
            width=WIDTH,
            max_area=HEIGHT * WIDTH,
            num_inference_steps=SAMPLING_STEPS,
            max_sequence_length=TEXT_LENGTH,
            generator=[
                torch.Generator().manual_seed(len(edits) * number + index)
                for index in range(len(edits))
            ],
            _auto_resize=False,
        ).images
        for number in range(tries)
    ]


def measure(edits: EditsOnGrey, tries: list[list[Image.Image]]) -> dict[str, float]:
    """Return fractions of images that satisfy the rules, and of edits with correct samples.

    Returns:
        Fractions of images: `strict`, all rules hold, also for each kind of edit; `asked`, those
        of the instruction hold; `kept`, those of the rest of the scene hold. Fractions of edits:
        with at least one correct sample, and with both correct and wrong samples.
    """
    reward = GenEval(detector="shapes", score="strict")
    texts, tasks = [e.text for e, _ in edits], [geneval_task(e) for e, _ in edits]
    scored = [reward(images, texts, tasks) for images in tries]
    strict = torch.tensor([scores for scores, _ in scored])  # (tries, edits)
    mean = strict.mean(0)
    shares = {"strict": mean}
    for part in ("asked", "kept"):
        shares[part] = torch.tensor([extras[part] for _, extras in scored])
    for kind in KINDS:
        shares[kind] = mean[[edit.kind == kind for edit, _ in edits]]
    shares[f"at least one of {len(tries)} correct"] = strict.amax(0)
    shares["both correct and wrong samples"] = ((mean > 0) & (mean < 1)).float()
    return {name: round(values.mean().item(), 4) for name, values in shares.items()}


def sample_grid(edits: EditsOnGrey, tries: list[list[Image.Image]]) -> Image.Image:
    """Return a grid of source images, each followed by two samples."""
    rows = list(zip(edits, source_images(edits), *tries[:2], strict=True))[:NUM_SHOWN]
    shown = [image for _, *row in rows for image in row]
    captions = [text for (edit, _), *_ in rows for text in (edit.text, "one", "two")]
    return image_grid(shown, captions, columns=6, min_width=2 * WIDTH).quantize(64)


def write_card(
    folder: Path,
    args: argparse.Namespace,
    *,
    scores: dict[str, float],
    minutes: float,
    steps: int,
    parameters: dict[str, int],
) -> None:
    """Write the model card README.md: sizes, scores and the command that trained the model."""
    values = {
        "sizes": format_parameters(parameters),
        "half": f"{args.wrong / 2:g}",
        "minutes": f"{minutes:.1f}",
        "device": describe_device(torch.device(args.device)),
        "steps": steps,
        "batch": args.batch_size,
        "edits": args.eval_edits,
        "tries": args.tries,
        "sampling": SAMPLING_STEPS,
    }
    folder.joinpath("README.md").write_text(
        _CARD.format(
            length=TEXT_LENGTH,
            command=args.command,
            scores="\n".join(f"| {name} | {value:.2f} |" for name, value in scores.items()),
            **{n: textwrap.fill(text.format(**values), 100) for n, text in _PARAGRAPHS.items()},
        )
    )


_PARAGRAPHS = {
    "summary": (
        "A small FLUX.1-Kontext pipeline that can be trained on a laptop. It uses diffusers' own "
        "classes and edits 32 x 96 images (height x width) of coloured shapes by instruction. "
        "Parameters: {sizes}."
    ),
    "data": (
        "All scenes are synthetic (`scripts/tiny_edit`) and encoded with the VAE of "
        "`assets/tiny-sd3` before training. A tenth of the scenes is held out. Some targets are "
        "wrong on purpose, with the same instructions: a fraction of {half} is the unchanged "
        "source, and in another fraction of {half} a shape has the wrong colour."
    ),
    "recipe": (
        "This took {minutes} minutes on {device}: {steps} steps of flow matching with {batch} "
        "edits each, for the text encoders and the transformer together, with uniform sigmas "
        "shifted by the scheduler. Weights are averaged and stored in half precision. Losses are "
        "in `training.json`."
    ),
    "measured": (
        "The table shows fractions for {edits} held-out edits with {tries} samples each and "
        "{sampling} steps, scored by the rules of `geneval`. `strict` means that all rules hold, "
        "`asked` that those of the instruction hold, and `kept` that those of the rest of the "
        "scene hold. The next rows show `strict` by kind of edit."
    ),
}
_CARD = """\
---
license: mit
library_name: diffusers
pipeline_tag: image-to-image
---

# tiny-edit

{summary}

![source image and two samples](samples.png)

```python
from diffusers import FluxKontextPipeline
from PIL import Image

pipeline = FluxKontextPipeline.from_pretrained("assets/tiny-edit")
edited = pipeline(
    image=Image.open("dataset/edits/images/test-000.png"),
    prompt="make the triangle purple",
    height=32,
    width=96,
    max_area=32 * 96,
    num_inference_steps=10,
    max_sequence_length={length},
    _auto_resize=False,
).images[0]
```

## Intended use

A base model for testing reinforcement learning of image editing models. It is imperfect on purpose,
so that there is something to learn. It is not useful for image generation.

## Prompts

- `make the circle blue`
- `remove the square`
- `turn the triangle into a circle`
- `put a green triangle left of the circle`, or `right of`

Source images have two or three shapes (circle, square, triangle, each at most once) in four
positions and six colours (red, orange, yellow, green, blue, purple) on a light background.

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

As in its training data, it often leaves the image unchanged or gives another shape a new colour. It
supports no other image size and no other prompts.
"""
