"""Decoder layers of Qwen2, Qwen3 and Llama for decoding, compiled into few kernels.

A decoding step is bound by the number of its kernels as much as by memory bandwidth: transformers'
layer launches about twenty, of which only six read weights or the cache. Here one compiled function
computes a layer. Sums, norms, rotary embeddings, the write to the cache and the gated activation
become six kernels between the four matrix products and attention.

All layers of a model share the compiled code, because their tensors are its arguments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from flow_grpo.perf.compile_utils import compile_or_eager
from flow_grpo.perf.device_memory import free_memory
from flow_grpo.perf.inductor import allow_recompilations, apply_hook
from flow_grpo.perf.lora import cast_stochastic, is_plain_lora, merged_weight
from flow_grpo.perf.quantization import Nf4Linear
from flow_grpo.vlm.attention import attend_single_query

# Layers of transformers that `decoder_layer` computes; Llama has no biases, Qwen3 normalizes heads.
LAYER_CLASSES = {
    "LlamaDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen2_5_VLDecoderLayer",
    "Qwen2VLDecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3VLTextDecoderLayer",
}
WITHOUT_BIAS = ("o_proj", "gate_proj", "up_proj", "down_proj")  # in `decoder_layer`
DEQUANTIZED_FRACTION = 0.5  # of the free memory, at most; the rest is for cache and activations


class LayerWeights(NamedTuple):
    """Weights of a decoder layer; matrices are in the compute dtype, with LoRA merged."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


class LayerShape(NamedTuple):
    """Constants of a decoder layer."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


class KeyValueCache(Protocol):
    """What a fused layer uses of `SlotCache`."""

    rows: int
    row_index: Tensor
    write_column: Tensor
    keys_values: dict[int, tuple[Tensor, ...]]


def _single_query_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Return attention, (rows, heads * D), of one query per row to the columns of `mask`.

    Args:
        query: (rows, heads, 1, D).
        keys: Cache, (slots, kv_heads, columns, D); rows and columns in view come first.
        values: As `keys`.
        mask: Additive mask, (rows, 1, 1, columns in view).
        scale: Factor of the logits.
    """
    rows, columns = mask.shape[0], mask.shape[-1]
    view = keys[:rows, :, :columns], values[:rows, :, :columns]
    return attend_single_query(query, *view, mask, scale).flatten(1).contiguous()


# Opaque to the compiler, which would otherwise copy the part of the cache that is read.
single_query_attention_op = torch.library.custom_op(
    "flow_grpo::single_query_attention", _single_query_attention, mutates_args=()
)


@single_query_attention_op.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1] * query.shape[3])


def decoder_layer(
    hidden: Tensor,
    mask: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    row: Tensor,
    column: Tensor,
    weights: LayerWeights,
    shape: LayerShape,
) -> Tensor:
    """Compute a decoder layer for one new token per row, whose keys and values are stored.

    Args:
        hidden: (rows, 1, width).
        mask: Additive mask, (rows, 1, 1, columns in view).
        rotary: Cosines and sines of the rotary embedding, (rows, 1, D) each.
        cache: Keys and values, (slots, kv_heads, columns, D), written in place.
        row: Numbers of the rows, (rows,).
        column: Column of the cache that each row writes, (rows,).
        weights: The layer's weights.
        shape: The layer's constants.
    """
    x = _rms_norm(hidden[:, 0], weights.attention_norm, shape.eps).to(weights.qkv.dtype)
    projected = functional.linear(x, weights.qkv, weights.qkv_bias)
    heads = projected.unflatten(-1, (-1, shape.head_dim))
    query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    if weights.query_norm is not None:
        query = _rms_norm(query, weights.query_norm, shape.eps)
        key = _rms_norm(key, weights.key_norm, shape.eps)
    query, key = _rotate(query, *rotary), _rotate(key, *rotary)
    keys, values = cache
    keys[row, :, column] = key.to(keys.dtype)
    values[row, :, column] = value.to(values.dtype)
    attended = single_query_attention_op(
        query[:, :, None].to(keys.dtype), keys, values, mask, shape.scale
    )
    hidden = hidden + functional.linear(attended, weights.out)[:, None]
    x = _rms_norm(hidden[:, 0], weights.mlp_norm, shape.eps).to(weights.gate_up.dtype)
    gate, up = functional.linear(x, weights.gate_up).chunk(2, -1)
    return hidden + functional.linear(functional.silu(gate) * up, weights.down)[:, None]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension, computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding, (rows, 1, D), to queries or keys, (rows, heads, D)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class FusedDecoder:
    """The decoder layers of a model that `decoder_layer` can compute, with merged weights.

    Args:
        decoder: The language model.
        dtype: Compute dtype of the matrices.
    """

    @torch.no_grad()
    def __init__(self, decoder: nn.Module, dtype: torch.dtype) -> None:
        dequantize = has_memory_to_dequantize(decoder, dtype)
        self.layers = {
            layer: (layer_weights(layer, dtype), layer_shape(layer))
            for layer in getattr(decoder, "layers", ())
            if is_supported(layer, dtype, dequantize=dequantize)
        }
        self.function = decoder_layer
        if next(decoder.parameters()).is_cuda:
            apply_hook("recompile limit", allow_recompilations)
            self.function = compile_or_eager(decoder_layer, dynamic=None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute one new token per row with `decoder_layer` in this context."""
        compiled = {layer: vars(layer).get("forward") for layer in self.layers}  # for training
        for layer in self.layers:
            layer.forward = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer, original in compiled.items():
                del layer.forward
                if original is not None:
                    layer.forward = original

    def _forward(
        self,
        layer: nn.Module,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: KeyValueCache,
        **_: Any,
    ) -> Tensor:
        """Replace the `forward` of a layer."""
        weights, shape = self.layers[layer]
        cache = past_key_values
        with torch.autocast(hidden_states.device.type, enabled=False):
            return self.function(
                hidden_states,
                attention_mask,
                position_embeddings,
                cache.keys_values[layer.self_attn.layer_idx],
                cache.row_index[: cache.rows],
                cache.write_column,
                weights,
                shape,
            )


def has_memory_to_dequantize(decoder: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a dequantized copy of a decoder's NF4 weights fits in memory."""
    layers = [module for module in decoder.modules() if isinstance(module, Nf4Linear)]
    size = sum(layer.out_features * layer.in_features for layer in layers) * dtype.itemsize
    device = next(decoder.parameters()).device
    return bool(layers) and size <= DEQUANTIZED_FRACTION * free_memory(device)


def is_supported(layer: nn.Module, dtype: torch.dtype, *, dequantize: bool) -> bool:
    """Return whether `decoder_layer` computes this layer.

    Layers whose weights need not be copied to merge LoRA or to cast them are left as they are,
    because concatenating their projections would take memory.

    Args:
        layer: A layer of the decoder.
        dtype: Compute dtype of the matrices.
        dequantize: Whether NF4 weights may be copied.
    """
    if type(layer).__name__ not in LAYER_CLASSES:
        return False
    linear = projections(layer)
    return (
        getattr(layer.self_attn, "sliding_window", None) is None
        and isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation)
        and all(linear[name].bias is None for name in WITHOUT_BIAS)
        and all(_is_copied(module, dtype, dequantize) for module in linear.values())
    )


def projections(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a decoder layer by name."""
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    return {name: getattr(layer.self_attn, name) for name in attention} | {
        name: getattr(layer.mlp, name) for name in mlp
    }


def _is_copied(projection: nn.Module, dtype: torch.dtype, dequantize: bool) -> bool:
    """Return whether a projection is a product with one matrix that `dense_weight` copies."""
    is_lora = isinstance(projection, lora.LoraLayer)
    if is_lora and not is_plain_lora(projection):
        return False
    base = projection.base_layer if is_lora else projection
    if isinstance(base, Nf4Linear):
        return dequantize
    return type(base) is nn.Linear and (is_lora or base.weight.dtype != dtype)


def layer_weights(layer: nn.Module, dtype: torch.dtype) -> LayerWeights:
    """Return the weights of a supported layer."""
    linear, attention = projections(layer), layer.self_attn
    matrices = {name: dense_weight(module, dtype) for name, module in linear.items()}
    biases = [linear[name].bias for name in ("q_proj", "k_proj", "v_proj")]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return LayerWeights(
        qkv=torch.cat([matrices[name] for name in ("q_proj", "k_proj", "v_proj")]),
        qkv_bias=None if biases[0] is None else torch.cat(biases).to(dtype),
        out=matrices["o_proj"],
        gate_up=torch.cat([matrices["gate_proj"], matrices["up_proj"]]),
        down=matrices["down_proj"],
        attention_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        query_norm=norms[0] and norms[0].weight,
        key_norm=norms[1] and norms[1].weight,
    )


def dense_weight(projection: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the matrix of a projection in `dtype`, dequantized and with LoRA merged."""
    is_lora = isinstance(projection, lora.LoraLayer)
    base = projection.base_layer if is_lora else projection
    weight = base.dequantize() if isinstance(base, Nf4Linear) else base.weight
    if not is_lora or projection.disable_adapters:
        return weight.to(dtype)
    return cast_stochastic(merged_weight(projection, weight), dtype)


def layer_shape(layer: nn.Module) -> LayerShape:
    """Return the constants of a supported layer."""
    attention = layer.self_attn
    width = attention.head_dim
    heads, kv_heads = (getattr(attention, n).out_features // width for n in ("q_proj", "k_proj"))
    eps = layer.input_layernorm.variance_epsilon
    return LayerShape(heads, kv_heads, width, eps, attention.scaling)
