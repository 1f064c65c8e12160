"""Pack prompts and responses into input tensors of transformers models.

For sampling, prompts are padded on the left, so that all responses start in the same column. For
training, a row contains a prompt once, followed by all its responses, each of which attends to the
prompt and to itself (see attention.py):

    row       [ prompt | response 1 | response 2 | padding ]
    segments  [ 0 ...  | 1 ...      | 2 ...      | -1 ...  ]

The prompt and its images are thus computed once per group instead of once per sample. The hidden
state of the column before a token predicts it; the last token of a response predicts nothing and is
left out of the row.

A micro-batch has one row per prompt, padded to the longest one. Flex attention skips masked blocks,
so with it all prompts of a micro-batch share one row without padding:

    segments  [ 0 ... | 1 ... | 2 ... | 65536 ... | 65537 ... ]     (GROUP x prompt + response)
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from flow_grpo.vlm.models.base import VisionInputs, concat_vision_inputs
from flow_grpo.vlm.prompts import EncodedPrompt

PROMPT_SEGMENT, PADDING_SEGMENT = 0, -1  # segment ids; responses are 1, 2, ...
GROUP = 2**16  # added to the segments of a row for each preceding prompt


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of B rows of S tokens."""

    input_ids: Tensor  # (B, S)
    # (B, S): PROMPT_SEGMENT, PADDING_SEGMENT or the number of a response, plus GROUP x prompt
    segments: Tensor
    position_ids: Tensor  # (axes, B, S)
    images: VisionInputs  # the distinct images of all rows, concatenated
    # (occurrences,): index of each occurrence's distinct image, row by row; None without images
    image_indices: Tensor | None

    def to(self, device: torch.device) -> "ModelInputs":
        """Return a copy on a device."""
        return ModelInputs(
            self.input_ids.to(device),
            self.segments.to(device),
            self.position_ids.to(device),
            {name: tensor.to(device) for name, tensor in self.images.items()},
            None if self.image_indices is None else self.image_indices.to(device),
        )


@dataclass(frozen=True)
class Conversation:
    """The part of an episode after its prompt: responses and observations in turn."""

    ids: Tensor  # (S,), responses and observations in order
    positions: Tensor  # (axes, S)
    sampled: Tensor  # (S,) bool: tokens of responses; only these are trained
    vision_inputs: tuple[VisionInputs, ...] = ()  # images of observations
    sources: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Response:
    """One sample in the form used for training."""

    question: int  # responses with the same number share a prompt
    prompt: EncodedPrompt
    tokens: Tensor  # (T,), all sampled tokens, including the stop token
    conversation: Conversation | None = None  # None for a single turn

    @property
    def length(self) -> int:
        """Return the number of columns it occupies in a row; its last token has no column."""
        return len(self.tokens if self.conversation is None else self.conversation.ids) - 1

    def as_conversation(self) -> Conversation:
        """Return the conversation; a single response becomes a conversation of one turn."""
        if self.conversation is not None:
            return self.conversation
        steps = torch.arange(len(self.tokens))
        positions = (self.prompt.next_position + steps).expand(len(self.prompt.positions), -1)
        return Conversation(self.tokens, positions, torch.ones_like(self.tokens, dtype=torch.bool))


@dataclass(frozen=True)
class PackedBatch:
    """R responses, packed into rows with one prompt each, and where each token is predicted."""

    inputs: ModelInputs
    row: Tensor  # (R,)
    column: Tensor  # (R, T): column whose hidden state predicts each token
    tokens: Tensor  # (R, T), padded
    mask: Tensor  # (R, T) bool: False for padding

    def to(self, device: torch.device) -> "PackedBatch":
        return PackedBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def scatter_to_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return values (tokens,) at the True positions of `mask` (R, T), and 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def left_pad_prompts(prompts: Sequence[EncodedPrompt], pad: int) -> ModelInputs:
    """Return the inputs of prompts, padded on the left."""
    rows = [(p.ids, p.positions, torch.full((len(p),), PROMPT_SEGMENT)) for p in prompts]
    return _build_inputs(rows, list(map(_image_slots, prompts)), pad, left=True)


def pack_responses(
    responses: Sequence[Response], pad: int, *, one_row: bool = False
) -> PackedBatch:
    """Pack responses into rows; consecutive ones to the same question share their prompt.

    Args:
        responses: Responses in order.
        pad: Padding token id.
        one_row: Whether all prompts share a row without padding, instead of one row per prompt.
    """
    groups = [list(group) for _, group in groupby(responses, lambda each: each.question)]
    rows, columns = zip(*map(_pack_row, groups), strict=True)
    images = [_row_images(group) for group in groups]
    numbers = [i for i, group in enumerate(groups) for _ in group]
    if one_row:
        rows, columns = _join_rows(rows, columns)
        images, numbers = [[slot for own in images for slot in own]], [0] * len(numbers)
    lengths = [len(response.tokens) for response in responses]
    return PackedBatch(
        inputs=_build_inputs(rows, images, pad),
        row=torch.tensor(numbers),
        column=pad_sequence([column for own in columns for column in own], batch_first=True),
        tokens=pad_sequence([response.tokens for response in responses], batch_first=True),
        mask=torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
    )


PackedRow = tuple[Tensor, Tensor, Tensor]  # token ids (S,), positions (axes, S), segments (S,)


def _pack_row(group: Sequence[Response]) -> tuple[PackedRow, list[Tensor]]:
    """Return a prompt and its responses as one row, and the predicting columns of each response."""
    prompt = group[0].prompt
    ids, positions, segments = [prompt.ids], [prompt.positions], [PROMPT_SEGMENT] * len(prompt)
    columns = []
    for number, response in enumerate(group, PROMPT_SEGMENT + 1):
        conversation = response.as_conversation()
        own = torch.arange(len(segments), len(segments) + response.length)
        before = torch.cat([torch.tensor([len(prompt) - 1]), own])  # the column before each token
        columns.append(before[conversation.sampled])
        ids.append(conversation.ids[:-1])
        positions.append(conversation.positions[:, :-1])
        segments += [number] * response.length
    return (torch.cat(ids), torch.cat(positions, 1), torch.tensor(segments)), columns


def _join_rows(
    rows: Sequence[PackedRow], columns: Sequence[list[Tensor]]
) -> tuple[list[PackedRow], list[list[Tensor]]]:
    """Join rows into one; return it and the predicting columns of each row in it."""
    ids, positions, segments = zip(*rows, strict=True)
    starts = torch.tensor([0, *map(len, ids)]).cumsum(0).tolist()
    numbered = [own + GROUP * number for number, own in enumerate(segments)]
    joined = torch.cat(ids), torch.cat(positions, 1), torch.cat(numbered)
    moved = [[each + start for each in own] for own, start in zip(columns, starts, strict=False)]
    return [joined], moved


ImageSlot = tuple[Hashable, VisionInputs]  # identity of an image in a row, and its tensors


def _image_slots(part: EncodedPrompt | Conversation) -> list[ImageSlot]:
    return list(zip(part.sources, part.vision_inputs, strict=True))


def _row_images(group: Sequence[Response]) -> list[ImageSlot]:
    """Return the images of a packed row in order of occurrence."""
    later = [slot for response in group for slot in _image_slots(response.as_conversation())]
    return _image_slots(group[0].prompt) + later


def _build_inputs(
    rows: Sequence[PackedRow], images: Sequence[list[ImageSlot]], pad: int, *, left: bool = False
) -> ModelInputs:
    """Pad rows to the longest, on the left if `left`, and collect their distinct images.

    Args:
        rows: Token rows.
        images: Images of each row.
        pad: Padding token id.
        left: Whether to pad on the left.
    """
    longest = max(len(ids) for ids, *_ in rows)

    def padded(part: int, value: int) -> list[Tensor]:
        missing = [(row[part], longest - row[part].shape[-1]) for row in rows]
        return [functional.pad(x, (n, 0) if left else (0, n), value=value) for x, n in missing]

    slots = [slot for row in images for slot in row]
    distinct = dict(reversed(slots))  # keeps the first of equal ones
    numbers = {source: n for n, source in enumerate(dict.fromkeys(s for s, _ in slots))}
    return ModelInputs(
        input_ids=torch.stack(padded(0, pad)),
        segments=torch.stack(padded(2, PADDING_SEGMENT)),
        position_ids=torch.stack(padded(1, 0), 1),
        images=concat_vision_inputs([distinct[source] for source in numbers]),
        image_indices=torch.tensor([numbers[source] for source, _ in slots]) if slots else None,
    )


def micro_batches(
    responses: Sequence[Response], budget: int, together: int = 1, *, one_row: bool = False
) -> Iterator[slice]:
    """Yield slices of consecutive responses for micro-batches of limited size.

    The rows of a micro-batch, padded to the longest, have at most `budget` tokens, unless the
    smallest possible one already exceeds it.

    Args:
        responses: Responses in order.
        budget: Maximum number of tokens.
        together: Number of consecutive responses that must be in the same micro-batch.
        one_row: Whether all prompts share a row without padding.
    """
    start, size = 0, _PackedSize()
    for i in range(0, len(responses), together):
        unit = responses[i : i + together]
        extended = size.extended(unit)
        tokens = extended.total if one_row else extended.rows * extended.longest
        if i > start and tokens > budget:
            yield slice(start, i)
            start, extended = i, _PackedSize().extended(unit)
        size = extended
    if start < len(responses):
        yield slice(start, len(responses))


@dataclass(frozen=True)
class _PackedSize:
    """Size of packed responses."""

    rows: int = 0
    longest: int = 0  # tokens of the longest row
    row_length: int = 0  # tokens of the last row
    question: int | None = None  # of the last row
    total: int = 0  # tokens of all rows

    def extended(self, responses: Sequence[Response]) -> "_PackedSize":
        """Return the size with further responses."""
        rows, longest, length, question = self.rows, self.longest, self.row_length, self.question
        total = self.total
        for response in responses:
            joins = response.question == question  # the same row as the previous response
            length = response.length + (length if joins else len(response.prompt))
            rows, longest = rows + (not joins), max(longest, length)
            total += response.length + (0 if joins else len(response.prompt))
            question = response.question
        return _PackedSize(rows, longest, length, question, total)
