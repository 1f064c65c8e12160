"""Sample answers: one random number per token of each sample, whatever the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flow_grpo.answer.batches import PADDING, left_padded
from flow_grpo.answer.decoding import COLUMNS, DecodingStep, Graphs, Slots, uniform
from flow_grpo.answer.network import AnswerModel
from flow_grpo.answer.prompts import EncodedPrompt

LOOK = 4  # steps between two looks at which answers have ended, for which a GPU is waited
MOST_ALIVE = 0.8  # share of the slots whose answers go on, for the others to be left out


@dataclass(frozen=True)
class Sampled:
    """Answers on the CPU, each of its own length."""

    tokens: list[Tensor]  # (T,), the end token included where there is one
    log_probs: list[Tensor]  # (T,)
    ended: list[bool]  # False: cut off after `max_new_tokens`


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
        self.graphed = cuda_graphs and self.device.type == "cuda"
        self.step: DecodingStep | Graphs = self.plain
        self.slots: Slots | None = None

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[EncodedPrompt],
        rows: Sequence[int],
        generators: Sequence[torch.Generator] | None = None,
    ) -> Sampled:
        """An answer to `prompts[row]` for each of `rows`; without generators the likeliest tokens.

        Each prompt is read once, for all its answers.
        """
        self.network.eval()  # in training, a model that recomputes activations keeps no cache
        slots, width = self._read(prompts, rows, generators)
        size, greedy = self._size(len(rows)), generators is None
        for i in range(1, self.steps):
            if i % LOOK == 0:
                ended = torch.isin(slots.tokens[:, :i], self.stop).any(1)
                ended[-1] = True  # of unused slots
                going = (~ended[slots.answer[:size]]).nonzero()[:, 0]
                if not len(going):
                    break
                fewer = self._size(len(going))
                if fewer <= MOST_ALIVE * size:
                    slots.keep(going, width + i - 1)
                    size = fewer
            self.step.take(slots, size, self._columns(width + i), greedy=greedy)
        answers = slice(0, len(rows))
        return _cut(slots.tokens[answers].cpu(), slots.log_probs[answers].cpu(), self.stop.cpu())

    def _read(
        self,
        prompts: Sequence[EncodedPrompt],
        rows: Sequence[int],
        generators: Sequence[torch.Generator] | None,
    ) -> tuple[Slots, int]:
        """The prompts, and the first token of every answer; the columns that prompts take."""
        inputs = left_padded(prompts, self.pad).to(self.device)
        cache = self.network.family.cache()
        hidden = self.network.hidden(inputs, cache)[:, -1]
        count, width = len(rows), inputs.input_ids.shape[1]
        columns = self._columns(width + self.steps)
        if self.slots is None or not self.slots.fits(count, columns):
            # gone before there are others: both may be more than a GPU has
            self.slots, self.step = None, self.plain
            self.slots = Slots(
                cache, hidden, count, columns, self.steps, self.network.compute_dtype
            )
            self.step = Graphs(self.plain) if self.graphed else self.plain
        chosen = torch.tensor(rows, device=self.device)
        first = torch.tensor([prompts[row].following for row in rows], device=self.device)
        draws = None if generators is None else uniform(generators, self.steps).to(self.device)
        self.slots.fill(cache, inputs.segments != PADDING, chosen, first, draws, self.pad)
        self.slots.write(self.network.log_probs(hidden[chosen]), greedy=draws is None)
        return self.slots, width

    def _size(self, answers: int) -> int:
        """Slots that a step computes: with graphs one of a few numbers, for each of which there is
        a recording."""
        if not self.graphed:
            return answers
        size = self.slots.rows
        while answers <= size // 2:
            size //= 2
        return size

    def _columns(self, count: int) -> int:
        return -(-count // COLUMNS) * COLUMNS if self.graphed else count


def _cut(tokens: Tensor, log_probs: Tensor, stops: Tensor) -> Sampled:
    """Each answer up to its end token."""
    ends = torch.isin(tokens, stops)
    ended = ends.any(1)
    lengths = torch.where(ended, ends.int().argmax(1) + 1, tokens.shape[1]).tolist()
    return Sampled(
        [row[:n].clone() for row, n in zip(tokens, lengths, strict=True)],
        [row[:n].clone() for row, n in zip(log_probs, lengths, strict=True)],
        ended.tolist(),
    )
