"""The steps of sampling: slots of fixed size, as CUDA graphs need them; how tokens are chosen."""

import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import small_vlm
import torch
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.answer import attention, sampling
from flow_grpo.answer.attention import one_query, rotary_files
from flow_grpo.answer.batches import Answer, packed
from flow_grpo.answer.decoding import CHUNK, COLUMNS, Joint, Slots, can_record, choose
from flow_grpo.answer.network import AnswerModel, WideProduct, fuse_norms
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.sampling import Sampler
from flow_grpo.data.seeding import sample_generators
from flow_grpo.speed.lora import lora_layers, without_lora

SETTINGS = {"max_new_tokens": 24, "stop": [small_vlm.EOS, *range(20, 26)], "pad": small_vlm.PAD}
ROWS = [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.fixture(scope="module", params=("qwen3_vl", "qwen2_5_vl"))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def prompts(family, tmp_path_factory):
    encoder = small_vlm.encoder(small_vlm.build(family))
    return [encoder.encode(q) for q in small_vlm.questions(tmp_path_factory.mktemp("questions"))]


def test_slots_in_powers_of_two_and_rounded_columns_sample_the_same(family, prompts, monkeypatch):
    """What a GPU does, step by step on the CPU."""
    monkeypatch.setattr(sampling, "Graphs", lambda step: step)
    network = AnswerModel(small_vlm.build(family))
    one = Sampler(network, **SETTINGS).sample(prompts, ROWS, generators(ROWS))
    sampler = Sampler(network, **SETTINGS)
    sampler.graphed = True
    two = sampler.sample(prompts, ROWS, generators(ROWS))
    assert len({len(tokens) for tokens in one.tokens}) > 3
    fewer = sampler.sample(prompts[:2], ROWS[:4], generators(ROWS)[:4])  # in the same slots
    assert sampler.slots.rows == len(ROWS)
    assert sampler.slots.columns == 256
    assert one.ended == two.ended
    assert fewer.ended == one.ended[:4]
    for other in (two, fewer):
        for i, (tokens, log_probs) in enumerate(zip(other.tokens, other.log_probs, strict=True)):
            assert torch.equal(tokens, one.tokens[i])
            torch.testing.assert_close(log_probs, one.log_probs[i], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "graphed"), [("qwen2_5_vl", False), ("qwen3_5", True)])
def test_answers_in_slots_that_others_left_are_those_that_have_their_own(
    name, graphed, tmp_path, monkeypatch
):
    """In three slots, greedy ones among others; with states beside keys and values, and slots of
    the sizes that a GPU has, too. No batch waits for the last answer of the one before."""
    monkeypatch.setattr(sampling, "Graphs", lambda step: step)
    network = AnswerModel(small_vlm.build(name))
    encoder = small_vlm.encoder(network.model)
    asked = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    rows = [0, 1, 2, 1, 0, 2, 2, 2, 0, 0, 0, 1, 2, 1, 0, 1, 1, 2]
    drawn = generators(rows)
    batches = [(asked, rows[i : i + 3], drawn[i : i + 3]) for i in range(0, 18, 3)]
    batches.insert(2, (asked[:2], [1, 0], None))
    sampler = Sampler(network, **SETTINGS)
    sampler.graphed = graphed
    taken, take = [], sampler.plain.take

    def watched(*step, greedy: bool) -> None:
        taken.append(step)
        take(*step, greedy=greedy)

    monkeypatch.setattr(sampler.plain, "take", watched)
    together = list(sampler.stream(batches))
    assert sampler.slots.rows == 3
    lengths = [[len(tokens) for tokens in sampled.tokens] for sampled in together]
    assert len(taken) < 0.8 * sum(max(own) - 1 for own in lengths)

    greedy = together.pop(2)
    alone = Sampler(network, **SETTINGS)
    for these, own in (
        ([greedy], alone.sample(asked, [1, 0])),
        (together, alone.sample(asked, rows, generators(rows))),
    ):
        assert [ended for sampled in these for ended in sampled.ended] == own.ended
        answers = [
            pair
            for sampled in these
            for pair in zip(sampled.tokens, sampled.log_probs, strict=True)
        ]
        for (tokens, log_probs), *expected in zip(answers, own.tokens, own.log_probs, strict=True):
            assert torch.equal(tokens, expected[0])
            torch.testing.assert_close(log_probs, expected[1], rtol=0, atol=1e-5)
    assert {True, False} == set(own.ended)


def test_a_batch_with_longer_prompts_waits_for_larger_slots(prompts, family):
    network = AnswerModel(small_vlm.build(family))
    sampler = Sampler(network, **SETTINGS)
    first = prompts[0]
    longer = replace(first, ids=first.ids.repeat(16), positions=torch.arange(16 * len(first))[None])
    longer = replace(longer, positions=longer.positions.expand(3, -1), following=len(longer))
    batches = [([prompts[0]], [0, 0], None), ([longer, first], [0, 1], None)]
    one, two = sampler.stream(batches)
    assert sampler.slots.columns == 512
    assert torch.equal(two.tokens[1], one.tokens[0])
    alone = Sampler(network, **SETTINGS).sample([longer], [0])
    assert torch.equal(two.tokens[0], alone.tokens[0])


def test_slots_that_are_too_small_are_gone_before_there_are_larger_ones(
    family, prompts, monkeypatch
):
    """Two caches at a time could be more than a GPU has."""
    made = []

    class Watched(Slots):
        def __init__(self, *settings) -> None:
            assert all(before() is None for before in made)
            super().__init__(*settings)
            made.append(weakref.ref(self))

    monkeypatch.setattr(sampling, "Slots", Watched)
    sampler = Sampler(AnswerModel(small_vlm.build(family)), **SETTINGS)
    for count in (2, 4, 3, 9):
        sampler.sample(prompts, ROWS[-count:], generators(ROWS[-count:]))
    assert len(made) == 3
    sampler.steps += 2 * COLUMNS
    for count in (3, 9):  # more columns and fewer rows, then more rows
        sampler.sample(prompts, ROWS[-count:], generators(ROWS[-count:]))
    assert len(made) == 4


def generators(rows):
    return sample_generators(1, 2, list(range(len(rows))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_samples_with_merged_lora(family, prompts, dtype):
    model = small_vlm.build(family).to(dtype)
    policy = AnswerPolicy(model, parts=[], compute_dtype=torch.bfloat16)
    layers = lora_layers(policy.model)
    torch.manual_seed(0)
    for layer in layers:
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    sampled = Sampler(policy.network, **SETTINGS).sample(prompts, ROWS, generators(ROWS))
    answers = [Answer(r, prompts[r], t) for r, t in zip(ROWS, sampled.tokens, strict=True)]
    batch = packed(answers, small_vlm.PAD)
    old = torch.cat(sampled.log_probs)
    trained = policy.fixed_scores(batch)["log_probs"][batch.mask]
    with without_lora(layers):
        without = policy.fixed_scores(batch)["log_probs"][batch.mask]
    assert (old - trained).abs().mean() < 0.1 < 0.3 < (old - without).abs().mean()
    assert not any(layer.disable_adapters for layer in layers)


def test_siblings_are_one_product_in_half_precision(family, prompts, monkeypatch):
    """Siblings use the merged weights, and the model is as it was afterwards."""
    policy = AnswerPolicy(small_vlm.build(family), parts=[], compute_dtype=torch.bfloat16)
    for layer in lora_layers(policy.model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    sampler = Sampler(policy.network, **SETTINGS)
    joints, layers = sampler.plain.together, small_vlm.TEXT["num_hidden_layers"]
    assert len(joints) == 2 * layers
    held = {weight.data_ptr() for weight in sampler.plain.weights.values()}
    for joint in joints:
        assert {part.data_ptr() for part in joint.weight.split(joint.sizes)} <= held
        x = torch.randn(3, joint.weight.shape[1])
        for layer, part in zip(joint.siblings.layers, joint.product(x.bfloat16()), strict=True):
            expected = layer(x)
            assert (part - expected).norm() < 0.03 * expected.norm()
    products, product = [], Joint.product
    monkeypatch.setattr(Joint, "product", lambda *args: products.append(1) or product(*args))
    sampled = sampler.sample(prompts, ROWS, generators(ROWS))
    steps = max(map(len, sampled.tokens)) - 1
    assert 2 * layers * steps <= len(products) < 2 * layers * (steps + sampling.LOOK)
    assert not any("forward" in vars(module) for module in lora_layers(policy.model))


def test_lora_that_is_no_sum_is_sampled_from_too(family, prompts):
    """Such as one with dropout, which cannot be merged."""
    model = small_vlm.build(family)
    network = AnswerPolicy(model, parts=[], compute_dtype=torch.bfloat16).network
    for layer in lora_layers(network):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
        layer.lora_dropout["default"] = torch.nn.Dropout(0.1)
    sampler = Sampler(network, **SETTINGS)
    assert not sampler.plain.lora
    assert not sampler.plain.together
    with_it = sampler.sample(prompts, ROWS, generators(ROWS))
    with without_lora(lora_layers(network)):
        without = sampler.sample(prompts, ROWS, generators(ROWS))
    assert not all(map(torch.equal, with_it.tokens, without.tokens))


def test_what_a_step_changes_is_changed_back_when_it_fails(family, monkeypatch):
    monkeypatch.setattr(attention, "fused", partial)
    decoder = AnswerModel(small_vlm.build(family)).model.get_decoder()
    files, usual = rotary_files(decoder), decoder.config._attn_implementation
    assert files

    def fail() -> None:
        assert decoder.config._attn_implementation != usual
        assert {type(function) for function in rotary_files(decoder).values()} == {partial}
        raise InterruptedError

    with pytest.raises(InterruptedError), one_query(decoder, files):
        fail()
    assert decoder.config._attn_implementation == usual
    assert rotary_files(decoder) == files


def test_half_precision_keeps_the_cache_in_it_where_weights_are_in_float32(family, prompts):
    policy = AnswerPolicy(
        small_vlm.build(family).to(torch.bfloat16),
        parts=[],
        use_lora=False,
        compute_dtype=torch.bfloat16,
    )
    sampler = Sampler(policy.network, **SETTINGS)
    sampled = sampler.sample(prompts, ROWS, generators(ROWS))
    held = [each for pair in sampler.slots.cache.held.values() for each in pair]
    assert {each.dtype for each in held} == {torch.bfloat16}
    answers = [Answer(r, prompts[r], t) for r, t in zip(ROWS, sampled.tokens, strict=True)]
    batch = packed(answers, small_vlm.PAD)
    trained = policy.fixed_scores(batch)["log_probs"][batch.mask]
    assert (torch.cat(sampled.log_probs) - trained).abs().mean() < 0.1


def test_fused_norms_are_the_models_own(family):
    hidden = torch.randn(3, 5, small_vlm.TEXT["hidden_size"], dtype=torch.float64).float()
    model = small_vlm.build(family)
    norm = model.model.language_model.norm
    usual = norm(hidden)
    fuse_norms(model)
    torch.testing.assert_close(norm(hidden), usual, rtol=1e-5, atol=1e-6)
    assert norm(hidden.bfloat16()).dtype == torch.float32  # weights of another type: as before


def test_products_in_half_precision_are_not_rounded_to_it():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).bfloat16() for n in (3, 50))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    exact = x.detach().double() @ weight.detach().double().T
    product = WideProduct.apply(x, weight)
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-5)
    (product * torch.arange(50.0)).sum().backward()
    of_x = torch.arange(50.0, dtype=torch.float64) @ weight.detach().double()
    torch.testing.assert_close(x.grad.double(), of_x.expand(3, -1), rtol=2e-2, atol=0.5)
    of_weight = torch.arange(50.0, dtype=torch.float64)[:, None] * x.detach().double().sum(0)
    torch.testing.assert_close(weight.grad.double(), of_weight, rtol=2e-2, atol=0.5)


@given(
    vocabulary=st.integers(2, 3 * CHUNK),
    seed=st.integers(0, 2**32 - 1),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_chooses_the_token_at_which_probabilities_pass_it(vocabulary, seed, draw):
    rng = np.random.default_rng(seed)
    p = rng.random(vocabulary) * (rng.random(vocabulary) < 0.3)  # many have none
    p[rng.integers(vocabulary)] += 1
    p /= p.sum()
    with np.errstate(divide="ignore"):
        log_probs = torch.from_numpy(np.log(p))[None]
    token = int(choose(log_probs, torch.tensor([draw], dtype=torch.float64)))
    reached = np.cumsum(p)
    assert p[token] > 0
    assert reached[token] - p[token] <= draw + 1e-9
    assert reached[token] >= draw - 1e-9


def test_weights_that_are_no_numbers_sample_some_token():
    """The run says so when it has trained on them, in one line; a GPU would say it in a hundred."""
    for vocabulary in (50, 3 * CHUNK):
        log_probs = torch.full((2, vocabulary), torch.nan)
        tokens = choose(log_probs, torch.tensor([0.0, 0.999], dtype=torch.float64))
        assert ((tokens >= 0) & (tokens < vocabulary)).all()


def test_steps_with_experts_in_float32_are_not_recorded():
    model = small_vlm.build("qwen3_vl_moe")
    assert not can_record(model)
    assert can_record(model.to(torch.bfloat16))
    assert can_record(small_vlm.build("qwen3_5"))  # whose convolutions have three axes
