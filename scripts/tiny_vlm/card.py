"""Write the model card of the small vision-language model."""

import textwrap
from pathlib import Path

from PIL import Image

from flow_grpo.report.grid import image_grid
from tiny_vlm.measure import AskedQuestion, Results


def sample_grid(questions: list[AskedQuestion], texts: list[str], count: int = 12) -> Image.Image:
    """Return a grid of images with their questions and the model's greedy responses."""
    shown = [
        (row.image, row.text, text) for row, text in zip(questions, texts, strict=True) if row.image
    ][:count]
    images, asked, answers = zip(*shown, strict=True)
    captions = [f"{question} {text}" for question, text in zip(asked, answers, strict=True)]
    return image_grid(list(images), captions, columns=2, min_width=480)


def write_card(
    folder: Path,
    *,
    results: Results,
    questions: list[AskedQuestion],
    command: str,
    minutes: float,
    device: str,
    steps: int,
    batch_size: int,
    parameters: int,
) -> None:
    """Write the model card README.md: size, accuracy and the command that trained the model."""
    by_task = "\n".join(
        f"| greedy, {task.replace('a picture', 'an image')} | {value:.3f} |"
        for task, value in results.greedy_by_task.items()
    )
    folder.joinpath("README.md").write_text(
        _CARD.format(
            summary=textwrap.fill(_SUMMARY.format(parameters=f"{parameters / 1e6:.2f} M"), 100),
            count=len(questions),
            by_task=by_task,
            command=command,
            minutes=f"{minutes:.1f}",
            device=device,
            steps=steps,
            batch_size=batch_size,
            **{name: f"{v:.3f}" for name, v in results.figures().items() if isinstance(v, float)},
        )
    )


_SUMMARY = (
    "A small Qwen3-VL ({parameters} parameters) that can be trained on a laptop. It uses "
    "transformers' own classes and counts up to four coloured shapes in 32 x 96 images (height x "
    "width)."
)
_CARD = """\
---
license: mit
library_name: transformers
pipeline_tag: image-text-to-text
---

# tiny-vlm

{summary}

![samples](samples.png)

```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("assets/tiny-vlm")
processor = AutoProcessor.from_pretrained("assets/tiny-vlm")
content = [{{"type": "image"}}, {{"type": "text", "text": "How many red circles?"}}]
text = processor.apply_chat_template(
    [{{"role": "user", "content": content}}], add_generation_prompt=True
)
inputs = processor(text=[text], images=[Image.open("image.png")], return_tensors="pt")
tokens = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
print(processor.tokenizer.batch_decode(tokens, skip_special_tokens=True))
```

## Intended use

A base model for testing reinforcement learning of vision-language models. It perceives well and
responds badly on purpose, so that there is something to learn. It is not useful for anything else.

## Questions

- `How many red circles?`: three shapes (circles, squares, triangles), six colours (red, green,
  blue, yellow, purple, white).
- `How many circles?`
- `How many circles plus squares?`
- `What is 7+8?`, without an image.

A correct response is `<think>1+2</think><answer>3</answer>`, where the two numbers are the counts
of both shapes, or of the left and the right half of the image. Each character is one token.

## Data

Questions and images are generated during training (`scripts/tiny_vlm/images.py`), with noise of
up to 6 % of full brightness. Some target responses are wrong on purpose, but always contain the
correct numbers to add: they have no tags, no answer tags, or the first number as the result. For
all questions except those about a colour, one of these errors is the most likely response, so
greedy decoding produces it, while about one in three samples is correct.

## Recipe

    {command}

This took {minutes} minutes on {device}: {steps} steps of {batch_size} questions. Weights are
averaged and stored in half precision. Losses are in `training.json`.

## Measured

The fractions are for {count} held-out questions, sampled with transformers' `generate`:

| | fraction |
|---|---|
| greedy: correct, in correct tags | {greedy} |
{by_task}
| greedy: correct tags | {tags} |
| greedy: correct numbers to add, in any form | {seen} |
| sampled at temperature 1: correct, in correct tags | {sampled} |
| at least one of eight samples correct | {pass_at_8} |

## Limitations

It makes the errors of its training data (see above). It supports no other questions, no other image
size and no more than four shapes in a row.
"""
