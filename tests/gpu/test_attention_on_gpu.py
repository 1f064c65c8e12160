"""Flex attention on a GPU: what is trained with it is what is trained with a mask of all pairs.

python -m pytest -q -s --noconftest tests/gpu/test_attention_on_gpu.py    on a machine with a GPU
"""

import time
from functools import partial

import pytest
import torch
from benchmark_vlm import make_prompt
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from untrained.answering import build

from flow_grpo.answer.attention import block_mask, compiles, dense_mask, flex
from flow_grpo.answer.batches import PADDING, Answer, PackedBatch, packed
from flow_grpo.answer.policy import AnswerPolicy

CUDA, HALF = torch.device("cuda"), torch.bfloat16
SHAPES = ("qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen3-vl-4b")  # 8, 7 and 4 heads share their keys
ROWS = [  # prompt and answers of each row
    [(386, [512] * 8), (100, [16, 1024, 300])],
    [(128, [128, 128, 256])],
    [(77, [3, 1, 900]), (500, [20] * 30), (5, [60])],
    [(1000, [1024] * 6)],
]


def segments_of(rows: list[tuple[int, list[int]]]) -> Tensor:
    numbers = [
        [0] * prompt + [n for n, own in enumerate(answers, 1) for _ in range(own)]
        for prompt, answers in rows
    ]
    longest = max(map(len, numbers))
    padded = [own + [PADDING] * (longest - len(own)) for own in numbers]
    return torch.tensor(padded, device=CUDA)


def inputs_of(segments: Tensor, heads: int, shared: int, width: int) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(len(segments), n, segments.shape[1], width) for n in (heads, shared, shared)]
    return [torch.randn(size, device=CUDA, dtype=HALF, requires_grad=True) for size in sizes]


def dense(segments: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As transformers attends with a mask."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, dense_mask(segments))


def in_blocks(segments: Tensor, *inputs: Tensor) -> Tensor:
    return flex(*inputs, block_mask(segments), None)


def run(attend, inputs: list[Tensor], there: Tensor) -> list[Tensor]:
    """What comes out where there is no padding, and the gradients of it."""
    out = attend(*inputs) * there[:, None, :, None]
    upstream = torch.linspace(-1, 1, out.shape[-1], device=CUDA).to(out.dtype).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize(("heads", "shared", "width"), [(16, 2, 128), (28, 4, 128), (32, 8, 128)])
def test_outputs_and_gradients_are_those_of_all_pairs(heads, shared, width):
    """No further from float32 than torch's own attention in half precision; in rows of any shape,
    of which most are compiled once."""
    for rows in ROWS:
        segments = segments_of(rows)
        there, inputs = segments != PADDING, inputs_of(segments, heads, shared, width)
        ours = run(partial(in_blocks, segments), inputs, there)
        theirs = run(partial(dense, segments), inputs, there)
        wide = [x.detach().float().requires_grad_() for x in inputs]
        exact = run(partial(dense, segments), wide, there)
        for name, own, other, right in zip("oqkv", ours, theirs, exact, strict=True):
            off, usual = ((x.float() - right).norm() / right.norm() for x in (own, other))
            print(f"{heads} heads, {tuple(segments.shape)}, {name}: {off:.2e}, usual {usual:.2e}")
            assert off < max(1.5 * usual, 4e-3)


def test_it_takes_less_memory_and_time_than_all_pairs():
    segments = segments_of([(386, [512] * 16)])
    inputs, there = inputs_of(segments, 16, 2, 128), segments != PADDING
    spent = {}
    for attend in (dense, in_blocks):
        run(partial(attend, segments), inputs, there)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held, start = torch.cuda.memory_allocated(), time.perf_counter()
        for _ in range(5):
            run(partial(attend, segments), inputs, there)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 5
        spent[attend] = seconds, torch.cuda.max_memory_allocated() - held
        print(f"{attend.__name__}: {seconds * 1e3:.2f} ms, {spent[attend][1] / 2**20:.0f} MiB")
    assert spent[in_blocks][0] < spent[dense][0]
    assert spent[in_blocks][1] < spent[dense][1]


def batch_of(model: torch.nn.Module, lengths: list[int]) -> PackedBatch:
    drawn = torch.Generator().manual_seed(0)
    answers = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(10, 1000, (length,), generator=drawn)
        answers.append(Answer(i // 4, make_prompt(model, 40, 112, i // 4), tokens))
    return packed(answers, 0).to(CUDA)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_is_trained_as_with_all_pairs(shape, gradient_checkpointing):
    """The same log-probabilities and gradients up to rounding; exactly the same in the forward
    that fixes the old ones, and for the reference before the first update: ratio 1, KL 0."""
    found = {}
    for with_flex in (False, True):
        model = build(shape, CUDA, HALF, num_hidden_layers=2)
        assert compiles(model, CUDA, HALF)
        policy = AnswerPolicy(
            model,
            parts=[],
            with_reference=True,
            compute_dtype=HALF,
            gradient_checkpointing=gradient_checkpointing,
            flex_attention=with_flex,
        )
        for lengths in ([300, 16, 90, 40, 500, 7], [33, 64]):
            batch = batch_of(model, lengths)
            scores = policy.scores(batch)["log_probs"]
            assert torch.equal(policy.fixed_scores(batch)["log_probs"], scores)
            assert torch.equal(policy.reference(batch), scores)
        batch = batch_of(model, [300, 16, 90, 40, 500, 7])
        scores = policy.scores(batch)["log_probs"]
        scores[batch.mask].mean().backward()
        gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        found[with_flex] = scores.detach()[batch.mask], torch.cat(gradients).float()
    (dense, of_dense), (ours, of_ours) = found[False], found[True]
    off = (ours - dense).abs()
    apart = float((of_ours - of_dense).norm() / of_dense.norm())
    print(f"{shape}: log-probs off by {off.mean():.2g}, {off.max():.2g} at most; grad {apart:.2g}")
    assert off.mean() < 0.01
    assert apart < 0.05
