"""The policy network, which computes the log-probabilities of tokens.

Behaviour policy, current policy and reference policy share one implementation, so that their
probability ratios are 1 as long as their weights are equal.
"""

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

from flow_grpo.perf.compile_utils import compile_or_eager
from flow_grpo.perf.inductor import allow_recompilations, apply_hook
from flow_grpo.vlm.attention import PACKED_ATTENTION, build_block_mask, build_dense_mask
from flow_grpo.vlm.models import get_family
from flow_grpo.vlm.packing import PADDING_SEGMENT, ModelInputs, PackedBatch, scatter_to_mask
from flow_grpo.vlm.sequence_parallel import SHARDS, SequenceShards, split_decoder_columns

MAX_CHUNK_LOGITS = 2**26  # logits per chunk: 256 MiB in float32
MAX_FLOAT64_HEAD_SIZE = 2**20  # heads up to this size are multiplied in float64 at negligible cost


class PolicyModel(nn.Module):
    """A transformers model with an optional value head.

    Args:
        model: The transformers model, from `load_model`.
        temperature: Divides the logits, in sampling and in training.
        with_value: Whether to add a value head.
        compute_dtype: Autocast dtype; None computes in the dtype of the weights.
        flex_attention: Whether to train with flex attention.
        compiled: Whether to compile the decoder layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        with_value: bool = False,
        compute_dtype: torch.dtype | None = None,
        flex_attention: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        width = model.config.get_text_config().hidden_size
        precise = torch.promote_types(model.dtype, torch.float32)
        # a linear layer on the hidden states, or a module that computes values from the batch
        self.value: nn.Module | None = build_value_head(width, precise) if with_value else None
        if compute_dtype is not None:
            fuse_rms_norms(model)
        self.family = get_family(model)
        self.banned_token_ids = self.family.banned_token_ids
        self.flex_attention = flex_attention
        if flex_attention:
            model.get_decoder().config._attn_implementation = PACKED_ATTENTION
        self.compiled = compiled
        if compiled:
            compile_decoder_layers(model.get_decoder())
        self.runs_in_lockstep = False  # True if weights are sharded: ranks wait for every layer
        self.shards: SequenceShards | None = None  # set by `split_columns`

    def split_columns(self, shards: SequenceShards) -> None:
        """Compute training passes, but not decoding, in a group of processes."""
        decoder = self.model.get_decoder()
        decoder.config._attn_implementation = PACKED_ATTENTION
        split_decoder_columns(decoder)
        self.shards = shards

    @property
    def packs_one_row(self) -> bool:
        """Whether the prompts of a micro-batch share a row without padding."""
        return self.flex_attention and self.family.shares_prompt

    def forward(
        self,
        batch: PackedBatch,
        *,
        critic_only: bool = False,
        given: bool = False,
        with_values: bool = True,
    ) -> dict[str, Tensor]:
        """Compute the log-probabilities and values of R packed responses.

        Args:
            batch: The packed responses.
            critic_only: Whether the gradient of the values stops at the value head.
            given: Whether the responses are not samples of the policy, which cannot sample banned
                tokens. Then these have a probability too, as in other trainers.
            with_values: Whether to compute values if there is a critic.

        Returns:
            `log_probs` (R, T), with `given` `is_top1` (R, T): whether each token is the most likely
            one, and, with a value head, `values` (R, T); 0 for padding.
        """
        hidden = self.hidden_states(batch.inputs)
        chosen = hidden[batch.row[:, None], batch.column][batch.mask]  # (tokens, width)
        tokens, count = batch.tokens[batch.mask], len(chosen)
        if self.shards is not None:
            own = self.shards.own_tokens(count, tokens.device)
            chosen, tokens = chosen[own], tokens[own]
        scores = self.token_scores(chosen, tokens, given=given)
        if self.value is not None and with_values:
            if isinstance(self.value, nn.Linear):
                features = chosen.detach() if critic_only else chosen
                scores["values"] = self.value(features.to(self.value.weight.dtype))[:, 0]
            else:
                scores["values"] = self.value(batch)
        if self.shards is not None:
            scores = {name: self.shards.gather_tokens(x, count) for name, x in scores.items()}
        return {name: scatter_to_mask(own, batch.mask) for name, own in scores.items()}

    def hidden_states(self, inputs: ModelInputs, cache: Cache | None = None) -> Tensor:
        """Return the last hidden states (B, S, width); keys and values are added to `cache`."""
        length, with_blank = inputs.input_ids.shape[1], self._must_run_vision_tower(inputs)
        if with_blank:
            inputs = self._append_blank_image(inputs)
        shards = {}
        if self.shards is not None and cache is None:
            inputs, shards = self.shards.pad(inputs), {SHARDS: self.shards}
        make_mask = build_block_mask if self.flex_attention and cache is None else build_dense_mask
        with self.family.vision_arguments(inputs.images, inputs.image_indices) as images:
            hidden = self.forward_model(
                inputs.position_ids,
                input_ids=inputs.input_ids,
                attention_mask=self.family.attention_mask(make_mask(inputs.segments), inputs),
                past_key_values=cache,
                use_cache=cache is not None,
                **images,
                **shards,
            )
        return hidden[:, :length] if with_blank or shards else hidden

    def forward_model(self, positions: Tensor, **arguments: Any) -> Tensor:
        """Call the transformers model with position ids (axes, B, S); return hidden states."""
        positions = positions if self.family.axes > 1 else positions[0]
        with_gradient = torch.is_grad_enabled()
        # compiled code without gradients rounds differently: ratios would not be exactly 1
        same_code = self.compiled and arguments["past_key_values"] is None
        with self.autocast(positions.device), torch.set_grad_enabled(with_gradient or same_code):
            hidden = self.model.model(position_ids=positions, **arguments).last_hidden_state
        return hidden if with_gradient else hidden.detach()

    def token_scores(
        self, hidden: Tensor, tokens: Tensor, *, given: bool = False
    ) -> dict[str, Tensor]:
        """Return `log_probs` of tokens (N,) given hidden states (N, width); see `forward`.

        Large inputs are processed in chunks, so that not all logits exist at once. If the head is
        trained, the backward pass computes them again.
        """
        size = max(1, MAX_CHUNK_LOGITS // self.model.config.get_text_config().vocab_size)
        if torch.is_grad_enabled() and not self.model.lm_head.weight.requires_grad:
            columns = FrozenHeadScores.apply(hidden, tokens, self, size, given)
            return dict(zip(("log_probs", "is_top1"), columns, strict=False))

        def chunk(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            log_probs = self.log_probs(hidden, with_banned=given)
            chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
            return (chosen, log_probs.argmax(-1) == tokens) if given else (chosen,)

        pairs = list(zip(hidden.split(size), tokens.split(size), strict=True))
        parts = (
            [chunk(*pairs[0])]
            if len(pairs) == 1
            else [checkpoint(chunk, *pair, use_reentrant=False) for pair in pairs]
        )
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        return dict(zip(("log_probs", "is_top1"), columns, strict=False))

    def log_probs(self, hidden: Tensor, *, with_banned: bool = False) -> Tensor:
        """Return log-probabilities (N, vocabulary), at least float32.

        Banned tokens have -inf, unless `with_banned`.
        """
        logits = self._logits(hidden) / self.temperature
        if not with_banned:
            banned = _cached_indices(tuple(self.banned_token_ids), logits.device)
            logits.index_fill_(-1, banned, -torch.inf)
        return logits.log_softmax(-1).to(torch.promote_types(hidden.dtype, torch.float32))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits (N, vocabulary) of hidden states (N, width) in at least float32."""
        head = self.model.lm_head
        if self.compute_dtype is None and head.weight.numel() <= MAX_FLOAT64_HEAD_SIZE:
            # rounding in this product causes most of the difference between decoding and training
            return nn.functional.linear(hidden.double(), head.weight.double())
        # not a call of the layer: its hooks are collective, and ranks may differ in chunks
        if self.compute_dtype is None:
            return nn.functional.linear(hidden, head.weight)
        return Float32OutputMatmul.apply(
            hidden.to(self.compute_dtype), head.weight.to(self.compute_dtype)
        )

    def log_prob_gradients(
        self, log_probs: Tensor, tokens: Tensor, *, with_banned: bool = False
    ) -> Tensor:
        """Return the gradients of the tokens' log-probabilities by the hidden states, (N, width).

        Args:
            log_probs: Result of `log_probs`, (N, vocabulary); overwritten.
            tokens: Tokens, (N,).
            with_banned: As in `log_probs`.
        """
        gradient = log_probs.exp_().neg_()  # onehot - p, by the logits / temperature
        gradient.scatter_add_(-1, tokens[:, None], torch.ones_like(gradient[:, :1]))
        if not with_banned:
            banned = _cached_indices(tuple(self.banned_token_ids), gradient.device)
            gradient.index_fill_(-1, banned, 0.0)
        gradient /= self.temperature
        weight = self.model.lm_head.weight
        if self.compute_dtype is not None:
            weight = weight.to(self.compute_dtype)
        elif weight.numel() <= MAX_FLOAT64_HEAD_SIZE:
            weight = weight.double()
        return gradient.to(weight.dtype) @ weight

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """Return an autocast context in `compute_dtype`; a null context in float32."""
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, self.compute_dtype)

    def _must_run_vision_tower(self, inputs: ModelInputs) -> bool:
        """Return whether the vision tower has to run although the batch has no images.

        If the tower is trained, DDP waits for the gradient of all its weights. If weights are
        sharded, ranks that do have images wait for this rank's shard of the tower.
        """
        tower = self.family.tower
        if tower is None or inputs.image_indices is not None or not torch.is_grad_enabled():
            return False
        return self.runs_in_lockstep or any(p.requires_grad for p in tower.parameters())

    def _append_blank_image(self, inputs: ModelInputs) -> ModelInputs:
        """Append a blank image in columns that no other token attends to."""
        image, device = self.family.blank_image(), inputs.input_ids.device
        count = self.family.num_image_tokens(image)
        ids = inputs.input_ids.new_zeros(len(inputs.input_ids), count)
        ids[0] = self.family.image_token
        return ModelInputs(
            input_ids=torch.cat([inputs.input_ids, ids], 1),
            segments=torch.cat([inputs.segments, torch.full_like(ids, PADDING_SEGMENT)], 1),
            position_ids=nn.functional.pad(inputs.position_ids, (0, count)),
            images={name: tensor.to(device) for name, tensor in image.items()},
            image_indices=ids.new_zeros(1),
        )


def build_value_head(width: int, dtype: torch.dtype) -> nn.Linear:
    """Return a linear layer, initialized to zero, from hidden states to one value."""
    head = nn.Linear(width, 1, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class FrozenHeadScores(torch.autograd.Function):
    """Log-probabilities of N tokens, differentiated by the hidden states only.

    A log-probability is one number per token, so its gradient is one vector per token,

        d log p(token) / d hidden = (onehot(token) - p) W / temperature,

    which is computed while the logits exist, before the loss is known. The backward pass scales it
    by the gradient of the loss. The head's product then runs twice, instead of three times with
    recomputed logits. The gradient of a trained head sums over tokens, so it needs the loss first.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, tokens: Tensor, network: PolicyModel, size: int, given: bool
    ) -> tuple[Tensor, ...]:
        """Return log-probabilities (N,) and, with `given`, whether each token is the likeliest.

        Args:
            ctx: Context of the backward pass.
            hidden: Hidden states, (N, width).
            tokens: Tokens, (N,).
            network: The policy.
            size: Tokens per chunk.
            given: See `PolicyModel.forward`.
        """
        gradients, parts = torch.empty_like(hidden), []
        chunks = (hidden.split(size), tokens.split(size), gradients.split(size))
        for states, own, gradient in zip(*chunks, strict=True):
            log_probs = network.log_probs(states, with_banned=given)
            chosen = log_probs.gather(-1, own[:, None])[:, 0]
            parts.append((chosen, log_probs.argmax(-1) == own) if given else (chosen,))
            if ctx.needs_input_grad[0]:
                gradient.copy_(network.log_prob_gradients(log_probs, own, with_banned=given))
        ctx.save_for_backward(gradients)
        columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*columns[1:])
        return columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradient of the hidden states."""
        (gradients,) = ctx.saved_tensors
        return (scale[:, None] * gradients).to(gradients.dtype), None, None, None, None


class Float32OutputMatmul(torch.autograd.Function):
    """Multiply half-precision x (N, width) and weight (vocabulary, width) with a float32 result.

    Rounding logits to half precision would change log-probabilities by several hundredths.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return x @ weight.T, (N, vocabulary), in float32."""
        ctx.save_for_backward(x, weight)
        if x.device.type == "cuda":
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return x.float() @ weight.float().T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `x` and `weight`, computed in their dtype."""
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        grad_x = gradient @ weight if ctx.needs_input_grad[0] else None
        grad_weight = gradient.T @ x if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def compile_decoder_layers(decoder: nn.Module) -> None:
    """Compile the layers of a decoder for training; they share their code.

    With a key-value cache, that is in prefill, they run in eager mode.
    """
    apply_hook("recompile limit", allow_recompilations)
    for layer in decoder.layers:
        layer.forward = partial(
            _compiled_forward, layer.forward, compile_or_eager(layer.forward, dynamic=True)
        )


def _compiled_forward(
    eager: Callable,
    compiled: Callable,
    hidden: Tensor,
    *args: Any,
    past_key_values: Cache | None = None,
    **settings: Any,
) -> Any:
    """Replace the `forward` of a decoder layer; `hidden` is (B, S, width)."""
    if past_key_values is not None:
        return eager(hidden, *args, past_key_values=past_key_values, **settings)
    if not hidden.requires_grad:  # the first layer would need code of its own
        hidden = hidden.detach().requires_grad_()
    return compiled(hidden, *args, past_key_values=None, **settings)


@cache
def _cached_indices(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an index tensor, cached because graph capture does not allow host-to-device copies."""
    return torch.tensor(values, dtype=torch.long, device=device)


def fuse_rms_norms(model: nn.Module) -> None:
    """Run each RMSNorm as one kernel instead of eight, except those with a gate."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and len(signature(module.forward).parameters) == 1:
            module.__class__ = _fused_rms_norm(type(module))


@cache
def _fused_rms_norm(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of an RMSNorm of transformers that uses torch's kernel.

    A class, not a function for each module: layers share compiled code only if they run the same
    function.
    """

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        """Return the RMS norm by torch's kernel, or by the original one if the dtypes differ."""
        weight = self.weight
        if hidden.dtype != weight.dtype:
            return original.forward(self, hidden)
        with torch.autocast(hidden.device.type, enabled=False):  # would cast to float32 and back
            return nn.functional.rms_norm(hidden, weight.shape, weight, self.variance_epsilon)

    return type(original.__name__, (original,), {"forward": forward})
