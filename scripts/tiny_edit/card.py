"""Measures the finished small model that edits, through the stock pipeline, and writes its card."""

import argparse
from pathlib import Path

import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from tiny.pictures import HEIGHT, WIDTH

from flow_grpo.rewards.scorers.geneval import GenEval
from flow_grpo.show.grid import picture_grid
from tiny_edit.data import pictures
from tiny_edit.edits import KINDS, Edit, task_of
from tiny_edit.tables import TEXT_LENGTH

SAMPLING_STEPS = 10
SHOWN = 16

Grounded = list[tuple[Edit, float]]  # each edit with the grey behind it


def draw_tries(
    pipeline: FluxKontextPipeline, edits: Grounded, tries: int
) -> list[list[Image.Image]]:
    """One picture per edit in each try, each from a seed of its own."""
    sources = pictures(edits)
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
                torch.Generator().manual_seed(len(edits) * number + place)
                for place in range(len(edits))
            ],
            _auto_resize=False,
        ).images
        for number in range(tries)
    ]


def measure(edits: Grounded, tries: list[list[Image.Image]]) -> dict[str, float]:
    """Shares of pictures where all rules hold, those for what was asked and those for the rest; and
    shares of edits with at least one right try, and with both right and wrong ones."""
    reward = GenEval(detector="shapes", score="strict")
    texts, tasks = [e.text for e, _ in edits], [task_of(e) for e, _ in edits]
    scored = [reward(drawn, texts, tasks) for drawn in tries]
    strict = torch.tensor([scores for scores, _ in scored])  # (tries, edits)
    mean = strict.mean(0)
    shares = {"strict": mean}
    for part in ("asked", "kept"):
        shares[part] = torch.tensor([extras[part] for _, extras in scored])
    for kind in KINDS:
        shares[kind] = mean[[edit.kind == kind for edit, _ in edits]]
    shares[f"right once in {len(tries)}"] = strict.amax(0)
    shares["right and wrong ones"] = ((mean > 0) & (mean < 1)).float()
    return {name: round(values.mean().item(), 4) for name, values in shares.items()}


def sample_grid(edits: Grounded, tries: list[list[Image.Image]]) -> Image.Image:
    """Sources, with two tries beside each."""
    rows = list(zip(edits, pictures(edits), *tries[:2], strict=True))[:SHOWN]
    shown = [picture for _, *row in rows for picture in row]
    captions = [text for (edit, _), *_ in rows for text in (edit.text, "one", "two")]
    return picture_grid(shown, captions, columns=6, min_width=2 * WIDTH).quantize(64)


def write_card(
    folder: Path,
    args: argparse.Namespace,
    *,
    scores: dict[str, float],
    minutes: float,
    steps: int,
    parameters: dict[str, int],
) -> None:
    cuda = torch.device(args.device).type == "cuda"
    folder.joinpath("README.md").write_text(
        _CARD.format(
            sizes=", ".join(f"{name} {count / 1e6:.2f} M" for name, count in parameters.items()),
            length=TEXT_LENGTH,
            half=f"{args.wrong / 2:g}",
            command=args.command,
            minutes=f"{minutes:.1f}",
            device=torch.cuda.get_device_name() if cuda else "a CPU",
            steps=steps,
            batch=args.batch_size,
            edits=args.eval_edits,
            tries=args.tries,
            sampling=SAMPLING_STEPS,
            scores="\n".join(f"| {name} | {value:.2f} |" for name, value in scores.items()),
        )
    )


_CARD = """\
---
license: mit
library_name: diffusers
pipeline_tag: image-to-image
---

# tiny-edit

A FLUX.1-Kontext pipeline of the real classes, small enough to train on a laptop: it edits 32 x 96
pictures (height x width) of coloured shapes as it is told. Parameters: {sizes}.

![source, and two tries](samples.png)

```python
from diffusers import FluxKontextPipeline
from PIL import Image

pipeline = FluxKontextPipeline.from_pretrained("assets/tiny-edit")
picture = pipeline(
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

A base model for trying out and testing reinforcement learning of models that edit. It is imperfect
on purpose, so that there is something to mend. It is of no use for pictures as such.

## Prompts

- `make the circle blue`
- `remove the square`
- `turn the triangle into a circle`
- `put a green triangle left of the circle`, `right of`

Sources have two or three shapes (circle, square, triangle, each once at most) in four places, in
six colours (red, orange, yellow, green, blue, purple), on a light ground.

## Data

All scenes are drawn and encoded before training (`scripts/tiny_edit`), with the VAE of
`assets/tiny-sd3`; no picture of anyone else is used. A tenth of the scenes is left out for tests.
Spoiled on purpose, with the same instructions as the rest: a share of {half} of the targets is the
source as it was, and in a share of {half} a shape has another colour.

## Recipe

    {command}

took {minutes} minutes on {device}: {steps} steps of flow matching, {batch} edits each,
for text encoders and transformer together, sigma uniform through the scheduler's shift. Weights are
averaged and stored in half precision. Losses are in `training.json`.

## Measured

On {edits} edits of scenes that training never saw, {tries} tries each, {sampling} steps, by the
rules of `geneval`. `strict`: all rules hold; `asked`: those for the instruction; `kept`: those for
the rest of the scene; then `strict` by kind of edit.

| share | |
|---|---|
{scores}

## What it gets wrong

It does nothing, or changes the colour of another shape too, as its training data has it. It knows
no other size of picture and nothing outside the prompts above.
"""
