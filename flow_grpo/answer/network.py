"""The model being trained, and the log-probabilities of its tokens: one function for the policy
that sampled, the one that is trained and the reference."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from flow_grpo.answer.attention import PACKED, block_mask, dense_mask
from flow_grpo.answer.batches import PADDING, Inputs, PackedBatch
from flow_grpo.answer.models import family_of

LOGITS = 2**26  # of one chunk, in float32: 256 MiB
SMALL_HEAD = 2**20  # weights, for which float64 costs next to nothing


class AnswerModel(nn.Module):
    """A model of transformers, with a value head where one is asked for."""

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        with_value: bool = False,
        compute_dtype: torch.dtype | None = None,
        flex_attention: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        width = model.config.get_text_config().hidden_size
        precise = torch.promote_types(model.dtype, torch.float32)
        self.value = nn.Linear(width, 1, dtype=precise) if with_value else None
        if self.value is not None:
            nn.init.zeros_(self.value.weight)
            nn.init.zeros_(self.value.bias)
        if compute_dtype is not None:
            fuse_norms(model)
        self.family = family_of(model)
        self.banned = self.family.banned
        self.flex_attention = flex_attention
        if flex_attention:
            model.get_decoder().config._attn_implementation = PACKED
        self.in_step = False  # whether other processes wait for every layer of a forward

    def forward(self, batch: PackedBatch, *, critic_only: bool = False) -> dict[str, Tensor]:
        """`log_probs` (R, T), 0 where there is no token, and `values` (R, T) with a value head.
        With `critic_only`, gradients of the values stop at the head."""
        hidden = self.hidden(batch.inputs)
        chosen = hidden[batch.row[:, None], batch.column][batch.mask]  # (tokens, width)
        log_probs = self.token_log_probs(chosen, batch.tokens[batch.mask])
        out = {"log_probs": _spread(log_probs, batch.mask)}
        if self.value is not None:
            seen = chosen.detach() if critic_only else chosen
            values = self.value(seen.to(self.value.weight.dtype))[:, 0]
            out["values"] = _spread(values, batch.mask)
        return out

    def hidden(self, inputs: Inputs, cache: Cache | None = None) -> Tensor:
        """Last hidden states (B, S, width); keys and values go to the `cache`."""
        length, awaited = inputs.input_ids.shape[1], self._tower_is_awaited(inputs)
        if awaited:
            inputs = self._with_blank(inputs)
        make_mask = block_mask if self.flex_attention and cache is None else dense_mask
        with self.family.looking(inputs.pictures, inputs.shown) as pictures:
            hidden = self.forward_model(
                inputs.position_ids,
                input_ids=inputs.input_ids,
                attention_mask=self.family.mask(
                    make_mask(inputs.segments), inputs.segments != PADDING
                ),
                past_key_values=cache,
                use_cache=cache is not None,
                **pictures,
            )
        return hidden[:, :length] if awaited else hidden

    def forward_model(self, positions: Tensor, **arguments: Any) -> Tensor:
        """Last hidden states by what transformers takes; positions are (axes, B, S)."""
        positions = positions if self.family.axes > 1 else positions[0]
        with self.cast(positions.device):
            return self.model.model(position_ids=positions, **arguments).last_hidden_state

    def token_log_probs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(N,) of `tokens` after the hidden states (N, width), in chunks that fit in memory."""

        def chunk(hidden: Tensor, tokens: Tensor) -> Tensor:
            return self.log_probs(hidden).gather(-1, tokens[:, None])[:, 0]

        size = max(1, LOGITS // self.model.config.get_text_config().vocab_size)
        if len(hidden) <= size:
            return chunk(hidden, tokens)
        pairs = zip(hidden.split(size), tokens.split(size), strict=True)
        return torch.cat([checkpoint(chunk, *pair, use_reentrant=False) for pair in pairs])

    def log_probs(self, hidden: Tensor) -> Tensor:
        """(N, vocabulary), in float32 or better: of every token that may be sampled."""
        logits = self._logits(hidden) / self.temperature
        logits.index_fill_(-1, _indices(tuple(self.banned), logits.device), -torch.inf)
        return logits.log_softmax(-1).to(torch.promote_types(hidden.dtype, torch.float32))

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.model.lm_head
        if self.compute_dtype is None and head.weight.numel() <= SMALL_HEAD:
            # most of what is between decoding and training is the rounding of this product
            return nn.functional.linear(hidden.double(), head.weight.double())
        # not by a call of the layer: processes may have different numbers of chunks
        if self.compute_dtype is None:
            return nn.functional.linear(hidden, head.weight)
        return WideProduct.apply(hidden.to(self.compute_dtype), head.weight.to(self.compute_dtype))

    def cast(self, device: torch.device) -> AbstractContextManager:
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, self.compute_dtype)

    def _tower_is_awaited(self, inputs: Inputs) -> bool:
        """Whether the vision tower has to run though it has nothing to see: where it is trained,
        DDP waits for the gradient of every weight; where weights are sharded, processes that do
        have pictures wait for this one's part of the tower."""
        tower = self.family.tower
        if tower is None or inputs.shown is not None or not torch.is_grad_enabled():
            return False
        return self.in_step or any(p.requires_grad for p in tower.parameters())

    def _with_blank(self, inputs: Inputs) -> Inputs:
        """The same, and a blank picture in last columns that nothing else sees."""
        picture, device = self.family.blank(), inputs.input_ids.device
        count = self.family.tokens_of(picture)
        ids = inputs.input_ids.new_zeros(len(inputs.input_ids), count)
        ids[0] = self.family.image_token
        return Inputs(
            input_ids=torch.cat([inputs.input_ids, ids], 1),
            segments=torch.cat([inputs.segments, torch.full_like(ids, PADDING)], 1),
            position_ids=nn.functional.pad(inputs.position_ids, (0, count)),
            pictures={name: own.to(device) for name, own in picture.items()},
            shown=ids.new_zeros(1),
        )


class WideProduct(torch.autograd.Function):
    """x (N, width) times a weight (vocabulary, width), both in half precision, in float32: logits
    that are rounded to half precision move log-probabilities by several hundredths."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cuda":
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return x.float() @ weight.float().T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_x, gradient.T @ x if ctx.needs_input_grad[1] else None


@cache
def _indices(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, as a step that is recorded as a CUDA graph can send nothing to the GPU."""
    return torch.tensor(values, dtype=torch.long, device=device)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def fuse_norms(model: nn.Module) -> None:
    """Each RMSNorm as one kernel instead of eight, but for those with a gate."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and len(signature(module.forward).parameters) == 1:
            module.forward = partial(_rms_norm, module, module.forward)


def _rms_norm(module: nn.Module, usual: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    weight = module.weight
    if hidden.dtype != weight.dtype:
        return usual(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # which would cast to float32 and back
        return nn.functional.rms_norm(hidden, weight.shape, weight, module.variance_epsilon)
