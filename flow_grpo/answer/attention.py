"""What each token of a row sees, and the attention that it is given by.

A row that is trained holds a prompt and all its answers, which do not see each other. With a mask
of every pair of tokens all pairs are paid for; flex attention skips those that never meet.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
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

from flow_grpo.answer.batches import PADDING, PROMPT
from flow_grpo.errors import first_line
from flow_grpo.speed.compiler import fused

logger = logging.getLogger("flow_grpo")

PACKED, ONE_QUERY = "packed_rows", "one_query"  # names of attention, for transformers
ROTARY = "apply_rotary_pos_emb"  # in transformers' files
BLOCK = 128  # columns that flex attention skips or computes together
NARROWEST = 16  # heads that it can do


def _sees(column: Tensor, other: Tensor, segment: Tensor, others: Tensor) -> Tensor:
    """Whether a token sees another, by their columns and segments: what came before it of its
    prompt and its own answer. Padding sees itself, as a row that sees nothing has no softmax."""
    shared = ((others == PROMPT) | (others == segment)) & (others != PADDING)
    return ((other <= column) & shared) | (other == column)


def dense_mask(segments: Tensor) -> Tensor:
    """(B, 1, S, S) bool, for segments (B, S)."""
    place = torch.arange(segments.shape[1], device=segments.device)
    return _sees(place[:, None], place, segments[:, :, None], segments[:, None])[:, None]


def block_mask(segments: Tensor) -> BlockMask:
    """The same for flex attention. Which blocks it may skip, and which it need not look into,
    follows from the lowest and the highest segment of each."""
    length, short = segments.shape[1], segments.int()
    place = torch.arange(length, device=segments.device)
    alone = torch.where(segments == PADDING, 2**31 + place, segments)  # no two alike
    blocks = functional.pad(alone, (0, -length % BLOCK), value=2**32).unflatten(1, (-1, BLOCK))
    low, high = blocks.amin(-1), blocks.amax(-1)  # (B, blocks)
    number = torch.arange(low.shape[1], device=low.device)
    meets = (low[:, None] <= high[..., None]) & (low[..., None] <= high[:, None])
    some = (number <= number[:, None]) & ((low[:, None] == PROMPT) | meets)
    same = (low[:, None] == high[..., None]) & (low[..., None] == high[:, None])
    every = (number < number[:, None]) & ((high[:, None] == PROMPT) | same)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda row, _, q, k: _sees(q, k, short[row, q], short[row, k]),
        seq_lengths=(length, length),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For every block of queries, of the blocks of keys chosen (B, queries, keys): how many there
    are, and a list that begins with them."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@cache
def _compiled() -> Callable[..., Tensor]:
    # one row or several, with gradients and without
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.optimize_ddp = False  # which takes no such operator
    return torch.compile(flex_attention, dynamic=True)


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """(B, heads, S, width). On a CPU, where nothing is compiled, it has no gradient."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    attend = _compiled() if kind == "cuda" else flex_attention
    query, key, value = (x.to(dtype) for x in (query, key, value))
    return attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)


def compiles(model: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flex attention runs here for heads as the model has them, there and back."""
    config = model.config.get_text_config()
    heads, width = config.num_attention_heads, getattr(config, "head_dim", None)
    width = width or config.hidden_size // heads
    usual = config._attn_implementation == "sdpa"  # what others do may not be plain attention
    if device.type != "cuda" or width < NARROWEST or not usual:
        return False
    shared = getattr(config, "num_key_value_heads", None) or heads
    segments = torch.arange(3 * BLOCK, device=device).div(BLOCK, rounding_mode="floor")
    try:
        q, k, v = (
            torch.zeros(3, n, 3 * BLOCK, width, dtype=dtype, device=device, requires_grad=True)
            for n in (heads, shared, shared)
        )
        flex(q, k, v, block_mask(segments.expand(3, -1)), None).sum().backward()
    except Exception as error:  # of the compiler, the GPU or its driver
        logger.warning(
            "flex attention does not run here, so that training pays for all pairs of tokens in a "
            "row: %s; flex_attention=False leaves it out",
            first_line(error),
        )
        return False
    return True


def _packed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """By the kind of mask; also where activations are recomputed, outside of any context."""
    if not isinstance(mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, mask, **settings)
    return flex(query, key, value, mask, settings.get("scaling")).transpose(1, 2), None


def _one_query(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    """Attention of one query per row. Heads that share keys do so in cuDNN, or else are queries of
    one head: keys are read once and not copied for each of them."""
    rows, heads, _, width = query.shape
    scale, attend = settings["scaling"], functional.scaled_dot_product_attention
    if _shares_keys(query, key, value, mask):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = attend(query, key, value, mask, scale=scale, enable_gqa=True)
    else:
        shared = query.view(rows, key.shape[1], -1, width)
        out = attend(shared, key, value, mask.expand(-1, -1, shared.shape[2], -1), scale=scale)
    return out.reshape(rows, 1, heads, width), None


def _shares_keys(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether cuDNN takes it as it is."""
    if not query.is_cuda:
        return False
    params = cuda.SDPAParams(query, key, value, mask, 0.0, False, True)
    shape = query.shape[1], key.shape[1], query.shape[3]
    return cuda.can_use_cudnn_attention(params) and _cudnn_runs(*shape, query.dtype, query.device)


@cache
def _cudnn_runs(
    heads: int, shared: int, width: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether it does what it says it can: tried once."""
    query = torch.zeros(1, heads, 1, width, dtype=dtype, device=device)
    key = torch.zeros(1, shared, 2 * BLOCK, width, dtype=dtype, device=device)
    mask = torch.zeros(1, 1, 1, 2 * BLOCK, dtype=dtype, device=device)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            functional.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)
    except RuntimeError as error:
        why = first_line(error)
        logger.warning("cuDNN's attention does not run here, and sampling is slower: %s", why)
        return False
    return True


AttentionInterface.register(ONE_QUERY, _one_query)
AttentionInterface.register(PACKED, _packed)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def rotary_files(language_model: nn.Module) -> dict[ModuleType, Callable]:
    """transformers' files that the model is made of, with what gives keys their places in each."""
    files = {sys.modules[type(module).__module__] for module in language_model.modules()}
    return {file: vars(file)[ROTARY] for file in files if ROTARY in vars(file)}


@contextmanager
def one_query(language_model: nn.Module, rotary: dict[ModuleType, Callable]) -> Iterator[None]:
    """Context in which attention is the faster one for a single new token per row, and `rotary`
    embeddings take two kernels, not ten."""
    config = language_model.config
    usual = config._attn_implementation
    try:
        config._attn_implementation = ONE_QUERY
        for file, function in rotary.items():
            setattr(file, ROTARY, fused(function))
        yield
    finally:
        config._attn_implementation = usual
        for file, function in rotary.items():
            setattr(file, ROTARY, function)
