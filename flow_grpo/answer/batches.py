"""Prompts and answers as tensors for transformers' own forward.

To sample, prompts are padded on the left, so that all answers start in the same column. To train, a
row holds a prompt once and all its answers behind it, each of which sees the prompt and itself:
neither the prompt nor its pictures are computed again for every sample of a group.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from flow_grpo.answer.models.base import Seen, joined
from flow_grpo.answer.prompts import EncodedPrompt

PROMPT, PADDING = 0, -1  # segments of a row; answers are 1, 2, ...


@dataclass(frozen=True)
class Inputs:
    """What the model takes."""

    input_ids: Tensor  # (B, S)
    segments: Tensor  # (B, S): PROMPT, PADDING or the number of an answer
    position_ids: Tensor  # (axes, B, S)
    pictures: Seen  # the distinct ones of all rows, joined
    shown: Tensor | None  # (places,): which of them stands in each place, in order of the first

    def to(self, device: torch.device) -> "Inputs":
        return Inputs(
            self.input_ids.to(device),
            self.segments.to(device),
            self.position_ids.to(device),
            {name: own.to(device) for name, own in self.pictures.items()},
            None if self.shown is None else self.shown.to(device),
        )


@dataclass(frozen=True)
class Talk:
    """What follows a prompt where a model answers several times, and hears something between."""

    ids: Tensor  # (S,), answers and observations in their order
    positions: Tensor  # (axes, S)
    sampled: Tensor  # (S,) bool: the tokens of answers, which alone are trained
    seen: tuple[Seen, ...] = ()  # pictures of observations
    sources: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Answer:
    """One sample, as training needs it."""

    question: int  # answers of one number share a prompt
    prompt: EncodedPrompt
    tokens: Tensor  # (T,), the end token included; of several answers, all that was sampled
    talk: Talk | None = None  # of several answers

    @property
    def length(self) -> int:
        """Columns of a row that it takes: its last token predicts nothing, and is not there."""
        return len(self.tokens if self.talk is None else self.talk.ids) - 1

    def follows(self) -> Talk:
        if self.talk is not None:
            return self.talk
        steps = torch.arange(len(self.tokens))
        positions = (self.prompt.following + steps).expand(len(self.prompt.positions), -1)
        return Talk(self.tokens, positions, torch.ones_like(self.tokens, dtype=torch.bool))


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


def left_padded(prompts: Sequence[EncodedPrompt], pad: int) -> Inputs:
    rows = [(p.ids, p.positions, torch.full((len(p),), PROMPT)) for p in prompts]
    return _inputs(rows, [_places(p) for p in prompts], pad, left=True)


def packed(answers: Sequence[Answer], pad: int) -> PackedBatch:
    """Answers to one question have to stand side by side."""
    groups = [list(group) for _, group in groupby(answers, lambda a: a.question)]
    rows, columns = zip(*map(_packed_row, groups), strict=True)
    lengths = [len(answer.tokens) for answer in answers]
    return PackedBatch(
        inputs=_inputs(rows, [_pictures(group) for group in groups], pad),
        row=torch.tensor([i for i, group in enumerate(groups) for _ in group]),
        column=pad_sequence([column for own in columns for column in own], batch_first=True),
        tokens=pad_sequence([answer.tokens for answer in answers], batch_first=True),
        mask=torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
    )


Row = tuple[Tensor, Tensor, Tensor]  # token ids (S,), positions (axes, S), segments (S,)


def _packed_row(group: Sequence[Answer]) -> tuple[Row, list[Tensor]]:
    """A prompt and its answers, and for each answer the columns that predict what was sampled. The
    last token of an answer predicts nothing, and is not there."""
    prompt = group[0].prompt
    ids, positions, segments = [prompt.ids], [prompt.positions], [PROMPT] * len(prompt)
    columns = []
    for number, answer in enumerate(group, PROMPT + 1):
        talk = answer.follows()
        own = torch.arange(len(segments), len(segments) + answer.length)
        before = torch.cat([torch.tensor([len(prompt) - 1]), own])  # the column before each token
        columns.append(before[talk.sampled])
        ids.append(talk.ids[:-1])
        positions.append(talk.positions[:, :-1])
        segments += [number] * answer.length
    return (torch.cat(ids), torch.cat(positions, 1), torch.tensor(segments)), columns


Place = tuple[Hashable, Seen]  # of a picture in a row: which it is, and what the model sees of it


def _places(part: EncodedPrompt | Talk) -> list[Place]:
    return list(zip(part.sources, part.seen, strict=True))


def _pictures(group: Sequence[Answer]) -> list[Place]:
    """What stands where in a packed row."""
    answers = [place for answer in group for place in _places(answer.follows())]
    return _places(group[0].prompt) + answers


def _inputs(
    rows: Sequence[Row], pictures: Sequence[list[Place]], pad: int, *, left: bool = False
) -> Inputs:
    """Rows padded to the longest, and their pictures."""
    longest = max(len(ids) for ids, *_ in rows)

    def column(number: int, value: int) -> list[Tensor]:
        missing = [(row[number], longest - row[number].shape[-1]) for row in rows]
        return [functional.pad(x, (n, 0) if left else (0, n), value=value) for x, n in missing]

    places = [place for row in pictures for place in row]
    distinct = dict(reversed(places))  # the first of each
    numbers = {source: n for n, source in enumerate(dict.fromkeys(s for s, _ in places))}
    return Inputs(
        input_ids=torch.stack(column(0, pad)),
        segments=torch.stack(column(2, PADDING)),
        position_ids=torch.stack(column(1, 0), 1),
        pictures=joined([distinct[source] for source in numbers]),
        shown=torch.tensor([numbers[source] for source, _ in places]) if places else None,
    )


def micro_batches(answers: Sequence[Answer], budget: int) -> Iterator[slice]:
    """Consecutive answers whose rows, padded to the longest, have at most `budget` tokens; always
    one at least."""
    start, rows, longest, own, question = 0, 0, 0, 0, None
    for i, answer in enumerate(answers):
        count = answer.length
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
