"""Dense and block masks of packed rows, and flex attention."""

from contextlib import nullcontext

import pytest
import small_vlm
import torch
import vlm_runs
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from untrained.small.components import seeded

from flow_grpo.vlm import attention
from flow_grpo.vlm.attention import FLEX_BLOCK_SIZE, build_block_mask, build_dense_mask
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import GROUP, PADDING_SEGMENT, PackedBatch, Response, pack_responses
from flow_grpo.vlm.prompts import EncodedPrompt


def row(prompt: int, responses: list[int], length: int) -> Tensor:
    """Return the segments of a row, padded on the right."""
    numbers = [0] * prompt + [n for n, own in enumerate(responses, 1) for _ in range(own)]
    return torch.tensor(numbers + [PADDING_SEGMENT] * (length - len(numbers)))


def test_a_token_attends_to_its_prompt_and_its_own_response():
    mask = build_dense_mask(row(2, [2, 1], 6)[None])[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],  # padding
    ]


# prompts that share a row: within a block, of several blocks, and at their edges
SHORT = [(60, [10, 5]), (150, [140, 20]), (127, [1, 1]), (256, [128]), (30, [])]


def test_block_mask_equals_the_dense_mask():
    """Responses are within a block, span several, or end at its edge; rows differ in length."""
    rows = [(300, [200, 400, 3, 1, 128], 1100), (128, [256, 256, 128], 1100), (5, [40] * 8, 1100)]
    parts = [row(prompt, own, prompt + sum(own)) for prompt, own in SHORT]
    joined = torch.cat([part + GROUP * number for number, part in enumerate(parts)])
    joined = functional.pad(joined, (0, 1100 - len(joined)), value=PADDING_SEGMENT)
    segments = torch.stack([*(row(*each) for each in rows), joined])
    mask, dense = build_block_mask(segments), build_dense_mask(segments)
    some = in_blocks(dense, beyond=False).any((-1, -2))
    every = in_blocks(dense, beyond=True).all(-1).all(-1)
    partly = chosen(mask.kv_num_blocks, mask.kv_indices)
    whole = chosen(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(partly | whole, some)
    assert not (partly & whole).any()
    assert not (whole & ~every).any()
    assert whole.sum() > 0.7 * every.sum()
    assert some.float().mean() < 0.5
    columns = torch.arange(segments.shape[1])
    computed = mask.mask_mod(torch.tensor(1), torch.tensor(0), columns[:, None], columns)
    assert torch.equal(computed, dense[1, 0])


def in_blocks(dense: Tensor, beyond: bool) -> Tensor:
    """Return (B, 1, blocks, blocks, 128, 128), with `beyond` as the value of missing queries."""
    spare = -dense.shape[-1] % FLEX_BLOCK_SIZE
    pairs = functional.pad(functional.pad(dense, (0, spare)), (0, 0, 0, spare), value=beyond)
    return (
        pairs.unflatten(2, (-1, FLEX_BLOCK_SIZE))
        .unflatten(4, (-1, FLEX_BLOCK_SIZE))
        .transpose(3, 4)
    )


def chosen(counts: Tensor, indices: Tensor) -> Tensor:
    """Return the block indices that kernels read as (B, 1, blocks, blocks) bool."""
    among = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros_like(indices, dtype=torch.bool).scatter(-1, indices.long(), among)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "internvl"])
def test_flex_attention_equals_dense_attention(family, tmp_path, monkeypatch):
    """With grouped-query attention, responses of different lengths, and images.

    Gradients are tested on a GPU; on a CPU, flex attention has none.
    """
    torch.manual_seed(0)
    networks = [PolicyModel(small_vlm.build(family).double(), flex_attention=f) for f in (0, 1)]
    encoder = small_vlm.encoder(networks[0].model)
    prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    shares = networks[0].family.shares_prompt
    rows, lengths = [0, 0, 0, 1, 1, 2], [9, 1, 30, 4, 17, 12]
    responses = [
        Response(r if shares else i, prompts[r], torch.randint(7, 60, (lengths[i],)))
        for i, r in enumerate(rows)
    ]
    batch = pack_responses(responses, small_vlm.PAD)
    calls, original = [], attention.run_flex_attention
    monkeypatch.setattr(
        attention, "run_flex_attention", lambda *args: calls.append(1) or original(*args)
    )
    one_row = networks[1].packs_one_row
    assert one_row == shares
    other = pack_responses(responses, small_vlm.PAD, one_row=one_row)
    with torch.no_grad():
        dense = networks[0](batch)["log_probs"]
        assert not calls
        flex = networks[1](other)["log_probs"]
    assert len(calls) == {"qwen3_5": 1}.get(family, 2)  # one of two layers has linear attention
    torch.testing.assert_close(flex, dense, rtol=0, atol=1e-9)


def gradients_of(network: PolicyModel, batches: list[PackedBatch]) -> dict[str, Tensor]:
    """Return the accumulated gradients of a weighted sum of log-probabilities."""
    network.zero_grad()
    for batch in batches:
        scores = network(batch)["log_probs"]
        weights = torch.arange(scores.shape[1]).cos().to(scores)  # by position in the response
        (scores * weights).sum().backward()
    return {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "text"])
def test_packed_rows_have_the_gradients_of_separate_responses(family, dtype, tolerance, tmp_path):
    """Rows of different lengths, and a row of all, against one response at a time."""
    torch.manual_seed(0)
    lengths, rows = [9, 1, 30, 4, 17, 12], [0, 0, 0, 1, 1, 2]
    if family == "text":
        with seeded(0):
            model = LlamaForCausalLM(LlamaConfig(**small_vlm.TEXT)).eval()
        encoded = [EncodedPrompt(torch.arange(8, 8 + n), torch.arange(n)[None], n) for n in (5, 9)]
        prompts = [*encoded, encoded[0]]
    else:
        model = small_vlm.build(family)
        encoder = small_vlm.encoder(model)
        prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    network = PolicyModel(model.to(dtype))
    shares = network.family.shares_prompt
    responses = [
        Response(r if shares else i, prompts[r], torch.randint(7, 60, (lengths[i],)))
        for i, r in enumerate(rows)
    ]
    together = pack_responses(responses, small_vlm.PAD)
    assert (together.inputs.segments == PADDING_SEGMENT).any()
    alone = [pack_responses([each], small_vlm.PAD) for each in responses]
    assert not any((each.inputs.segments == PADDING_SEGMENT).any() for each in alone)
    joined = pack_responses(responses, small_vlm.PAD, one_row=shares)
    if shares:
        assert len(joined.inputs.segments) == 1
        assert not (joined.inputs.segments == PADDING_SEGMENT).any()
    with vlm_runs.in_float64() if dtype == torch.float64 else nullcontext():
        separate = gradients_of(network, alone)
        largest = max(float(each.abs().max()) for each in separate.values())
        for batch in (together, joined):
            packed = gradients_of(network, [batch])
            assert packed.keys() == separate.keys()
            for name, gradient in separate.items():
                error = float((packed[name] - gradient).abs().max())
                assert error < tolerance * largest, name
