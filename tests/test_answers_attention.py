"""What tokens of a packed row see: a mask of all pairs, and one of blocks for flex attention."""

import pytest
import small_vlm
import torch
from torch import Tensor
from torch.nn import functional

from flow_grpo.answer import attention
from flow_grpo.answer.attention import BLOCK, block_mask, dense_mask
from flow_grpo.answer.batches import PADDING, Answer, packed
from flow_grpo.answer.network import AnswerModel


def row(prompt: int, answers: list[int], length: int) -> Tensor:
    """Segments of a row, padded on the right."""
    numbers = [0] * prompt + [n for n, own in enumerate(answers, 1) for _ in range(own)]
    return torch.tensor(numbers + [PADDING] * (length - len(numbers)))


def test_a_token_sees_its_prompt_and_its_own_answer_up_to_itself():
    seen = dense_mask(row(2, [2, 1], 6)[None])[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],  # padding
    ]


def test_blocks_are_left_out_where_nothing_is_seen_and_not_looked_into_where_all_is():
    """Answers within a block, over several, from edge to edge; rows of unlike lengths."""
    rows = [(300, [200, 400, 3, 1, 128], 1100), (128, [256, 256, 128], 1100), (5, [40] * 8, 1100)]
    segments = torch.stack([row(*each) for each in rows])
    mask, dense = block_mask(segments), dense_mask(segments)
    some = in_blocks(dense, beyond=False).any((-1, -2))
    every = in_blocks(dense, beyond=True).all(-1).all(-1)
    partly = chosen(mask.kv_num_blocks, mask.kv_indices)
    whole = chosen(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(partly | whole, some)
    assert not (partly & whole).any()
    assert not (whole & ~every).any()
    assert whole.sum() > 0.7 * every.sum()
    assert some.float().mean() < 0.5
    places = torch.arange(segments.shape[1])
    looked = mask.mask_mod(torch.tensor(1), torch.tensor(0), places[:, None], places)
    assert torch.equal(looked, dense[1, 0])


def in_blocks(dense: Tensor, beyond: bool) -> Tensor:
    """(B, 1, blocks, blocks, 128, 128); `beyond`: what queries see that are not there."""
    spare = -dense.shape[-1] % BLOCK
    pairs = functional.pad(functional.pad(dense, (0, spare)), (0, 0, 0, spare), value=beyond)
    return pairs.unflatten(2, (-1, BLOCK)).unflatten(4, (-1, BLOCK)).transpose(3, 4)


def chosen(counts: Tensor, indices: Tensor) -> Tensor:
    """(B, 1, blocks, blocks) bool, of the lists that kernels read."""
    among = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros_like(indices, dtype=torch.bool).scatter(-1, indices.long(), among)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "internvl"])
def test_flex_attention_is_attention_with_the_mask_of_all_pairs(family, tmp_path, monkeypatch):
    """For heads that share keys, answers of unlike lengths and pictures between them;
    gradients are tested on a GPU, as there are none on a CPU."""
    torch.manual_seed(0)
    networks = [AnswerModel(small_vlm.build(family).double(), flex_attention=f) for f in (0, 1)]
    encoder = small_vlm.encoder(networks[0].model)
    prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    shares = networks[0].family.shares_prompt
    rows, lengths = [0, 0, 0, 1, 1, 2], [9, 1, 30, 4, 17, 12]
    answers = [
        Answer(r if shares else i, prompts[r], torch.randint(7, 60, (lengths[i],)))
        for i, r in enumerate(rows)
    ]
    batch = packed(answers, small_vlm.PAD)
    calls, usual = [], attention.flex
    monkeypatch.setattr(attention, "flex", lambda *given: calls.append(1) or usual(*given))
    with torch.no_grad():
        dense = networks[0](batch)["log_probs"]
        assert not calls
        flex = networks[1](batch)["log_probs"]
    assert len(calls) == {"qwen3_5": 1}.get(family, 2)  # a layer of linear attention has none
    torch.testing.assert_close(flex, dense, rtol=0, atol=1e-9)
