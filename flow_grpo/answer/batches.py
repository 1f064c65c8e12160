"""Prompts and answers as tensors for transformers' own forward.

To sample, prompts are padded on the left, so that all answers start in the same column. To train, a
row holds a prompt once and all its answers behind it, each of which sees the prompt and itself:
neither the prompt nor its pictures are computed again for every sample of a group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from flow_grpo.answer.prompts import Prompt

PROMPT, PADDING = 0, -1  # segments of a row; answers are 1, 2, ...


@dataclass(frozen=True)
class Inputs:
    """What the model takes."""

    input_ids: Tensor  # (B, S)
    segments: Tensor  # (B, S): PROMPT, PADDING or the number of an answer
    position_ids: Tensor  # (3, B, S)
    pixel_values: Tensor | None  # of the distinct pictures of all rows
    image_grid_thw: Tensor | None  # of every place where a picture stands
    shown: Tensor | None  # (places,): the number of the picture there

    def to(self, device: torch.device) -> "Inputs":
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: t.to(device) for n, t in own.items() if t is not None})

    def as_arguments(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own.pop("shown")
        return {"attention_mask": attention(own.pop("segments")), **own}


@dataclass(frozen=True)
class Answer:
    """One sample, as training needs it."""

    question: int  # answers of one number share a prompt
    prompt: Prompt
    tokens: Tensor  # (T,), the end token included


@dataclass(frozen=True)
class PackedBatch:
    """R answers in rows of one prompt each, and where to find them there."""

    inputs: Inputs
    row: Tensor  # (R,)
    column: Tensor  # (R, T): whose hidden state predicts each token
    tokens: Tensor  # (R, T), padded
    mask: Tensor  # (R, T) bool: tokens that are there

    def to(self, device: torch.device) -> "PackedBatch":
        own = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return PackedBatch(**own)


def left_padded(prompts: Sequence[Prompt], pad: int) -> Inputs:
    longest = max(map(len, prompts))
    rows = [
        (
            torch.cat([prompt.ids.new_full((longest - len(prompt),), pad), prompt.ids]),
            torch.cat([prompt.positions.new_zeros(3, longest - len(prompt)), prompt.positions], 1),
            torch.tensor([PADDING] * (longest - len(prompt)) + [PROMPT] * len(prompt)),
        )
        for prompt in prompts
    ]
    return _inputs(*(list(column) for column in zip(*rows, strict=True)), prompts)


def packed(answers: Sequence[Answer], pad: int) -> PackedBatch:
    """Answers to one question have to stand side by side."""
    groups = [list(group) for _, group in groupby(answers, lambda a: a.question)]
    rows = [_packed_row(group) for group in groups]
    longest = max(len(ids) for ids, *_ in rows)
    most = max(len(answer.tokens) for answer in answers)
    ids, positions, segments = [], [], []
    for own_ids, own_positions, own_segments, _ in rows:
        missing = longest - len(own_ids)
        ids.append(torch.cat([own_ids, own_ids.new_full((missing,), pad)]))
        positions.append(torch.cat([own_positions, own_positions.new_zeros(3, missing)], 1))
        segments.append(torch.cat([own_segments, torch.full((missing,), PADDING)]))
    columns = [column for *_, own in rows for column in own]
    lengths = torch.tensor([len(answer.tokens) for answer in answers])
    return PackedBatch(
        inputs=_inputs(ids, positions, segments, [group[0].prompt for group in groups]),
        row=torch.tensor([i for i, group in enumerate(groups) for _ in group]),
        column=torch.stack([_filled(column, most) for column in columns]),
        tokens=torch.stack([_filled(answer.tokens, most) for answer in answers]),
        mask=torch.arange(most) < lengths[:, None],
    )


def _packed_row(group: Sequence[Answer]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Token ids, positions and segments of a prompt and its answers, and for each answer the
    columns that predict it. The last token of an answer predicts nothing, and is not there."""
    prompt = group[0].prompt
    ids, positions, segments = [prompt.ids], [prompt.positions], [PROMPT] * len(prompt)
    columns = []
    for number, answer in enumerate(group, PROMPT + 1):
        count = len(answer.tokens) - 1
        steps = torch.arange(count)
        columns.append(torch.cat([torch.tensor([len(prompt) - 1]), len(segments) + steps]))
        ids.append(answer.tokens[:-1])
        positions.append((prompt.following + steps).expand(3, -1))
        segments += [number] * count
    return torch.cat(ids), torch.cat(positions, 1), torch.tensor(segments), columns


def _inputs(
    ids: list[Tensor], positions: list[Tensor], segments: list[Tensor], prompts: Sequence[Prompt]
) -> Inputs:
    pixels, grids, shown = _pictures(prompts)
    return Inputs(
        input_ids=torch.stack(ids),
        segments=torch.stack(segments),
        position_ids=torch.stack(positions, 1),
        pixel_values=pixels,
        image_grid_thw=grids,
        shown=shown,
    )


def _pictures(prompts: Sequence[Prompt]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Pixels of the distinct pictures; the grid and the number of the picture of each place."""
    patches, grids, shown, numbers = [], [], [], {}
    for prompt in prompts:
        if prompt.pixels is None:
            continue
        grids.append(prompt.grids)
        pictures = prompt.pixels.split(prompt.grids.prod(-1).tolist())
        for source, picture in zip(prompt.sources, pictures, strict=True):
            if source not in numbers:
                numbers[source] = len(numbers)
                patches.append(picture)
            shown.append(numbers[source])
    if not shown:
        return None, None, None
    return torch.cat(patches), torch.cat(grids), torch.tensor(shown)


def attention(segments: Tensor) -> Tensor:
    """(B, 1, S, S): a token sees what came before it of its prompt and its own answer. Padding sees
    itself, as a row that sees nothing has no softmax."""
    place = torch.arange(segments.shape[1], device=segments.device)
    seen, sees = segments[:, None, :], segments[:, :, None]
    allowed = (place <= place[:, None]) & ((seen == PROMPT) | (seen == sees)) & (seen != PADDING)
    return (allowed | (place == place[:, None]))[:, None]


def _filled(values: Tensor, length: int) -> Tensor:
    return torch.cat([values, values.new_zeros(length - len(values))])


def micro_batches(answers: Sequence[Answer], budget: int) -> Iterator[slice]:
    """Consecutive answers whose rows, padded to the longest, have at most `budget` tokens; always
    one at least."""
    start, rows, longest, own, question = 0, 0, 0, 0, None
    for i, answer in enumerate(answers):
        count = len(answer.tokens) - 1
        joins = answer.question == question
        length = own + count if joins else len(answer.prompt) + count
        if i > start and (rows + (not joins)) * max(longest, length) > budget:
            yield slice(start, i)
            start, rows, longest, joins = i, 0, 0, False
            length = len(answer.prompt) + count
        rows, longest = rows + (not joins), max(longest, length)
        own, question = length, answer.question
    if start < len(answers):
        yield slice(start, len(answers))
