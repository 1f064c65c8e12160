"""Sample answers: one random number per token of each sample, whatever else is sampled with it."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flow_grpo.answer.batches import PADDING, left_padded
from flow_grpo.answer.decoding import (
    COLUMNS,
    DecodingStep,
    Graphs,
    Read,
    Slots,
    can_record,
    uniform,
)
from flow_grpo.answer.network import AnswerModel
from flow_grpo.answer.prompts import EncodedPrompt

LOOK = 4  # steps between two looks at which answers have ended, for which a GPU is waited
MOST_TAKEN = 15 / 16  # of the slots, for others to begin: several at once, as it takes a while
MOST_ALIVE = 0.8  # share of the slots whose answers go on, for the others to be left out

# prompts, the prompt of each answer, and their generators; without these the likeliest tokens
Asked = tuple[Sequence[EncodedPrompt], Sequence[int], Sequence[torch.Generator] | None]


@dataclass(frozen=True)
class Sampled:
    """Answers on the CPU, each of its own length."""

    tokens: list[Tensor]  # (T,), the end token included where there is one
    log_probs: list[Tensor]  # (T,)
    ended: list[bool]  # False: cut off after `max_new_tokens`


@dataclass
class Batch:
    """Answers that are asked for together: they begin one after the other, and end in any order."""

    rows: Sequence[int]  # the prompt of each
    draws: Tensor | None  # (answers, steps)
    read: Read | None  # until all have begun
    begun: int = 0
    said: dict[int, tuple[Tensor, Tensor, bool]] = field(default_factory=dict)  # that have ended

    def sampled(self) -> Sampled:
        answers = (self.said[number] for number in range(len(self.rows)))
        return Sampled(*map(list, zip(*answers, strict=True)))


@dataclass
class Going:
    """An answer in a slot."""

    batch: Batch
    number: int
    start: int  # column of its first token
    tokens: int = 1  # that it has


class Sampler:
    """Samples with the weights as they were when it was made. Memory that it takes on a GPU is free
    again when it is gone."""

    def __init__(
        self,
        network: AnswerModel,
        *,
        max_new_tokens: int,
        stop: Sequence[int],  # end tokens
        pad: int,
        cuda_graphs: bool = True,
    ) -> None:
        self.network, self.steps, self.pad = network, max_new_tokens, pad
        self.device = next(network.parameters()).device
        self.stop = torch.tensor(stop, device=self.device)
        self.plain = DecodingStep(network)
        self.graphed = cuda_graphs and self.device.type == "cuda" and can_record(network)
        self.step: DecodingStep | Graphs = self.plain
        self.slots: Slots | None = None

    def sample(
        self,
        prompts: Sequence[EncodedPrompt],
        rows: Sequence[int],
        generators: Sequence[torch.Generator] | None = None,
    ) -> Sampled:
        """An answer to `prompts[row]` for each of `rows`; without generators the likeliest tokens.

        Each prompt is read once, for all its answers.
        """
        [sampled] = self.stream([(prompts, rows, generators)])
        return sampled

    @torch.no_grad()
    def stream(self, asked: Iterable[Asked]) -> Iterator[Sampled]:
        """What `sample` gives for each batch, in their order. There are slots for one of them: when
        an answer has ended, one of the next batch begins in its slot."""
        self.network.eval()  # in training, a model that recomputes activations keeps no cache
        left, batches, going = iter(asked), deque[Batch](), {}
        while True:
            self._begin(left, batches, going)
            while batches and len(batches[0].said) == len(batches[0].rows):
                yield batches.popleft().sampled()
            if not going:
                return
            self._go_on(going)
            self._look(going)

    def _begin(self, left: Iterator[Asked], batches: deque[Batch], going: dict[int, Going]) -> None:
        """Answers that wait, in the slots that are free."""
        while not going or len(going) <= MOST_TAKEN * self.slots.rows:
            if not batches or batches[-1].read is None:
                asked = next(left, None)
                if asked is None:
                    return
                batches.append(self._read(*asked))
            batch = batches[-1]
            if not self._make_room(batch, going):
                return
            free = [slot for slot in range(self.slots.rows) if slot not in going]
            numbers = range(batch.begun, len(batch.rows))[: len(free)]
            part, slots = slice(numbers.start, numbers.stop), self._tensor(free[: len(numbers)])
            chosen = self._tensor(batch.rows[part])
            draws = None if batch.draws is None else batch.draws[part]
            self.slots.fill(slots, batch.read, chosen, draws)
            scores = self.network.log_probs(batch.read.hidden[chosen])
            self.slots.write(scores, slots, greedy=draws is None)
            pairs = zip(free, numbers, strict=False)
            going |= {slot: Going(batch, n, batch.read.columns) for slot, n in pairs}
            batch.begun = part.stop
            if batch.begun == len(batch.rows):
                batch.read = None

    def _read(
        self,
        prompts: Sequence[EncodedPrompt],
        rows: Sequence[int],
        generators: Sequence[torch.Generator] | None,
    ) -> Batch:
        inputs = left_padded(prompts, self.pad).to(self.device)
        cache = self.network.family.cache()
        hidden = self.network.hidden(inputs, cache)[:, -1].clone()  # the others are not kept
        padding = (inputs.segments == PADDING).sum(1)
        following = self._tensor([prompt.following for prompt in prompts])
        read = Read(cache, hidden, padding, following, inputs.input_ids.shape[1])
        draws = None if generators is None else uniform(generators, self.steps).to(self.device)
        return Batch(rows, draws, read)

    def _make_room(self, batch: Batch, going: dict[int, Going]) -> bool:
        """Slots that are large enough, unless others are still in use."""
        rows, columns = len(batch.rows), _rounded(batch.read.columns + self.steps)
        if self.slots is not None and self.slots.fits(rows, columns):
            return True
        if going:
            return False
        if self.slots is not None:  # else turns of an episode would make them anew in turn
            rows, columns = max(rows, self.slots.rows), max(columns, self.slots.columns)
        # gone before there are others: both may be more than a GPU has
        self.slots, self.step = None, self.plain
        dtype = self.network.compute_dtype
        self.slots = Slots(batch.read, rows, columns, self.steps, dtype)
        self.step = Graphs(self.plain) if self.graphed else self.plain
        return True

    def _go_on(self, going: dict[int, Going]) -> None:
        """A few tokens more of each answer."""
        size, fewer = self._size(max(going) + 1), self._size(len(going))
        if fewer <= MOST_ALIVE * size:
            self.slots.keep(self._tensor(list(going)), self._seen(going))
            answers, size = list(going.values()), fewer
            going.clear()
            going.update(enumerate(answers))
        kinds = {answer.batch.draws is None for answer in going.values()}
        greedy = kinds.pop() if len(kinds) == 1 else None
        missing = self.steps - min(answer.tokens for answer in going.values())
        for _ in range(min(LOOK, missing)):
            columns = self._columns(self._seen(going))
            self.step.take(self.slots, size, columns, greedy=greedy)
            for answer in going.values():
                answer.tokens += 1

    def _look(self, going: dict[int, Going]) -> None:
        """Which answers have ended: their slots are free."""
        slots = list(going)
        lengths = self.slots.lengths(self._tensor(slots), self.stop).tolist()
        ended = {slot: length for slot, length in zip(slots, lengths, strict=True) if length}
        cut = {s: self.steps for s, answer in going.items() if answer.tokens >= self.steps}
        if not (over := cut | ended):
            return
        index = self._tensor(list(over))
        columns = self.slots.tokens[index].cpu(), self.slots.log_probs[index].cpu()
        for (slot, length), tokens, log_probs in zip(over.items(), *columns, strict=True):
            answer, said = going.pop(slot), (tokens[:length].clone(), log_probs[:length].clone())
            answer.batch.said[answer.number] = (*said, slot in ended)

    def _size(self, answers: int) -> int:
        """Slots that a step computes: with graphs one of a few numbers, for each of which there is
        a recording."""
        if not self.graphed:
            return answers
        size = self.slots.rows
        while answers <= size // 2:
            size //= 2
        return size

    def _seen(self, going: dict[int, Going]) -> int:
        """Columns that the next step sees."""
        longest = max(answer.start + answer.tokens for answer in going.values())
        return min(longest, self.slots.columns)  # of those that have all their tokens, too

    def _columns(self, count: int) -> int:
        return _rounded(count) if self.graphed else count

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)


def _rounded(columns: int) -> int:
    return -(-columns // COLUMNS) * COLUMNS
