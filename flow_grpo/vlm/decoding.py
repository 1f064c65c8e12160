"""Batched autoregressive decoding in fixed slots, replayed as CUDA graphs.

Problem. A decoding step reads all weights to produce one token per sequence, so it is bound by
memory bandwidth, and it launches about a thousand small kernels, which takes several times as long
as running them. Sequences also end at different times, which leaves parts of a batch idle.

Approach. A batch has a fixed number of slots (rows). A sequence occupies one slot from its first to
its last token, then the slot is filled with the next one (continuous batching, see sampling.py).
All state lives in preallocated tensors that are written in place, so one step is captured as a CUDA
graph and replayed. Half precision also allows merging LoRA, fusing projections that share their
input, and casting weights once per rollout instead of once per step.

Layout. B slots, H key/value heads, C cache columns, D head dimension, T maximum response length:

    keys, values      (B, H, C, D)   per attention layer; prompts are padded on the left
    states            (B, ...)       per linear-attention layer: convolution and recurrent state
    token, step       (B,)           last token of each sequence and its index in the response
    draws             (B, T + 1)     uniform random numbers, one per token; -1 means greedy
    tokens, log_probs (B, T + 1)     the response; the extra column absorbs writes past its end

Invariants.
- Sequence i writes step t to column `start_column[i] + t` and attends to columns from `padding[i]`
  up to that one. It never depends on the contents of other slots.
- Token t of a sequence is a function of its log-probabilities and its own `draws[t]` only, so batch
  composition, slot order and graph capture do not change which random number a token uses.
- Tensors keep their addresses while graphs exist. A graph is specific to (rows, columns, greedy).

Trade-off. Graphs exist for few shapes: rows are halved and columns rounded up to
`COLUMN_MULTIPLE`, so a step computes somewhat more than it needs and graphs take memory. In
exchange the launch overhead disappears. Kernels of this path round differently from those of
training in half precision, so old log-probabilities are recomputed there (`exact_log_probs`).

Related work: Orca (Yu et al., OSDI 2022) for continuous batching; vLLM (Kwon et al., SOSP 2023),
whose paged cache is not needed here because the maximum length is known in advance.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from flow_grpo.perf.cuda_graphs import WARMUP_RUNS, CudaGraphPool
from flow_grpo.perf.lora import (
    cast_stochastic,
    disable_lora,
    is_mergeable,
    lora_layers,
    merged_weight,
)
from flow_grpo.perf.shared_projection import SharedProjection
from flow_grpo.vlm.attention import rotary_modules, single_query_attention
from flow_grpo.vlm.fused_layer import FusedDecoder
from flow_grpo.vlm.network import PolicyModel

CUMSUM_CHUNK = 128  # probabilities per partial sum: one long cumulative sum is slow on a GPU
COLUMN_MULTIPLE = 256  # graphs are captured for multiples of this many cache columns
GREEDY_DRAW = -1.0  # value in `draws` that selects the most likely token
# sibling layers with the same input
FUSABLE_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class PrefilledPrompts:
    """P prompts after prefill, padded on the left to `columns` tokens."""

    cache: DynamicCache
    hidden: Tensor  # (P, width), last hidden state of each prompt
    padding: Tensor  # (P,), padding columns on the left
    next_position: Tensor  # (P,), position id of the response's first token
    columns: int


class SlotCache(Cache):
    """Preallocated cache with one row per slot.

    A step writes to column `write_column` of each row and reads the first `columns` columns of the
    first `rows` rows. Layers with linear attention have two states of constant size instead of keys
    and values.
    """

    write_column: Tensor  # (rows,)

    def __init__(
        self, prefilled: DynamicCache, rows: int, columns: int, dtype: torch.dtype | None
    ) -> None:
        """Allocate `rows` x `columns` for the layers of a prefilled cache.

        Args:
            prefilled: A cache from prefill, for the shapes.
            rows: Number of slots.
            columns: Maximum number of tokens per slot.
            dtype: Dtype of keys and values; None keeps that of `prefilled`. Under autocast, norms
                with float32 weights produce float32 keys, which attention would cast again in
                every step; storing them in the compute dtype avoids that.
        """
        super().__init__(layers=[])
        self.keys_values: dict[int, tuple[Tensor, ...]] = {}  # by layer index
        self.states: dict[int, tuple[Tensor, ...]] = {}  # convolution and recurrent, by layer index
        for number, source in enumerate(prefilled.layers):
            if isinstance(source, LinearAttentionLayer):
                layer = LinearAttentionLayer()
                layer.lazy_initialization(
                    *(x.new_empty(rows, *x.shape[1:]) for x in _linear_attention_states(source))
                )
                layer.has_previous_state[0] = True
                self.layers.append(layer)
                self.states[number] = _linear_attention_states(layer)
            else:
                self.layers.append(DynamicLayer())
                self.keys_values[number] = tuple(
                    x.new_zeros(rows, x.shape[1], columns, x.shape[3], dtype=dtype)
                    for x in (source.keys, source.values)
                )
        first, _ = next(iter(self.keys_values.values()))
        self.dtype = first.dtype
        self.row_index = torch.arange(rows, device=first.device)
        self.set_view(rows, columns)

    def set_view(self, rows: int, columns: int) -> None:
        """Set how many rows and columns the next steps use."""
        self.rows, self.columns = rows, columns
        for number, (convolution, recurrent) in self.states.items():
            layer = self.layers[number]  # the model updates the states of this layer in place
            layer.conv_states[0], layer.recurrent_states[0] = convolution[:rows], recurrent[:rows]

    def fill(self, slots: Tensor, prefilled: PrefilledPrompts, chosen: Tensor) -> None:
        """Copy prompt `chosen[i]` into row `slots[i]`."""
        for number, pair in self.keys_values.items():
            layer = prefilled.cache.layers[number]
            for stored, new in zip(pair, (layer.keys, layer.values), strict=True):
                stored[slots, :, : prefilled.columns] = new[chosen].to(stored.dtype)
        for number, pair in self.states.items():
            states = _linear_attention_states(prefilled.cache.layers[number])
            for stored, new in zip(pair, states, strict=True):
                stored[slots] = new[chosen]

    def compact(self, index: Tensor, columns: int) -> None:
        """Copy the rows `index` to the first rows, up to `columns`."""
        for pair in self.keys_values.values():
            for stored in pair:
                stored[: len(index), :, :columns] = stored[index, :, :columns]
        for pair in self.states.values():
            for stored in pair:
                stored[: len(index)] = stored[index]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any) -> tuple[Tensor, ...]:
        """Store the keys and values (rows, H, 1, D) of one token; return all columns in view."""
        view = [stored[: self.rows, :, : self.columns] for stored in self.keys_values[layer_idx]]
        for stored, new in zip(view, (keys, values), strict=True):
            rows = self.row_index[: self.rows]
            stored[rows, :, self.write_column] = new[:, :, 0].to(stored.dtype)
        return tuple(view)


def _linear_attention_states(layer: LinearAttentionLayer) -> tuple[Tensor, Tensor]:
    return layer.conv_states[0], layer.recurrent_states[0]


def slot_bytes(
    prefilled: PrefilledPrompts, columns: int, steps: int, dtype: torch.dtype | None
) -> int:
    """Return the size of one slot in bytes; for the arguments see `DecodingSlots`."""
    total = 3 * (steps + 1) * torch.float64.itemsize  # random numbers, tokens, log-probabilities
    for layer in prefilled.cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            total += sum(x[0].nbytes for x in _linear_attention_states(layer))
        else:
            width = layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel()
            total += width * columns * (dtype or layer.keys.dtype).itemsize
    return total


class DecodingSlots:
    """State of the sequences that are decoded together; see the module docstring for the layout."""

    def __init__(
        self,
        prefilled: PrefilledPrompts,
        rows: int,
        columns: int,
        steps: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate slots for responses of up to `steps` tokens; `dtype` is that of the cache."""
        device = prefilled.hidden.device
        self.cache = SlotCache(prefilled.cache, rows, columns, dtype)
        self.rows, self.columns, self.steps = rows, columns, steps
        numbers = torch.zeros(5, rows, dtype=torch.long, device=device)
        self.token, self.step = numbers[:2]
        self.padding, self.start_column, self.first_position = numbers[2:]
        # one extra column, for complete responses that still occupy a slot
        self.draws = torch.zeros(rows, steps + 1, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(rows, steps + 1, dtype=torch.long, device=device)
        precise = torch.promote_types(prefilled.hidden.dtype, torch.float32)
        self.log_probs = torch.zeros(rows, steps + 1, dtype=precise, device=device)

    def fits(self, rows: int, columns: int) -> bool:
        """Return whether the allocated slots suffice for this many rows and columns."""
        return self.rows >= rows and self.columns >= columns

    def fill(
        self, slots: Tensor, prefilled: PrefilledPrompts, chosen: Tensor, draws: Tensor | None
    ) -> None:
        """Start N responses.

        Args:
            slots: Slot of each response, (N,).
            prefilled: The prefilled prompts.
            chosen: Prompt of each response, (N,).
            draws: Uniform random numbers, (N, steps); None for greedy decoding.
        """
        self.cache.fill(slots, prefilled, chosen)
        self.padding[slots] = prefilled.padding[chosen]
        self.first_position[slots] = prefilled.next_position[chosen]
        self.start_column[slots] = prefilled.columns
        self.step[slots] = 0
        self.draws[slots, : self.steps] = GREEDY_DRAW if draws is None else draws

    def write_next_tokens(self, log_probs: Tensor, slots: Tensor, *, greedy: bool | None) -> None:
        """Choose and store the next token of N sequences.

        Args:
            log_probs: Log-probabilities, (N, vocabulary).
            slots: Slot of each sequence, (N,).
            greedy: Whether all sequences are decoded greedily; None if some are.
        """
        step = self.step[slots]
        if greedy is not False:
            token = likeliest = log_probs.argmax(-1)
        if not greedy:
            draw = self.draws[slots, step]
            token = sample_tokens(log_probs, draw)
        if greedy is None:
            token = torch.where(draw == GREEDY_DRAW, likeliest, token)
        self.token[slots] = self.tokens[slots, step] = token
        self.log_probs[slots, step] = log_probs.gather(-1, token[:, None])[:, 0]

    def finished_lengths(self, slots: Tensor, stop: Tensor) -> Tensor:
        """Return each response's length up to its first stop token, (N,); 0 if it has none yet."""
        written = torch.arange(self.steps, device=slots.device) <= self.step[slots, None]
        ends = torch.isin(self.tokens[slots, : self.steps], stop) & written
        return torch.where(ends.any(1), ends.int().argmax(1) + 1, 0)

    def compact(self, index: Tensor, columns: int) -> None:
        """Move the slots `index`, which use up to `columns` columns, to the front."""
        self.cache.compact(index, columns)
        numbers = (self.token, self.step, self.padding, self.start_column, self.first_position)
        for tensor in (*numbers, self.draws, self.tokens, self.log_probs):
            tensor[: len(index)] = tensor[index]

    @contextmanager
    def restore_after(self) -> Iterator[None]:
        """Context manager that undoes the decoding steps in it, such as those of a warm-up."""
        states = (state for pair in self.cache.states.values() for state in pair)
        tensors = (self.token, self.step, *states)
        before = [tensor.clone() for tensor in tensors]
        yield
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


class DecodingStep(nn.Module):
    """One decoding step of all slots, with the weights as of construction."""

    def __init__(self, network: PolicyModel) -> None:
        super().__init__()
        self.network = network
        self.lora, self.weights, self.fused_projections = [], {}, []
        self.fused_decoder: FusedDecoder | None = None
        decoder = network.model.get_decoder()
        half = network.compute_dtype is not None
        if half:
            self.fused_decoder = FusedDecoder(decoder, network.compute_dtype)
            fused = {m for layer in self.fused_decoder.layers for m in layer.modules()}
            critic = set() if network.value is None else set(network.value.modules())
            self.lora = [x for x in lora_layers(network) if is_mergeable(x) and x not in fused]
            self.weights = dict(_inference_weights(self, network.compute_dtype, fused | critic))
            decoding = set(decoder.modules()) - fused
            parents = [(name, m) for name, m in self.named_modules() if m in decoding]
            self.fused_projections = list(_fuse_projections(parents, self.lora, self.weights))
        fuse = half and next(network.parameters()).is_cuda
        self.rotary = rotary_modules(decoder) if fuse else {}

    def run(self, slots: DecodingSlots, rows: int, columns: int, *, greedy: bool | None) -> None:
        """Run `forward` with the inference weights: LoRA merged, projections fused."""
        with (
            disable_lora(self.lora),
            _apply_fused_projections(self.fused_projections),
            self.fused_decoder.applied() if self.fused_decoder else nullcontext(),
        ):
            inputs = (slots, rows, columns, greedy)
            functional_call(self, self.weights, inputs, tie_weights=False)

    def forward(self, slots: DecodingSlots, rows: int, columns: int, greedy: bool | None) -> None:
        """Decode one token in each of the first `rows` slots and write it into `slots`.

        Attention covers the first `columns` columns of the cache.
        """
        cache, step = slots.cache, slots.step[:rows]
        cache.set_view(rows, columns)
        # a finished response that still occupies a slot may be past the columns in view
        cache.write_column = (slots.start_column[:rows] + step).clamp(max=columns - 1)
        column = torch.arange(columns, device=step.device)
        # a token attends at least to itself: a row without visible columns has no softmax
        padding = torch.minimum(slots.padding[:rows], cache.write_column)
        hidden_columns = (column > cache.write_column[:, None]) | (column < padding[:, None])
        # additive mask, (rows, columns): every layer would convert a boolean one to this
        mask = torch.zeros_like(hidden_columns, dtype=cache.dtype)
        mask.masked_fill_(hidden_columns, -torch.inf)
        with single_query_attention(self.network.model.get_decoder(), self.rotary):
            positions = (slots.first_position[:rows] + step).expand(self.network.family.axes, -1)
            hidden = self.network.forward_model(
                positions[..., None],
                input_ids=slots.token[:rows, None],
                attention_mask=self.network.family.decoding_mask(
                    mask[:, None, None], cache.write_column
                ),
                past_key_values=cache,
                use_cache=True,
            )
        step.add_(1).clamp_(max=slots.steps)
        slots.write_next_tokens(
            self.network.log_probs(hidden[:, 0]), cache.row_index[:rows], greedy=greedy
        )


@torch.no_grad()
def _inference_weights(
    step: DecodingStep, dtype: torch.dtype, skipped: set[nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights in `dtype`, with LoRA merged, that autocast would otherwise cast every step."""
    merged = {layer.base_layer.weight for layer in step.lora}
    for name, module in step.named_modules():
        if module in skipped:
            continue
        if module in step.lora:
            weight = merged_weight(module, module.base_layer.weight)
            yield f"{name}.base_layer.weight", cast_stochastic(weight, dtype)
        elif type(module) is nn.Linear and ".lora_" not in name:
            for part, weight in module.named_parameters(recurse=False):
                if weight.dtype != dtype and weight not in merged:
                    yield f"{name}.{part}", weight.to(dtype)


@dataclass(frozen=True)
class FusedProjection:
    """Linear layers with the same input, computed as one matrix product."""

    siblings: SharedProjection
    weight: Tensor
    bias: Tensor | None
    sizes: list[int]

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each layer, (..., size), for their common input, (..., width)."""
        return functional.linear(x, self.weight, self.bias).split(self.sizes, -1)


@torch.no_grad()
def _fuse_projections(
    parents: Iterable[tuple[str, nn.Module]],
    merged: list[nn.Module],
    weights: dict[str, Tensor],
) -> Iterator[FusedProjection]:
    """Concatenate the copied weights of sibling projections.

    Args:
        parents: Modules that may contain the siblings, with their names.
        merged: LoRA layers that are merged into `weights`; siblings with other LoRA are skipped.
        weights: Copied weights by name; those of siblings become views of one tensor.
    """
    for name, parent in parents:
        for names in FUSABLE_PROJECTIONS:
            layers = [getattr(parent, child, None) for child in names]
            plain = [getattr(layer, "base_layer", layer) for layer in layers]
            paths = [
                f"{name}.{child}" + ("" if layer is base else ".base_layer")
                for child, layer, base in zip(names, layers, plain, strict=True)
            ]
            if any(f"{path}.weight" not in weights for path in paths):
                continue
            pairs = zip(layers, plain, strict=True)
            if any(layer is not base and layer not in merged for layer, base in pairs):
                continue
            biases = [weights.get(f"{p}.bias", x.bias) for p, x in zip(paths, plain, strict=True)]
            if len({bias is None for bias in biases}) > 1:
                continue
            bias = None if biases[0] is None else torch.cat(biases)
            weight = torch.cat([weights[f"{path}.weight"] for path in paths])
            sizes = [layer.out_features for layer in plain]
            for path, part in zip(paths, weight.split(sizes), strict=True):
                weights[f"{path}.weight"] = part
            yield FusedProjection(SharedProjection(layers), weight, bias, sizes)


@contextmanager
def _apply_fused_projections(fused: list[FusedProjection]) -> Iterator[None]:
    """Replace the forward of sibling layers by their fused product in this context."""
    pairs = [(each, layer) for each in fused for layer in each.siblings.layers]
    originals = [vars(layer).pop("forward", None) for _, layer in pairs]
    for each, layer in pairs:
        layer.forward = partial(each.siblings.take, layer, product=each.product)
    try:
        yield
    finally:
        for (_, layer), original in zip(pairs, originals, strict=True):
            del layer.forward
            if original is not None:  # instance attribute set by a library hook
                layer.forward = original


def can_capture_graphs(network: nn.Module) -> bool:
    """Return whether a decoding step can be captured as a CUDA graph.

    Experts in another dtype than bfloat16 are multiplied one by one, with sizes that are copied to
    the CPU, and a graph cannot contain that synchronization.
    """
    experts = [
        weight
        for name, weight in network.named_parameters()
        if weight.dim() == 3 and name.endswith(("gate_up_proj", "down_proj"))
    ]
    return all(weight.dtype == torch.bfloat16 for weight in experts)


class DecodingGraphs:
    """Decoding steps as CUDA graphs, captured once per (rows, columns, greedy)."""

    def __init__(self, step: DecodingStep) -> None:
        self.step = step
        self.memory = CudaGraphPool()
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}

    def run(self, slots: DecodingSlots, rows: int, columns: int, *, greedy: bool | None) -> None:
        """Replay the graph of this shape, which is captured on first use.

        Arguments as in `DecodingStep.run`.
        """
        key = (rows, columns, greedy)
        if key not in self.graphs:
            self.graphs[key] = self._capture_graph(slots, *key)
        self.memory.replay(self.graphs[key])

    def _capture_graph(
        self, slots: DecodingSlots, rows: int, columns: int, greedy: bool | None
    ) -> torch.cuda.CUDAGraph:
        """Warm up and capture a decoding step of this shape; the slots do not change."""
        with self.memory.warmup_stream():
            for _ in range(WARMUP_RUNS):
                with slots.restore_after():
                    self.step.run(slots, rows, columns, greedy=greedy)
        graph = torch.cuda.CUDAGraph()
        with self.memory.capture(graph):
            self.step.run(slots, rows, columns, greedy=greedy)
        return graph


def sample_tokens(log_probs: Tensor, draw: Tensor) -> Tensor:
    """Sample one token per row by inverting the cumulative distribution.

    Sums are in float64, so that rounding hardly ever changes the token. A token with probability 0
    is never chosen.

    Args:
        log_probs: Log-probabilities, (B, vocabulary).
        draw: Uniform random numbers in [0, 1), (B,).

    Returns:
        Token ids, (B,).
    """
    p = log_probs.exp()
    if missing := -p.shape[1] % CUMSUM_CHUNK:
        p = functional.pad(p, (0, missing))
    chunks = p.unflatten(1, (-1, CUMSUM_CHUNK))
    sums = chunks.sum(-1, dtype=torch.float64)
    chunk, left = _find_cdf_crossing(sums, draw * sums.sum(-1))
    within = chunks.gather(1, chunk[:, None, None].expand(-1, 1, CUMSUM_CHUNK))[:, 0]
    token, _ = _find_cdf_crossing(within.double(), left)
    return (chunk * CUMSUM_CHUNK + token).clamp(max=log_probs.shape[1] - 1)


def _find_cdf_crossing(masses: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the cumulative sum of masses exceeds a target.

    Args:
        masses: (B, N).
        target: (B,).

    Returns:
        The index of the crossing in each row, (B,), and the target minus the sum before it, (B,).
    """
    reached = masses.cumsum(-1)
    passed = torch.searchsorted(reached, target[:, None], right=True)
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())  # if target rounds to the sum
    index = torch.minimum(passed, last).clamp(max=masses.shape[1] - 1)  # masses may be NaN
    before = reached.gather(1, index) - masses.gather(1, index)
    return index[:, 0], (target - before[:, 0]).clamp(min=0)


def draw_uniform(generators: Sequence[torch.Generator], count: int) -> Tensor:
    """Return uniform random numbers in [0, 1), (B, count) float64, one row per generator."""
    drawn = [torch.rand(count, generator=g, dtype=torch.float64) for g in generators]
    return torch.stack(drawn)
