"""Flex attention on a GPU trains like attention with a dense mask.

python -m pytest -q -s --noconftest tests/gpu/test_flex_attention_gpu.py    on a machine with a GPU
"""

from functools import partial

import pytest
import torch
from benchmark_vlm import make_prompt
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from untrained.vlm import build

from flow_grpo.vlm.attention import (
    build_block_mask,
    build_dense_mask,
    flex_attention_supported,
    run_flex_attention,
)
from flow_grpo.vlm.packing import PADDING_SEGMENT, PackedBatch, Response, pack_responses
from flow_grpo.vlm.policy import VlmPolicy

CUDA, HALF = torch.device("cuda"), torch.bfloat16
SHAPES = ("qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen3-vl-4b")  # 8, 7 and 4 query heads per key head
ROWS = [  # (prompt length, response lengths) of the sequences in each row
    [(386, [512] * 8), (100, [16, 1024, 300])],
    [(128, [128, 128, 256])],
    [(77, [3, 1, 900]), (500, [20] * 30), (5, [60])],
    [(1000, [1024] * 6)],
]


def segments_of(rows: list[tuple[int, list[int]]]) -> Tensor:
    numbers = [
        [0] * prompt + [n for n, length in enumerate(lengths, 1) for _ in range(length)]
        for prompt, lengths in rows
    ]
    longest = max(map(len, numbers))
    padded = [own + [PADDING_SEGMENT] * (longest - len(own)) for own in numbers]
    return torch.tensor(padded, device=CUDA)


def inputs_of(segments: Tensor, heads: int, shared: int, width: int) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(len(segments), n, segments.shape[1], width) for n in (heads, shared, shared)]
    return [torch.randn(size, device=CUDA, dtype=HALF, requires_grad=True) for size in sizes]


def dense(segments: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention with a dense mask, as transformers does."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, build_dense_mask(segments))


def flex(segments: Tensor, *inputs: Tensor) -> Tensor:
    return run_flex_attention(*inputs, build_block_mask(segments), None)


def run(attend, inputs: list[Tensor], mask: Tensor) -> list[Tensor]:
    """Return the output where `mask` is set, and the gradients of the inputs."""
    out = attend(*inputs) * mask[:, None, :, None]
    upstream = torch.linspace(-1, 1, out.shape[-1], device=CUDA).to(out.dtype).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize(("heads", "shared", "width"), [(16, 2, 128), (28, 4, 128), (32, 8, 128)])
def test_outputs_and_gradients_match_a_dense_mask(heads, shared, width):
    """The error relative to float32 is at most that of torch's attention in half precision."""
    for rows in ROWS:
        segments = segments_of(rows)
        mask, inputs = segments != PADDING_SEGMENT, inputs_of(segments, heads, shared, width)
        ours = run(partial(flex, segments), inputs, mask)
        theirs = run(partial(dense, segments), inputs, mask)
        wide = [x.detach().float().requires_grad_() for x in inputs]
        exact = run(partial(dense, segments), wide, mask)
        for name, own, other, reference in zip("oqkv", ours, theirs, exact, strict=True):
            off, usual = ((x.float() - reference).norm() / reference.norm() for x in (own, other))
            print(f"{heads} heads, {tuple(segments.shape)}, {name}: {off:.2e}, dense {usual:.2e}")
            assert off < max(1.5 * usual, 4e-3)


def test_it_takes_less_memory_than_a_dense_mask():
    segments = segments_of([(386, [512] * 16)])
    inputs, mask = inputs_of(segments, 16, 2, 128), segments != PADDING_SEGMENT
    peak = {}
    for attend in (dense, flex):
        run(partial(attend, segments), inputs, mask)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        run(partial(attend, segments), inputs, mask)
        torch.cuda.synchronize()
        peak[attend] = torch.cuda.max_memory_allocated() - allocated
    assert peak[flex] < peak[dense]


def batch_of(model: torch.nn.Module, lengths: list[int]) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    responses = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(10, 1000, (length,), generator=generator)
        responses.append(Response(i // 4, make_prompt(model, 40, 112, i // 4), tokens))
    return pack_responses(responses, 0).to(CUDA)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_trains_as_with_a_dense_mask(shape, gradient_checkpointing):
    """Log-probabilities and gradients are equal up to rounding.

    Those of the old and the reference policy are exactly equal before the first update.
    """
    found = {}
    for with_flex in (False, True):
        model = build(shape, CUDA, HALF, num_hidden_layers=2)
        assert flex_attention_supported(model, CUDA, HALF)
        policy = VlmPolicy(
            model,
            processors=[],
            with_reference=True,
            compute_dtype=HALF,
            gradient_checkpointing=gradient_checkpointing,
            flex_attention=with_flex,
        )
        for lengths in ([300, 16, 90, 40, 500, 7], [33, 64]):
            batch = batch_of(model, lengths)
            scores = policy.forward_tokens(batch)["log_probs"]
            assert torch.equal(policy.forward_tokens_no_grad(batch)["log_probs"], scores)
            assert torch.equal(policy.reference_log_probs(batch), scores)
        batch = batch_of(model, [300, 16, 90, 40, 500, 7])
        scores = policy.forward_tokens(batch)["log_probs"]
        scores[batch.mask].mean().backward()
        gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        found[with_flex] = scores.detach()[batch.mask], torch.cat(gradients).float()
    (dense, of_dense), (ours, of_ours) = found[False], found[True]
    off = (ours - dense).abs()
    apart = float((of_ours - of_dense).norm() / of_dense.norm())
    print(f"{shape}: log-probs off by {off.mean():.2g}, {off.max():.2g} at most; grad {apart:.2g}")
    assert off.mean() < 0.01
    assert apart < 0.05
