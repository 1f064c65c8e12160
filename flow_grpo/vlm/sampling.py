"""Sample responses with continuous batching.

Every token uses one random number from its own sample's generator, so a response does not depend on
which others are sampled with it. decoding.py describes the slots and the decoding step.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flow_grpo.perf.device_memory import free_memory
from flow_grpo.vlm.decoding import (
    COLUMN_MULTIPLE,
    DecodingGraphs,
    DecodingSlots,
    DecodingStep,
    PrefilledPrompts,
    can_capture_graphs,
    draw_uniform,
    slot_bytes,
)
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import PADDING_SEGMENT, left_pad_prompts
from flow_grpo.vlm.prompts import EncodedPrompt

logger = logging.getLogger("flow_grpo")

SLOT_FRACTION = 0.7  # of the free memory, at most; the rest is for the next prompts and logits
STEPS_PER_CHECK = 4  # steps between checks for finished responses, each of which syncs with the GPU
MAX_OCCUPANCY = 15 / 16  # refill at or below this: starting several at once is cheaper
COMPACTION_THRESHOLD = 0.8  # compact when this fraction of the rows or less is active

# prompts, the prompt index of each response, and their generators (None for greedy decoding)
PromptBatch = tuple[Sequence[EncodedPrompt], Sequence[int], Sequence[torch.Generator] | None]


@dataclass(frozen=True)
class SampledTokens:
    """Responses on the CPU, each with its own length T."""

    tokens: list[Tensor]  # (T,), including the stop token if there is one
    log_probs: list[Tensor]  # (T,)
    ended: list[bool]  # False if truncated at `max_new_tokens`


@dataclass
class PendingBatch:
    """A requested batch, whose responses start in order and finish in any order."""

    rows: Sequence[int]  # prompt index of each response
    draws: Tensor | None  # (responses, steps)
    prefilled: PrefilledPrompts | None  # None once all responses have started
    started: int = 0
    # tokens, log-probabilities and `ended` of finished responses, by index
    finished: dict[int, tuple[Tensor, Tensor, bool]] = field(default_factory=dict)

    def sampled(self) -> SampledTokens:
        """Return all responses in the order of the request, once all have finished."""
        responses = (self.finished[number] for number in range(len(self.rows)))
        return SampledTokens(*map(list, zip(*responses, strict=True)))


@dataclass
class ActiveSequence:
    """A response that occupies a slot."""

    batch: PendingBatch
    number: int  # index in the batch
    start: int  # column of its first token
    tokens: int = 1  # number of tokens so far


class Sampler:
    """Samples with the weights as of construction; its GPU memory is freed with the object.

    Args:
        network: The policy.
        max_new_tokens: Maximum length of a response.
        stop: Ids of the tokens that end a response.
        pad: Padding token id.
        cuda_graphs: Whether to replay decoding steps as CUDA graphs on a GPU.
    """

    def __init__(
        self,
        network: PolicyModel,
        *,
        max_new_tokens: int,
        stop: Sequence[int],
        pad: int,
        cuda_graphs: bool = True,
    ) -> None:
        self.network, self.steps, self.pad = network, max_new_tokens, pad
        self.device = next(network.parameters()).device
        self.stop = torch.tensor(stop, device=self.device)
        self.eager_step = DecodingStep(network)
        self.use_cuda_graphs = (
            cuda_graphs and self.device.type == "cuda" and can_capture_graphs(network)
        )
        self.step: DecodingStep | DecodingGraphs = self.eager_step
        self.slots: DecodingSlots | None = None
        self.max_slots = 0  # slots that fit in memory; known once slots are allocated

    def sample(
        self,
        prompts: Sequence[EncodedPrompt],
        rows: Sequence[int],
        generators: Sequence[torch.Generator] | None = None,
    ) -> SampledTokens:
        """Sample a response to `prompts[row]` for each of `rows`, greedily without generators.

        Each prompt is prefilled once for all its responses.
        """
        [sampled] = self.sample_stream([(prompts, rows, generators)])
        return sampled

    @torch.no_grad()
    def sample_stream(self, requests: Iterable[PromptBatch]) -> Iterator[SampledTokens]:
        """Yield the result of `sample` for each batch, in order.

        There are slots for one batch, or as many as fit in memory: when a response ends, the next
        one, which may be of the next batch, takes its slot.
        """
        # in training mode, models with activation checkpointing do not use a cache
        self.network.eval()
        remaining, batches, active = iter(requests), deque[PendingBatch](), {}
        while True:
            self._start_sequences(remaining, batches, active)
            while batches and len(batches[0].finished) == len(batches[0].rows):
                yield batches.popleft().sampled()
            if not active:
                return
            self._decode_steps(active)
            self._collect_finished(active)

    def _start_sequences(
        self,
        remaining: Iterator[PromptBatch],
        batches: deque[PendingBatch],
        active: dict[int, ActiveSequence],
    ) -> None:
        """Start waiting responses in free slots."""
        while not active or len(active) <= MAX_OCCUPANCY * self.slots.rows:
            if not batches or batches[-1].prefilled is None:
                request = next(remaining, None)
                if request is None:
                    return
                batches.append(self._prefill(*request))
            batch = batches[-1]
            if not self._ensure_slots(batch, active):
                return
            free = [slot for slot in range(self.slots.rows) if slot not in active]
            numbers = range(batch.started, len(batch.rows))[: len(free)]
            part, slots = slice(numbers.start, numbers.stop), self._tensor(free[: len(numbers)])
            chosen = self._tensor(batch.rows[part])
            draws = None if batch.draws is None else batch.draws[part]
            self.slots.fill(slots, batch.prefilled, chosen, draws)
            scores = self.network.log_probs(batch.prefilled.hidden[chosen])
            self.slots.write_next_tokens(scores, slots, greedy=draws is None)
            pairs = zip(free, numbers, strict=False)
            active |= {slot: ActiveSequence(batch, n, batch.prefilled.columns) for slot, n in pairs}
            batch.started = part.stop
            if batch.started == len(batch.rows):
                batch.prefilled = None

    def _prefill(
        self,
        prompts: Sequence[EncodedPrompt],
        rows: Sequence[int],
        generators: Sequence[torch.Generator] | None,
    ) -> PendingBatch:
        """Run the prompts through the network, and draw the random numbers of their responses."""
        inputs = left_pad_prompts(prompts, self.pad).to(self.device)
        cache = self.network.family.new_cache()
        hidden = self.network.hidden_states(inputs, cache)[:, -1].clone()  # frees the other columns
        padding = (inputs.segments == PADDING_SEGMENT).sum(1)
        next_position = self._tensor([prompt.next_position for prompt in prompts])
        prefilled = PrefilledPrompts(
            cache, hidden, padding, next_position, inputs.input_ids.shape[1]
        )
        draws = None if generators is None else draw_uniform(generators, self.steps).to(self.device)
        return PendingBatch(rows, draws, prefilled)

    def _ensure_slots(self, batch: PendingBatch, active: dict[int, ActiveSequence]) -> bool:
        """Allocate slots that fit the batch; return False if smaller ones are still in use."""
        rows, columns = len(batch.rows), _round_up_columns(batch.prefilled.columns + self.steps)
        if self.slots is not None and self.slots.fits(min(rows, self.max_slots), columns):
            return True
        if active:
            return False
        if self.slots is not None:  # never shrink: turns of an episode would reallocate in turn
            rows, columns = max(rows, self.slots.rows), max(columns, self.slots.columns)
        # free the old slots first: both together may exceed the GPU's memory
        self.slots, self.step = None, self.eager_step
        dtype = self.network.compute_dtype
        size = slot_bytes(batch.prefilled, columns, self.steps, dtype)
        self.max_slots = max(1, int(SLOT_FRACTION * free_memory(self.device) / size))
        if self.max_slots < rows:
            logger.info("memory allows %d, not %d, concurrent responses", self.max_slots, rows)
            rows = self.max_slots
        self.slots = DecodingSlots(batch.prefilled, rows, columns, self.steps, dtype)
        self.step = DecodingGraphs(self.eager_step) if self.use_cuda_graphs else self.eager_step
        return True

    def _decode_steps(self, active: dict[int, ActiveSequence]) -> None:
        """Decode up to `STEPS_PER_CHECK` tokens of each active response."""
        size, compacted = self._batch_rows(max(active) + 1), self._batch_rows(len(active))
        if compacted <= COMPACTION_THRESHOLD * size:
            self.slots.compact(self._tensor(list(active)), self._used_columns(active))
            sequences, size = list(active.values()), compacted
            active.clear()
            active.update(enumerate(sequences))
        modes = {sequence.batch.draws is None for sequence in active.values()}
        greedy = modes.pop() if len(modes) == 1 else None
        remaining = self.steps - min(sequence.tokens for sequence in active.values())
        for _ in range(min(STEPS_PER_CHECK, remaining)):
            columns = self._used_columns(active)
            if self.use_cuda_graphs:
                columns = _round_up_columns(columns)
            self.step.run(self.slots, size, columns, greedy=greedy)
            for sequence in active.values():
                sequence.tokens += 1

    def _collect_finished(self, active: dict[int, ActiveSequence]) -> None:
        """Move finished responses to their batches and free their slots."""
        slots = list(active)
        lengths = self.slots.finished_lengths(self._tensor(slots), self.stop).tolist()
        ended = {slot: length for slot, length in zip(slots, lengths, strict=True) if length}
        truncated = {s: self.steps for s, each in active.items() if each.tokens >= self.steps}
        finished = truncated | ended
        if not finished:
            return
        index = self._tensor(list(finished))
        columns = self.slots.tokens[index].cpu(), self.slots.log_probs[index].cpu()
        for (slot, length), tokens, log_probs in zip(finished.items(), *columns, strict=True):
            sequence = active.pop(slot)
            sequence.batch.finished[sequence.number] = (
                tokens[:length].clone(),
                log_probs[:length].clone(),
                slot in ended,
            )

    def _batch_rows(self, count: int) -> int:
        """Return how many rows a step computes for `count` active ones.

        With CUDA graphs it is the number of slots, halved as long as `count` rows fit, so that few
        graphs are captured.
        """
        if not self.use_cuda_graphs:
            return count
        size = self.slots.rows
        while count <= size // 2:
            size //= 2
        return size

    def _used_columns(self, active: dict[int, ActiveSequence]) -> int:
        """Return how many cache columns the next step uses."""
        longest = max(sequence.start + sequence.tokens for sequence in active.values())
        return min(longest, self.slots.columns)  # complete responses would need one more

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)


def _round_up_columns(columns: int) -> int:
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
