"""Attention masks and attention functions for packed training rows and for decoding.

A training row contains a prompt followed by all its responses; with flex attention, several prompts
with theirs. Segment ids (B, S) give the part a token belongs to: `PROMPT_SEGMENT` or a response
number, plus `GROUP` for each preceding prompt, or `PADDING_SEGMENT`. A token attends to the earlier
tokens of its prompt and of its own response. A dense mask always costs O(S^2); flex
attention skips blocks in which no pair of tokens is visible.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flow_grpo.errors import first_line
from flow_grpo.perf.compile_utils import compile_once
from flow_grpo.perf.inductor import allow_recompilations, apply_hook
from flow_grpo.vlm.models import get_family
from flow_grpo.vlm.packing import GROUP, PADDING_SEGMENT, PROMPT_SEGMENT
from flow_grpo.vlm.sequence_parallel import SequenceShards

logger = logging.getLogger("flow_grpo")

# names under which transformers finds the attention functions below
PACKED_ATTENTION = "packed_rows"
SINGLE_QUERY_ATTENTION = "single_query_attention"
ROTARY_FUNCTION = "apply_rotary_pos_emb"  # in transformers' model files
FLEX_BLOCK_SIZE = 128  # columns that flex attention skips or computes together
MIN_HEAD_DIM = 16  # of flex attention


def _is_visible(column: Tensor, other: Tensor, segment: Tensor, others: Tensor) -> Tensor:
    """Return whether the token in `column` attends to the token in column `other`.

    Padding attends to itself, because a row without visible columns has no softmax.
    """
    in_prompt = (others % GROUP == PROMPT_SEGMENT) & (others // GROUP == segment // GROUP)
    shared = (in_prompt | (others == segment)) & (others != PADDING_SEGMENT)
    return ((other <= column) & shared) | (other == column)


def build_dense_mask(segments: Tensor) -> Tensor:
    """Return the attention mask (B, 1, S, S) bool of segments (B, S)."""
    column = torch.arange(segments.shape[1], device=segments.device)
    return _is_visible(column[:, None], column, segments[:, :, None], segments[:, None])[:, None]


def build_block_mask(segments: Tensor) -> BlockMask:
    """Return the attention mask of segments (B, S) for flex attention.

    The lowest and highest segment of each block decide which pairs of blocks are skipped, partly
    visible or fully visible. Segments never decrease within a row.
    """
    length, short = segments.shape[1], segments.int()
    column = torch.arange(length, device=segments.device)
    # give each padding token a separate segment, which belongs to no prompt
    distinct = torch.where(segments == PADDING_SEGMENT, (2**31 + column) * GROUP + 1, segments)
    padded = functional.pad(distinct, (0, -length % FLEX_BLOCK_SIZE), value=2**32 * GROUP + 1)
    blocks = padded.unflatten(1, (-1, FLEX_BLOCK_SIZE))
    low, high = blocks.amin(-1), blocks.amax(-1)  # (B, blocks)
    number = torch.arange(low.shape[1], device=low.device)
    overlap = (low[:, None] <= high[..., None]) & (low[..., None] <= high[:, None])
    first, last = low // GROUP, high // GROUP  # prompts of each block
    with_prompt = (low % GROUP == PROMPT_SEGMENT) | (first < last)  # the key block has a prompt
    same_group = (first[:, None] <= last[..., None]) & (first[..., None] <= last[:, None])
    visible = (number <= number[:, None]) & ((with_prompt[:, None] & same_group) | overlap)
    same = (low[:, None] == high[..., None]) & (low[..., None] == high[:, None])
    is_prompt = (high % GROUP == PROMPT_SEGMENT) & (low == high)
    one_group = (first[:, None] == last[..., None]) & (first[..., None] == first[:, None])
    full = (number < number[:, None]) & ((is_prompt[:, None] & one_group) | same)
    return BlockMask.from_kv_blocks(
        *_block_indices(visible & ~full),
        *_block_indices(full),
        BLOCK_SIZE=FLEX_BLOCK_SIZE,
        mask_mod=lambda row, _, q, k: _is_visible(q, k, short[row, q], short[row, k]),
        seq_lengths=(length, length),
    )


def _block_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen key blocks of each query block in the format of flex attention.

    Args:
        chosen: (B, query blocks, key blocks) bool.

    Returns:
        Their number, (B, 1, query blocks), and key block indices with the chosen ones first,
        (B, 1, query blocks, key blocks).
    """
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    apply_hook("recompile limit", allow_recompilations)
    return torch.compile(flex_attention, dynamic=True)


def run_flex_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None
) -> Tensor:
    """Return flex attention of query, key and value (B, heads, S, head_dim).

    It is compiled on CUDA only; on a CPU it has no gradient.
    """
    kind = query.device.type
    compiled = kind == "cuda" and not torch.compiler.is_compiling()  # else part of a larger graph
    attend = _compiled_flex_attention() if compiled else flex_attention
    query, key, value = in_autocast_dtype(query, key, value)
    if (repeats := query.shape[1] // key.shape[1]) > 1:
        # the backward pass parallelizes over key heads, of which there may be few
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return attend(query, key, value, block_mask=mask, scale=scale)


def in_autocast_dtype(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return the tensors in the autocast dtype, or in that of `value` without autocast."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    return [x.to(dtype) for x in (query, key, value)]


def flex_attention_supported(model: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a forward and backward pass of flex attention works with the model's heads."""
    config = model.config.get_text_config()
    heads, width = config.num_attention_heads, getattr(config, "head_dim", None)
    width = width or config.hidden_size // heads
    if not (family := get_family(model)).flex_attention:
        name = family.names[model.config.model_type]
        logger.warning("flex attention does not support %s; training uses dense attention", name)
        return False
    is_sdpa = config._attn_implementation == "sdpa"  # other values may mean modified attention
    if device.type != "cuda" or width < MIN_HEAD_DIM or not is_sdpa:
        return False
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    length = 3 * FLEX_BLOCK_SIZE
    segments = torch.arange(length, device=device).div(FLEX_BLOCK_SIZE, rounding_mode="floor")
    options = {"dtype": dtype, "device": device, "requires_grad": True}
    try:
        q, k, v = (torch.zeros(3, n, length, width, **options) for n in (heads, kv_heads, kv_heads))
        run_flex_attention(q, k, v, build_block_mask(segments.expand(3, -1)), None).sum().backward()
    except Exception as error:  # from the compiler, the GPU or its driver
        logger.warning(
            "flex attention is not available (%s), so training uses dense attention; set "
            "flex_attention=False to skip this check",
            first_line(error),
        )
        return False
    return True


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    sequence_shards: SequenceShards | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Use flex attention for a block mask and SDPA for a dense one.

    The arguments decide, because activation checkpointing recomputes with the same ones.
    """
    if sequence_shards is not None:
        attend = partial(_attend_own_heads, mask=mask, scale=settings.get("scaling"))
        return sequence_shards.attend(attend, *in_autocast_dtype(query, key, value)), None
    if not isinstance(mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, mask, **settings)
    out = run_flex_attention(query, key, value, mask, settings.get("scaling"))
    return out.transpose(1, 2), None


def _attend_own_heads(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Any, scale: float | None
) -> Tensor:
    """Return the attention output of this process's heads, (B, heads, S, head_dim)."""
    if isinstance(mask, BlockMask):
        return run_flex_attention(query, key, value, mask, scale)
    # of all backends, only the one that stores S x S scores supports a mask with grouped heads
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def _single_query_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    """Compute attention of one query per row in the form that transformers expects."""
    out = attend_single_query(query, key, value, mask, settings["scaling"])
    return out[:, None], None


def attend_single_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Return attention, (rows, heads, D), of one query per row, (rows, heads, 1, D).

    Grouped-query attention either uses cuDNN, or treats the heads of a group as several queries of
    one head. Both read keys once instead of repeating them per head.
    """
    rows, heads, _, width = query.shape
    attend = functional.scaled_dot_product_attention
    if _can_use_cudnn_gqa(query, key, value, mask):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = attend(query, key, value, mask, scale=scale, enable_gqa=True)
    else:
        grouped = query.view(rows, key.shape[1], -1, width)
        out = attend(grouped, key, value, mask.expand(-1, -1, grouped.shape[2], -1), scale=scale)
    return out.reshape(rows, heads, width)


def _can_use_cudnn_gqa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether cuDNN attention supports these tensors with grouped heads, and works."""
    if not query.is_cuda:
        return False
    params = cuda.SDPAParams(query, key, value, mask, 0.0, False, True)
    shape = query.shape[1], key.shape[1], query.shape[3]
    return cuda.can_use_cudnn_attention(params) and _cudnn_attention_works(
        *shape, query.dtype, query.device
    )


@cache
def _cudnn_attention_works(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether cuDNN attention runs without an error, by running it once.

    `can_use_cudnn_attention` has false positives.
    """
    query = torch.zeros(1, heads, 1, width, dtype=dtype, device=device)
    key = torch.zeros(1, kv_heads, 2 * FLEX_BLOCK_SIZE, width, dtype=dtype, device=device)
    mask = torch.zeros(1, 1, 1, 2 * FLEX_BLOCK_SIZE, dtype=dtype, device=device)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            functional.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)
    except RuntimeError as error:
        logger.warning("cuDNN attention failed, so sampling is slower: %s", first_line(error))
        return False
    return True


AttentionInterface.register(SINGLE_QUERY_ATTENTION, _single_query_attention)
AttentionInterface.register(PACKED_ATTENTION, _packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def rotary_modules(language_model: nn.Module) -> dict[ModuleType, Callable]:
    """Return the rotary embedding function of each transformers module the model is defined in."""
    files = {sys.modules[type(module).__module__] for module in language_model.modules()}
    return {file: vars(file)[ROTARY_FUNCTION] for file in files if ROTARY_FUNCTION in vars(file)}


@contextmanager
def single_query_attention(
    language_model: nn.Module, rotary: dict[ModuleType, Callable]
) -> Iterator[None]:
    """Use attention for one new token per row, and compiled `rotary` embeddings, in this context.

    Compiling reduces a rotary embedding from ten kernels to two.
    """
    config = language_model.config
    original = config._attn_implementation
    try:
        config._attn_implementation = SINGLE_QUERY_ATTENTION
        for file, function in rotary.items():
            setattr(file, ROTARY_FUNCTION, compile_once(function))
        yield
    finally:
        config._attn_implementation = original
        for file, function in rotary.items():
            setattr(file, ROTARY_FUNCTION, function)
