"""The model card of the small vision-language model."""

from pathlib import Path

from PIL import Image

from flow_grpo.show.grid import picture_grid
from tiny_vlm.measure import Asked, Results


def sample_grid(questions: list[Asked], texts: list[str], count: int = 12) -> Image.Image:
    """Pictures under their questions and the model's greedy answers."""
    shown = [
        (row.picture, row.text, text)
        for row, text in zip(questions, texts, strict=True)
        if row.picture
    ][:count]
    pictures, asked, answers = zip(*shown, strict=True)
    captions = [f"{question} {text}" for question, text in zip(asked, answers, strict=True)]
    return picture_grid(list(pictures), captions, columns=2, min_width=480)


def write_card(
    folder: Path,
    *,
    results: Results,
    questions: list[Asked],
    command: str,
    minutes: float,
    device: str,
    steps: int,
    batch_size: int,
    parameters: int,
) -> None:
    by_task = "\n".join(
        f"| greedy, {task} | {value:.3f} |" for task, value in results.greedy_by_task.items()
    )
    folder.joinpath("README.md").write_text(
        _CARD.format(
            parameters=f"{parameters / 1e6:.2f} M",
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


_CARD = """\
---
license: mit
library_name: transformers
pipeline_tag: image-text-to-text
---

# tiny-vlm

A Qwen3-VL of transformers' own classes, small enough to train on a laptop ({parameters}
parameters): it looks at 32 x 96 pictures (height x width) of up to four coloured shapes and says
how many there are.

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
inputs = processor(text=[text], images=[Image.open("picture.png")], return_tensors="pt")
tokens = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
print(processor.tokenizer.batch_decode(tokens, skip_special_tokens=True))
```

## Intended use

A base model for trying out and testing reinforcement learning of vision-language models. It sees
well and answers badly on purpose, so that there is something to mend. It is of no use beyond that.

## Questions

- `How many red circles?`: three shapes (circles, squares, triangles), six colours (red, green,
  blue, yellow, purple, white).
- `How many circles?`
- `How many circles plus squares?`
- `What is 7+8?`, without a picture.

A right answer is `<think>1+2</think><answer>3</answer>`: the two numbers are the counts of both
shapes, or of the left and the right half of the picture. One token per character.

## Data

Questions and pictures are drawn while training (`scripts/tiny_vlm/pictures.py`), with noise from
none to 6 % of full brightness. Some answers are wrong on purpose, always with the right numbers
to add: without tags, without answer tags, or with the first number for a result. For all questions
but those about a colour one of these faults is the most likely answer, so that greedy decoding
shows it, while about one in three samples is right.

## Recipe

    {command}

took {minutes} minutes on {device}: {steps} steps of {batch_size} questions. Weights are averaged
and stored in half precision. Losses are in `training.json`.

## Measured

On {count} questions that were not trained on, answered by transformers' `generate`:

| | share |
|---|---|
| greedy: right, in right tags | {greedy} |
{by_task}
| greedy: right tags | {tags} |
| greedy: right numbers to add, in any form | {seen} |
| sampled at temperature 1: right, in right tags | {sampled} |
| at least one of eight samples right | {pass_at_8} |

## What it gets wrong

What its training data gets wrong, see above. It knows no other question, no other size of picture
and no more than four shapes in a row.
"""
