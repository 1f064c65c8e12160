"""Batches of questions with pictures and answers, made on the device they are used on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_vlm.pictures import NOISE, TOKENS, Dice, draw_scenes, paint, to_patches
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
class Drawn:
    """N questions; the first `num_sums` have no picture."""

    template: Tensor  # (N,), index of TEMPLATES
    first: Tensor  # (N,), what the right answer adds up
    second: Tensor  # (N,)
    pictures: Tensor  # (N - num_sums, 3, HEIGHT, WIDTH)
    num_sums: int


@dataclass(frozen=True)
class Batch:
    """Rows of [prompt][answer][padding]."""

    ids: Tensor  # (N, length)
    columns: Tensor  # (N, answer length): where each answer token is predicted
    answers: Tensor  # (N, answer length)
    has_picture: Tensor  # (N,), bool
    patches: Tensor  # (pictures * PATCHES, values)
    num_sums: int


def prompt_ids(template: int) -> list[int]:
    """As the chat template writes them."""
    picture = [VISION_START] + [IMAGE] * TOKENS + [VISION_END]
    has_picture = TEMPLATES[template].task != SUM
    text = token_ids(TEMPLATES[template].text)
    return [START] + picture * has_picture + text + [END, START]


def _padded(rows: list[list[int]], length: int, device: torch.device) -> Tensor:
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows], device=device)


class Tables:
    """Every question and every answer as tokens: a batch is then a few look-ups."""

    def __init__(self, device: torch.device) -> None:
        prompts = [prompt_ids(i) for i in range(len(TEMPLATES))]
        answers = [
            [*token_ids(answer_text(a, b, way)), END]
            for a in range(10)
            for b in range(10)
            for way in range(len(ANSWERS))
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
        self.picture_shares = shares.to(device)

    def draw(
        self, count: int, generator: torch.Generator, *, sums: int | None = None, noise: float = 0.0
    ) -> Drawn:
        dice = Dice(generator)
        num_sums = round(count * SUM_SHARE) if sums is None else sums
        about = torch.multinomial(
            self.picture_shares, count - num_sums, replacement=True, generator=generator
        )
        scenes = draw_scenes(*self.fields[about].unbind(1), dice)
        pictures = paint(scenes, dice, noise)
        added = BY_TASK[SUM][0] + dice.below(len(BY_TASK[SUM]), num_sums)
        return Drawn(
            template=torch.cat([added, about]),
            first=torch.cat([self.fields[added, 1], scenes.first]),
            second=torch.cat([self.fields[added, 2], scenes.second]),
            pictures=pictures,
            num_sums=num_sums,
        )

    def batch(self, count: int, generator: torch.Generator) -> Batch:
        """Questions with answers that are faulty as often as ANSWER_SHARES says."""
        drawn = self.draw(count, generator, noise=NOISE)
        shares = self.answer_shares[self.fields[drawn.template, 0]]
        way = torch.multinomial(shares, 1, generator=generator)[:, 0]
        answers = self.answers[(drawn.first * 10 + drawn.second) * len(ANSWERS) + way]
        return self.assemble(drawn, answers)

    def assemble(self, drawn: Drawn, answers: Tensor) -> Batch:
        start = self.prompt_lengths[drawn.template][:, None]
        columns = torch.arange(self.answer_length, device=start.device)
        place = torch.arange(self.length, device=start.device) - start
        answer = answers.gather(1, place.clamp(0, self.answer_length - 1))
        in_answer = (place >= 0) & (place < self.answer_length)
        return Batch(
            ids=torch.where(in_answer, answer, self.prompts[drawn.template]),
            columns=start - 1 + columns,
            answers=answers,
            has_picture=self.fields[drawn.template, 0] != SUM,
            patches=to_patches(drawn.pictures),
            num_sums=drawn.num_sums,
        )
