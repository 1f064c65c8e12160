"""Sequence parallelism: the processes of a group jointly train on each micro-batch (Ulysses).

The activations of a response of 32,000 tokens may not fit on one GPU. Each of N processes therefore
computes the decoder layers for 1/N of the columns of every row. Attention needs all columns: an
all-to-all exchange turns (H heads, S/N columns) into (H/N heads, S columns), and another one
reverses it (Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509).

    embeddings, vision tower      all columns, on every process
    decoder layers                S/N columns; attention: S columns of H/N heads
    last hidden states            gathered
    log-probabilities and values  T/N of the T response tokens, then gathered

Groups and the convention for gradients are those of context parallelism for diffusion: the loss is
the same on all processes of a group, each computes the gradient of its own computation, and the
gradient of a weight is the SUM over the group (see `flow_grpo.training.finite.backward`).
The adjoint of gathering hidden states therefore sums the gradients of all processes. The adjoint of
gathering log-probabilities, from which all processes compute the same loss, keeps the own part.

Groups exist only in training. Samples are generated on each process and then exchanged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers import PretrainedConfig

from flow_grpo.errors import UserError
from flow_grpo.training.distributed import Ranks
from flow_grpo.vlm.packing import PADDING_SEGMENT, ModelInputs

FIELD = "train.sequence_parallel"
SHARDS = "sequence_shards"  # argument of the decoder, which passes it on to attention
COLUMN_DIMENSIONS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}  # arguments to split


@dataclass(frozen=True)
class SequenceShards:
    """The part of each row that belongs to this process, and the exchanges with its group."""

    ranks: Ranks

    def __deepcopy__(self, memo: dict) -> "SequenceShards":
        """Return itself: copies of a network communicate in the same group."""
        return self

    @property
    def size(self) -> int:
        """Number of processes of the group."""
        return self.ranks.context_size

    def pad(self, inputs: ModelInputs) -> ModelInputs:
        """Append padding columns until their number is divisible by the number of processes."""
        missing = -inputs.input_ids.shape[1] % self.size
        return replace(
            inputs,
            input_ids=functional.pad(inputs.input_ids, (0, missing)),
            segments=functional.pad(inputs.segments, (0, missing), value=PADDING_SEGMENT),
            position_ids=functional.pad(inputs.position_ids, (0, missing)),
        )

    def columns(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this process's part of a tensor that has all columns in dimension `dim`."""
        return tensor.chunk(self.size, dim)[self.ranks.context_rank]

    def gather_columns(self, hidden: Tensor) -> Tensor:
        """Return all columns (B, S, width), given those of this process."""
        return _GatherColumns.apply(hidden, self)

    def own_tokens(self, count: int, device: torch.device) -> Tensor:
        """Return the indices of the tokens that this process scores, equally many on each process.

        If `count` is not divisible by the number of processes, the last token is repeated.
        """
        share = math.ceil(count / self.size)
        first = self.ranks.context_rank * share
        return torch.arange(first, first + share, device=device).clamp(max=count - 1)

    def gather_tokens(self, own: Tensor, count: int) -> Tensor:
        """Return one number for each of `count` tokens, given those of `own_tokens`."""
        if own.is_floating_point():
            return _GatherTokens.apply(own, self)[:count]
        return _all_gather(own.byte(), self).flatten()[:count].to(own.dtype)

    def attend(
        self, attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Return attention over all columns for those of this process, (B, S/N, heads, head_dim).

        Args:
            attention: Function that computes it for tensors (B, own heads, S, head_dim).
            query: Queries of the own columns, (B, heads, S/N, head_dim).
            key: Keys of the own columns, with fewer heads in grouped-query attention. If there are
                fewer than processes, several processes get the same one.
            value: Values, shaped like the keys.
        """
        copies = max(1, self.size // key.shape[1])
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        out = attention(*(self._to_heads(x) for x in (query, key, value)))
        return self._to_columns(out).transpose(1, 2)

    def _to_heads(self, x: Tensor) -> Tensor:
        """Return all columns of the own heads, given the own columns of all heads, by exchange."""
        parts = _Exchange.apply(x.unflatten(1, (self.size, -1)).movedim(1, 0), self.ranks)
        return parts.movedim(0, 2).flatten(2, 3)

    def _to_columns(self, x: Tensor) -> Tensor:
        """Return the own columns of all heads, given all columns of the own heads, by exchange."""
        parts = _Exchange.apply(x.unflatten(2, (self.size, -1)).movedim(2, 0), self.ranks)
        return parts.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """All-to-all that sends part i of the first dimension to process i; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        """Return the parts that the processes sent, in their order."""
        ctx.ranks, x = ranks, x.contiguous()
        out = torch.empty_like(x)
        distributed.all_to_all_single(out, x, group=ranks.group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Send each part of the gradient to the process that its input came from."""
        return _Exchange.apply(gradient, ctx.ranks), None


class _GatherColumns(torch.autograd.Function):
    """Gather columns; the gradient of a column is the sum of those of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: SequenceShards) -> Tensor:
        """Return the columns (B, S, width) of all processes."""
        ctx.shards = shards
        return _all_gather(x, shards).movedim(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the summed gradient of the own columns."""
        size, ranks = ctx.shards.size, ctx.shards.ranks
        parts = _Exchange.apply(gradient.unflatten(1, (size, -1)).movedim(1, 0), ranks)
        return parts.sum(0), None


class _GatherTokens(torch.autograd.Function):
    """Gather scores of tokens, from which all processes compute the same loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: SequenceShards) -> Tensor:
        """Return the scores of all processes, (N x tokens,)."""
        ctx.shards = shards
        return _all_gather(x, shards).flatten()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the own scores."""
        return ctx.shards.columns(gradient, 0), None


def _all_gather(x: Tensor, shards: SequenceShards) -> Tensor:
    """Return the tensors of all processes of the group, (N, ...)."""
    out = x.new_empty(shards.size * len(x), *x.shape[1:])
    distributed.all_gather_into_tensor(out, x.contiguous(), group=shards.ranks.group)
    return out.unflatten(0, (shards.size, -1))


def split_decoder_columns(decoder: nn.Module) -> None:
    """Make a decoder compute its layers for a part of the columns.

    Calls without the argument `sequence_shards` are unchanged. Its output has all columns.
    """
    decoder.register_forward_pre_hook(_split_arguments, with_kwargs=True)
    decoder.register_forward_hook(_gather_output, with_kwargs=True)


def _split_arguments(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Hook before the forward pass of a decoder: keep the own columns of its arguments."""
    shards: SequenceShards | None = kwargs.get(SHARDS)
    if shards is None:
        return None
    kwargs = dict(kwargs)
    for name, dim in COLUMN_DIMENSIONS.items():
        if kwargs.get(name) is not None:
            kwargs[name] = shards.columns(kwargs[name], dim)
    if (is_image := kwargs.get("visual_pos_masks")) is not None:  # Qwen3-VL
        own = torch.zeros_like(is_image)
        shards.columns(own, 1).fill_(True)
        chosen = own[is_image]  # which image tokens are in the own columns
        kwargs["visual_pos_masks"] = shards.columns(is_image, 1)
        layers = kwargs["deepstack_visual_embeds"]
        kwargs["deepstack_visual_embeds"] = [features[chosen] for features in layers]
    return args, kwargs


def _gather_output(decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook after the forward pass of a decoder: gather the columns of its output."""
    if (shards := kwargs.get(SHARDS)) is not None:
        output.last_hidden_state = shards.gather_columns(output.last_hidden_state)
    return output


def check_heads(size: int, config: PretrainedConfig) -> None:
    """Reject a group size that is incompatible with the attention heads in a model's config."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    if heads % size:
        raise UserError(
            f"must divide the {heads} attention heads of the model", field=FIELD, value=size
        )
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if key_heads % size and size % key_heads:
        raise UserError(
            f"must divide the {key_heads} key and value heads of the model, or be a multiple",
            field=FIELD,
            value=size,
        )
