"""The steps of sampling. On a GPU each is one CUDA graph: to launch its thousand kernels one by one
takes several times as long as they run."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from flow_grpo.answer.attention import one_query, rotary_files
from flow_grpo.answer.network import AnswerModel
from flow_grpo.speed.lora import (
    is_sum,
    lora_layers,
    merged_weight,
    narrowed,
    without_lora,
)
from flow_grpo.speed.replay import WARM_UP, GraphMemory
from flow_grpo.speed.siblings import Siblings


@dataclass(frozen=True)
class Read:
    """Prompts as the model has read them."""

    cache: DynamicCache
    hidden: Tensor  # (prompts, width), of the last token
    padding: Tensor  # (prompts,), columns to the left of each
    following: Tensor  # (prompts,), position of an answer's first token
    columns: int


class FixedCache(Cache):
    """Keys and values of every layer, in tensors that stay where they are. A step writes to the
    column `place` of each row, and sees the first `columns` of the first `rows`. A layer of linear
    attention has two states instead, each of one size."""

    place: Tensor  # (rows,)

    def __init__(
        self, read: DynamicCache, rows: int, columns: int, dtype: torch.dtype | None
    ) -> None:
        """Room for `rows` as long as `columns`, shaped like those that were `read`. Norms with
        weights in float32 widen what autocast would narrow again for every token: `dtype` is what
        it narrows to, or None."""
        super().__init__(layers=[])
        self.held: dict[int, tuple[Tensor, ...]] = {}  # by layer: keys and values
        self.states: dict[int, tuple[Tensor, ...]] = {}  # or: of its convolution, and the recurrent
        for number, own in enumerate(read.layers):
            if isinstance(own, LinearAttentionLayer):
                layer = LinearAttentionLayer()
                layer.lazy_initialization(*(x.new_empty(rows, *x.shape[1:]) for x in _states(own)))
                layer.has_previous_state[0] = True
                self.layers.append(layer)
                self.states[number] = _states(layer)
            else:
                self.layers.append(DynamicLayer())
                self.held[number] = tuple(
                    x.new_zeros(rows, x.shape[1], columns, x.shape[3], dtype=dtype)
                    for x in (own.keys, own.values)
                )
        first, _ = next(iter(self.held.values()))
        self.dtype = first.dtype
        self.every = torch.arange(rows, device=first.device)
        self.show(rows, columns)

    def show(self, rows: int, columns: int) -> None:
        """What the next steps see."""
        self.rows, self.columns = rows, columns
        for number, (convolution, recurrent) in self.states.items():
            layer = self.layers[number]  # from which the model takes them, and writes in place
            layer.conv_states[0], layer.recurrent_states[0] = convolution[:rows], recurrent[:rows]

    def fill(self, slots: Tensor, read: Read, chosen: Tensor) -> None:
        """Row `slots[i]` with what was read of prompt `chosen[i]`."""
        for number, pair in self.held.items():
            own = read.cache.layers[number]
            for held, new in zip(pair, (own.keys, own.values), strict=True):
                held[slots, :, : read.columns] = new[chosen].to(held.dtype)
        for number, pair in self.states.items():
            for held, new in zip(pair, _states(read.cache.layers[number]), strict=True):
                held[slots] = new[chosen]

    def keep(self, index: Tensor, columns: int) -> None:
        """Move these rows, as long as `columns`, to the front."""
        for pair in self.held.values():
            for held in pair:
                held[: len(index), :, :columns] = held[index, :, :columns]
        for pair in self.states.values():
            for held in pair:
                held[: len(index)] = held[index]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any) -> tuple[Tensor, ...]:
        every = [held[: self.rows, :, : self.columns] for held in self.held[layer_idx]]
        for held, new in zip(every, (keys, values), strict=True):
            held[self.every[: self.rows], :, self.place] = new[:, :, 0].to(held.dtype)
        return tuple(every)


def _states(layer: LinearAttentionLayer) -> tuple[Tensor, Tensor]:
    return layer.conv_states[0], layer.recurrent_states[0]


CHUNK = 128  # tokens whose probabilities are summed first: one long sum is slow on a GPU
COLUMNS = 256  # of the cache: the graphs are made for multiples of this
GREEDY = -1.0  # in place of a draw: the likeliest token


class Slots:
    """Answers that are sampled together, in tensors that stay where they are. Each row is a slot,
    which an answer that has ended leaves to another."""

    def __init__(
        self, read: Read, rows: int, columns: int, steps: int, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype`: of the cache."""
        device = read.hidden.device
        self.cache = FixedCache(read.cache, rows, columns, dtype)
        self.rows, self.columns, self.steps = rows, columns, steps
        numbers = torch.zeros(5, rows, dtype=torch.long, device=device)
        self.token, self.step = numbers[:2]  # the last of each answer
        self.padding, self.start, self.first = numbers[2:]  # columns, and the position, of each
        # with a column more, for answers that have all their tokens and still a slot
        self.draws = torch.zeros(rows, steps + 1, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(rows, steps + 1, dtype=torch.long, device=device)
        precise = torch.promote_types(read.hidden.dtype, torch.float32)
        self.log_probs = torch.zeros(rows, steps + 1, dtype=precise, device=device)

    def fits(self, rows: int, columns: int) -> bool:
        return self.rows >= rows and self.columns >= columns

    def fill(self, slots: Tensor, read: Read, chosen: Tensor, draws: Tensor | None) -> None:
        """Answers to the prompts `chosen` (answers,) begin in `slots` (answers,); the likeliest
        ones, without `draws` (answers, steps)."""
        self.cache.fill(slots, read, chosen)
        self.padding[slots], self.first[slots] = read.padding[chosen], read.following[chosen]
        self.start[slots], self.step[slots] = read.columns, 0
        self.draws[slots, : self.steps] = GREEDY if draws is None else draws

    def write(self, log_probs: Tensor, slots: Tensor, *, greedy: bool | None) -> None:
        """The next token of each answer, chosen from (slots, vocabulary); `greedy`: whether all are
        the likeliest ones, None where some are."""
        step = self.step[slots]
        if greedy is not False:
            token = likeliest = log_probs.argmax(-1)
        if not greedy:
            draw = self.draws[slots, step]
            token = choose(log_probs, draw)
        if greedy is None:
            token = torch.where(draw == GREEDY, likeliest, token)
        self.token[slots] = self.tokens[slots, step] = token
        self.log_probs[slots, step] = log_probs.gather(-1, token[:, None])[:, 0]

    def lengths(self, slots: Tensor, stop: Tensor) -> Tensor:
        """(slots,): tokens up to the first of `stop`; 0 where there is none yet."""
        written = torch.arange(self.steps, device=slots.device) <= self.step[slots, None]
        ends = torch.isin(self.tokens[slots, : self.steps], stop) & written
        return torch.where(ends.any(1), ends.int().argmax(1) + 1, 0)

    def keep(self, index: Tensor, columns: int) -> None:
        """Move these slots, with so many columns in use, to the front."""
        self.cache.keep(index, columns)
        numbers = (self.token, self.step, self.padding, self.start, self.first)
        for held in (*numbers, self.draws, self.tokens, self.log_probs):
            held[: len(index)] = held[index]

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Context that undoes the decoding step taken in it: to warm up, and to record a graph."""
        states = (state for pair in self.cache.states.values() for state in pair)
        kept = (self.token, self.step, *states)
        before = [held.clone() for held in kept]
        yield
        for held, value in zip(kept, before, strict=True):
            held.copy_(value)


class DecodingStep(nn.Module):
    """From one token of each answer to the next, with the weights as they were when it was made."""

    def __init__(self, network: AnswerModel) -> None:
        super().__init__()
        self.network = network
        self.lora, self.weights, self.together = [], {}, []
        half = network.compute_dtype is not None
        if half:
            self.lora = [layer for layer in lora_layers(network) if is_sum(layer)]
            self.weights = dict(_for_sampling(self, network.compute_dtype))
            decoding = set(network.model.get_decoder().modules())
            parents = [(name, m) for name, m in self.named_modules() if m in decoding]
            self.together = list(_joined(parents, self.lora, self.weights))
        fuse = half and next(network.parameters()).is_cuda
        self.rotary = rotary_files(network.model.get_decoder()) if fuse else {}

    def take(self, slots: Slots, rows: int, columns: int, *, greedy: bool | None) -> None:
        with without_lora(self.lora), _together(self.together):
            inputs = (slots, rows, columns, greedy)
            functional_call(self, self.weights, inputs, tie_weights=False)

    def forward(self, slots: Slots, rows: int, columns: int, greedy: bool | None) -> None:
        cache, step = slots.cache, slots.step[:rows]
        cache.show(rows, columns)
        # an answer that has ended, and still has a slot, may be beyond what is shown
        cache.place = (slots.start[:rows] + step).clamp(max=columns - 1)
        column = torch.arange(columns, device=step.device)
        padding = torch.minimum(slots.padding[:rows], cache.place)  # a token sees itself at least
        unseen = (column > cache.place[:, None]) | (column < padding[:, None])
        # as attention adds it: given what is seen, every layer would make this of it
        mask = torch.zeros_like(unseen, dtype=cache.dtype).masked_fill_(unseen, -torch.inf)
        with one_query(self.network.model.get_decoder(), self.rotary):
            positions = (slots.first[:rows] + step).expand(self.network.family.axes, -1)
            hidden = self.network.forward_model(
                positions[..., None],
                input_ids=slots.token[:rows, None],
                attention_mask=mask[:, None, None],
                past_key_values=cache,
                use_cache=True,
            )
        step.add_(1).clamp_(max=slots.steps)
        slots.write(self.network.log_probs(hidden[:, 0]), cache.every[:rows], greedy=greedy)


@torch.no_grad()
def _for_sampling(step: DecodingStep, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Weights by name: LoRA merged, and cast once what autocast would cast in every step."""
    merged = {layer.base_layer.weight for layer in step.lora}
    for name, module in step.named_modules():
        if module in step.lora:
            weight = merged_weight(module, module.base_layer.weight)
            yield f"{name}.base_layer.weight", narrowed(weight, dtype)
        elif type(module) is nn.Linear and ".lora_" not in name:
            for part, weight in module.named_parameters(recurse=False):
                if weight.dtype != dtype and weight not in merged:
                    yield f"{name}.{part}", weight.to(dtype)


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # take the same input


@dataclass(frozen=True)
class Joint:
    """Layers that take the same input, as one product."""

    siblings: Siblings
    weight: Tensor
    bias: Tensor | None
    sizes: list[int]

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        return functional.linear(x, self.weight, self.bias).split(self.sizes, -1)


@torch.no_grad()
def _joined(
    parents: Iterable[tuple[str, nn.Module]],
    merged: list[nn.Module],
    weights: dict[str, Tensor],
) -> Iterator[Joint]:
    """Layers whose `weights` are copies, with LoRA `merged` where they have one: one tensor for all
    siblings takes their place."""
    for name, parent in parents:
        for names in SIBLINGS:
            layers = [getattr(parent, child, None) for child in names]
            plain = [getattr(layer, "base_layer", layer) for layer in layers]
            paths = [
                f"{name}.{child}" + ("" if layer is own else ".base_layer")
                for child, layer, own in zip(names, layers, plain, strict=True)
            ]
            if any(f"{path}.weight" not in weights for path in paths):
                continue
            pairs = zip(layers, plain, strict=True)
            if any(layer is not own and layer not in merged for layer, own in pairs):
                continue
            biases = [weights.get(f"{p}.bias", x.bias) for p, x in zip(paths, plain, strict=True)]
            if len({bias is None for bias in biases}) > 1:
                continue
            bias = None if biases[0] is None else torch.cat(biases)
            weight = torch.cat([weights[f"{path}.weight"] for path in paths])
            sizes = [layer.out_features for layer in plain]
            for path, part in zip(paths, weight.split(sizes), strict=True):
                weights[f"{path}.weight"] = part
            yield Joint(Siblings(layers), weight, bias, sizes)


@contextmanager
def _together(joints: list[Joint]) -> Iterator[None]:
    """Context in which siblings are one product."""
    pairs = [(joint, layer) for joint in joints for layer in joint.siblings.layers]
    usual = [vars(layer).pop("forward", None) for _, layer in pairs]
    for joint, layer in pairs:
        layer.forward = partial(joint.siblings.part, layer, product=joint.product)
    try:
        yield
    finally:
        for (_, layer), own in zip(pairs, usual, strict=True):
            del layer.forward
            if own is not None:  # a hook of a library
                layer.forward = own


def can_record(network: nn.Module) -> bool:
    """Experts that are not in bfloat16 are multiplied one by one, by numbers that torch asks the
    GPU for, which no recording can do."""
    experts = [
        weight
        for name, weight in network.named_parameters()
        if weight.dim() == 3 and name.endswith(("gate_up_proj", "down_proj"))
    ]
    return all(weight.dtype == torch.bfloat16 for weight in experts)


class Graphs:
    """Steps of one and the same slots, recorded once for each number of rows and columns."""

    def __init__(self, step: DecodingStep) -> None:
        self.step = step
        self.memory = GraphMemory()
        self.recorded: dict[tuple, torch.cuda.CUDAGraph] = {}

    def take(self, slots: Slots, rows: int, columns: int, *, greedy: bool | None) -> None:
        kind = (rows, columns, greedy)
        if kind not in self.recorded:
            self.recorded[kind] = self._record(slots, *kind)
        self.memory.replay(self.recorded[kind])

    def _record(
        self, slots: Slots, rows: int, columns: int, greedy: bool | None
    ) -> torch.cuda.CUDAGraph:
        with self.memory.warm_up():
            for _ in range(WARM_UP):
                with slots.tried():
                    self.step.take(slots, rows, columns, greedy=greedy)
        graph = torch.cuda.CUDAGraph()
        with self.memory.record(graph):
            self.step.take(slots, rows, columns, greedy=greedy)
        return graph


def choose(log_probs: Tensor, draw: Tensor) -> Tensor:
    """The token at which the summed probabilities (B, vocabulary) pass `draw` (B,). Sums are in
    float64, so that rounding hardly ever decides; what has no probability is never chosen."""
    p = log_probs.exp()
    if missing := -p.shape[1] % CHUNK:
        p = functional.pad(p, (0, missing))
    chunks = p.unflatten(1, (-1, CHUNK))
    sums = chunks.sum(-1, dtype=torch.float64)
    chunk, left = _passing(sums, draw * sums.sum(-1))
    within = chunks.gather(1, chunk[:, None, None].expand(-1, 1, CHUNK))[:, 0]
    token, _ = _passing(within.double(), left)
    return (chunk * CHUNK + token).clamp(max=log_probs.shape[1] - 1)


def _passing(masses: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the sum of masses (B, N) passes a target (B,), and what it has left of it there."""
    reached = masses.cumsum(-1)
    passed = torch.searchsorted(reached, target[:, None], right=True)
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())  # should it round up to all
    index = torch.minimum(passed, last).clamp(max=masses.shape[1] - 1)  # masses may be NaN
    before = reached.gather(1, index) - masses.gather(1, index)
    return index[:, 0], (target - before[:, 0]).clamp(min=0)


def uniform(generators: Sequence[torch.Generator], count: int) -> Tensor:
    """(B, count) in [0, 1), a row of each generator."""
    drawn = [torch.rand(count, generator=g, dtype=torch.float64) for g in generators]
    return torch.stack(drawn)
