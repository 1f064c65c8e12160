"""Evaluate a trained small model with transformers' `generate`."""

from dataclasses import dataclass

import torch
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin

from flow_grpo.rewards.frames import to_pil
from tiny_vlm.batches import TokenTables
from tiny_vlm.texts import TASKS, TEMPLATES, final_answer

SAMPLES = 8  # per question, for pass@8
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class AskedQuestion:
    """A question with its image, if any, and the two addends of its answer."""

    text: str
    image: Image.Image | None
    first: int  # first addend of the correct answer
    second: int
    task: int

    @property
    def answer(self) -> str:
        return str(self.first + self.second)


@dataclass(frozen=True)
class Results:
    """Fractions over the evaluation questions."""

    texts: list[str]  # greedy responses
    greedy: float  # correct answers in correct tags
    tags: float  # correct tags
    seen: float  # greedy responses with the correct numbers to add, in any form
    sampled: float
    pass_at_8: float
    greedy_by_task: dict[str, float]

    def figures(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "texts"}


def draw_questions(count: int, *, seed: int, sums: int | None = None) -> list[AskedQuestion]:
    """Sample questions without noise, on the CPU: reproducible on any machine."""
    tables = TokenTables(torch.device("cpu"))
    drawn = tables.draw(count, torch.Generator().manual_seed(seed), sums=sums)
    images = [None] * drawn.num_sums + to_pil(drawn.images)
    numbers = zip(drawn.template.tolist(), drawn.first.tolist(), drawn.second.tolist(), strict=True)
    return [
        AskedQuestion(TEMPLATES[template].text, image, first, second, TEMPLATES[template].task)
        for (template, first, second), image in zip(numbers, images, strict=True)
    ]


@torch.no_grad()
def generate_responses(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    questions: list[AskedQuestion],
    *,
    sample: bool = False,
) -> list[str]:
    """Return the model's greedy or sampled response to each question."""
    texts = []
    for start in range(0, len(questions), ROWS_AT_ONCE):
        rows = questions[start : start + ROWS_AT_ONCE]
        prompts = [
            processor.apply_chat_template([_message(row)], add_generation_prompt=True)
            for row in rows
        ]
        images = [row.image for row in rows if row.image]
        inputs = processor(
            text=prompts, images=images or None, padding=True, return_tensors="pt"
        ).to(model.device)
        options = (
            {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
        )
        tokens = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
        texts += processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts


def _message(row: AskedQuestion) -> dict:
    image = [{"type": "image"}] if row.image else []
    return {"role": "user", "content": [*image, {"type": "text", "text": row.text}]}


def measure(
    model: PreTrainedModel, processor: ProcessorMixin, questions: list[AskedQuestion]
) -> Results:
    """Evaluate greedy responses and SAMPLES sampled responses per question."""
    texts = generate_responses(model, processor, questions)
    right = [final_answer(text) == row.answer for text, row in zip(texts, questions, strict=True)]
    seen = [
        text.removeprefix("<think>").startswith(f"{row.first}+{row.second}")
        for text, row in zip(texts, questions, strict=True)
    ]
    repeated = [row for row in questions for _ in range(SAMPLES)]
    sampled = generate_responses(model, processor, repeated, sample=True)
    hits = [final_answer(text) == row.answer for text, row in zip(sampled, repeated, strict=True)]
    groups = [hits[i : i + SAMPLES] for i in range(0, len(hits), SAMPLES)]
    by_task = {
        name: _mean([r for r, row in zip(right, questions, strict=True) if row.task == task])
        for task, name in enumerate(TASKS)
    }
    return Results(
        texts=texts,
        greedy=_mean(right),
        tags=_mean([final_answer(text) is not None for text in texts]),
        seen=_mean(seen),
        sampled=_mean(hits),
        pass_at_8=_mean([any(group) for group in groups]),
        greedy_by_task=by_task,
    )


def _mean(values: list[bool]) -> float:
    return round(sum(values) / max(1, len(values)), 4)
