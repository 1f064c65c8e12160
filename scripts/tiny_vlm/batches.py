"""Batches of questions with images and target responses, generated on the training device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vlm.images import NOISE, TOKENS, RandomNumbers, draw_scenes, paint, to_patches
from tiny_vlm.texts import (
    ANSWER_SHARES,
    ANSWERS,
    BY_TASK,
    END,
    IMAGE,
    PAD,
    START,
    SUM,
    SUM_SHARE,
    TASK_SHARES,
    TEMPLATES,
    VISION_END,
    VISION_START,
    answer_text,
    token_ids,
)

FIRST_IMAGE_COLUMN = 2  # after <|im_start|><|vision_start|>


@dataclass(frozen=True)
class SampledQuestions:
    """N questions; the first `num_sums` have no image."""

    template: Tensor  # (N,), index of TEMPLATES
    first: Tensor  # (N,), first addend of the correct answer
    second: Tensor  # (N,)
    images: Tensor  # (N - num_sums, 3, HEIGHT, WIDTH)
    num_sums: int


@dataclass(frozen=True)
class Batch:
    """Rows of [prompt][answer][padding]."""

    ids: Tensor  # (N, length)
    columns: Tensor  # (N, answer length): position that predicts each answer token
    answers: Tensor  # (N, answer length)
    has_image: Tensor  # (N,), bool
    patches: Tensor  # (images * PATCHES, values)
    num_sums: int


def prompt_ids(template: int) -> list[int]:
    """Return the prompt's tokens as the chat template writes them."""
    image = []
    if TEMPLATES[template].task != SUM:
        image = [VISION_START, *[IMAGE] * TOKENS, VISION_END]
    return [START, *image, *token_ids(TEMPLATES[template].text), END, START]


def _padded(rows: list[list[int]], length: int, device: torch.device) -> Tensor:
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows], device=device)


class TokenTables:
    """All questions and target responses as tokens, so that a batch is a few look-ups."""

    def __init__(self, device: torch.device) -> None:
        prompts = [prompt_ids(i) for i in range(len(TEMPLATES))]
        answers = [
            [*token_ids(answer_text(a, b, variant)), END]
            for a in range(10)
            for b in range(10)
            for variant in range(len(ANSWERS))
        ]
        self.answer_length = max(map(len, answers))
        longest = max(map(len, prompts)) + self.answer_length
        self.length = -(-longest // 8) * 8
        self.prompts = _padded(prompts, self.length, device)
        self.answers = _padded(answers, self.answer_length, device)
        self.prompt_lengths = torch.tensor([len(row) for row in prompts], device=device)
        fields = [(t.task, t.first, t.second, t.colour) for t in TEMPLATES]
        self.fields = torch.tensor(fields, device=device)
        self.answer_shares = torch.tensor(ANSWER_SHARES, device=device)
        shares = torch.zeros(len(TEMPLATES))
        for task, share in TASK_SHARES.items():
            shares[BY_TASK[task]] = share / len(BY_TASK[task])
        self.image_shares = shares.to(device)

    def draw(
        self, count: int, generator: torch.Generator, *, sums: int | None = None, noise: float = 0.0
    ) -> SampledQuestions:
        """Sample questions with images; `sums` of them are sums without an image."""
        rng = RandomNumbers(generator)
        num_sums = round(count * SUM_SHARE) if sums is None else sums
        image_templates = torch.multinomial(
            self.image_shares, count - num_sums, replacement=True, generator=generator
        )
        scenes = draw_scenes(*self.fields[image_templates].unbind(1), rng)
        images = paint(scenes, rng, noise)
        sum_templates = BY_TASK[SUM][0] + rng.below(len(BY_TASK[SUM]), num_sums)
        return SampledQuestions(
            template=torch.cat([sum_templates, image_templates]),
            first=torch.cat([self.fields[sum_templates, 1], scenes.first]),
            second=torch.cat([self.fields[sum_templates, 2], scenes.second]),
            images=images,
            num_sums=num_sums,
        )

    def batch(self, count: int, generator: torch.Generator) -> Batch:
        """Sample questions with target responses distributed by ANSWER_SHARES."""
        drawn = self.draw(count, generator, noise=NOISE)
        shares = self.answer_shares[self.fields[drawn.template, 0]]
        variant = torch.multinomial(shares, 1, generator=generator)[:, 0]
        answers = self.answers[(drawn.first * 10 + drawn.second) * len(ANSWERS) + variant]
        return self.assemble(drawn, answers)

    def assemble(self, drawn: SampledQuestions, answers: Tensor) -> Batch:
        """Return rows of prompt, answer (N, answer length) and padding."""
        start = self.prompt_lengths[drawn.template][:, None]
        columns = torch.arange(self.answer_length, device=start.device)
        offset = torch.arange(self.length, device=start.device) - start
        answer = answers.gather(1, offset.clamp(0, self.answer_length - 1))
        in_answer = (offset >= 0) & (offset < self.answer_length)
        return Batch(
            ids=torch.where(in_answer, answer, self.prompts[drawn.template]),
            columns=start - 1 + columns,
            answers=answers,
            has_image=self.fields[drawn.template, 0] != SUM,
            patches=to_patches(drawn.images),
            num_sums=drawn.num_sums,
        )
