"""Decoding in fixed slots, as CUDA graphs require, and the choice of tokens."""

import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import small_vlm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from flow_grpo.data.seeding import sample_generators
from flow_grpo.perf import compile_utils
from flow_grpo.perf.lora import disable_lora, lora_layers
from flow_grpo.perf.quantization import Nf4Linear, quantize_linears
from flow_grpo.vlm import attention, fused_layer, sampling
from flow_grpo.vlm.attention import rotary_modules, single_query_attention
from flow_grpo.vlm.decoding import (
    COLUMN_MULTIPLE,
    CUMSUM_CHUNK,
    DecodingSlots,
    FusedProjection,
    can_capture_graphs,
    sample_tokens,
)
from flow_grpo.vlm.fused_layer import FusedDecoder
from flow_grpo.vlm.network import Float32OutputMatmul, PolicyModel, fuse_rms_norms
from flow_grpo.vlm.packing import Response, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import EncodedPrompt
from flow_grpo.vlm.sampling import Sampler

SETTINGS = {"max_new_tokens": 24, "stop": [small_vlm.EOS, *range(20, 26)], "pad": small_vlm.PAD}
VLMS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ROWS = [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.fixture(scope="module", params=("qwen3_vl", "qwen2_5_vl"))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def prompts(family, tmp_path_factory):
    encoder = small_vlm.encoder(small_vlm.build(family))
    return [encoder.encode(q) for q in small_vlm.questions(tmp_path_factory.mktemp("questions"))]


def test_shapes_of_cuda_graphs_do_not_change_samples(family, prompts, monkeypatch):
    """Run eager steps on the CPU with the rows and columns that graphs would have on a GPU."""
    monkeypatch.setattr(sampling, "DecodingGraphs", lambda step: step)
    network = PolicyModel(small_vlm.build(family))
    one = Sampler(network, **SETTINGS).sample(prompts, ROWS, generators(ROWS))
    sampler = Sampler(network, **SETTINGS)
    sampler.use_cuda_graphs = True
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
def test_reused_slots_do_not_change_samples(name, graphed, tmp_path, monkeypatch):
    """Sampled and greedy responses share three slots, with a key-value cache or recurrent states.

    The next batch starts before the last response of a batch has ended.
    """
    monkeypatch.setattr(sampling, "DecodingGraphs", lambda step: step)
    network = PolicyModel(small_vlm.build(name))
    encoder = small_vlm.encoder(network.model)
    prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    rows = [0, 1, 2, 1, 0, 2, 2, 2, 0, 0, 0, 1, 2, 1, 0, 1, 1, 2]
    drawn = generators(rows)
    batches = [(prompts, rows[i : i + 3], drawn[i : i + 3]) for i in range(0, 18, 3)]
    batches.insert(2, (prompts[:2], [1, 0], None))
    sampler = Sampler(network, **SETTINGS)
    sampler.use_cuda_graphs = graphed
    steps, run = [], sampler.eager_step.run

    def watched(*step, greedy: bool) -> None:
        steps.append(step)
        run(*step, greedy=greedy)

    monkeypatch.setattr(sampler.eager_step, "run", watched)
    together = list(sampler.sample_stream(batches))
    assert sampler.slots.rows == 3
    lengths = [[len(tokens) for tokens in sampled.tokens] for sampled in together]
    assert len(steps) < 0.8 * sum(max(own) - 1 for own in lengths)

    greedy = together.pop(2)
    alone = Sampler(network, **SETTINGS)
    for these, own in (
        ([greedy], alone.sample(prompts, [1, 0])),
        (together, alone.sample(prompts, rows, generators(rows))),
    ):
        assert [ended for sampled in these for ended in sampled.ended] == own.ended
        responses = [
            pair
            for sampled in these
            for pair in zip(sampled.tokens, sampled.log_probs, strict=True)
        ]
        for (tokens, log_probs), *expected in zip(
            responses, own.tokens, own.log_probs, strict=True
        ):
            assert torch.equal(tokens, expected[0])
            torch.testing.assert_close(log_probs, expected[1], rtol=0, atol=1e-5)
    assert {True, False} == set(own.ended)


def test_a_batch_with_longer_prompts_waits_for_larger_slots(prompts, family):
    network = PolicyModel(small_vlm.build(family))
    sampler = Sampler(network, **SETTINGS)
    first = prompts[0]
    longer = replace(first, ids=first.ids.repeat(16), positions=torch.arange(16 * len(first))[None])
    longer = replace(longer, positions=longer.positions.expand(3, -1), next_position=len(longer))
    batches = [([prompts[0]], [0, 0], None), ([longer, first], [0, 1], None)]
    one, two = sampler.sample_stream(batches)
    assert sampler.slots.columns == 512
    assert torch.equal(two.tokens[1], one.tokens[0])
    alone = Sampler(network, **SETTINGS).sample([longer], [0])
    assert torch.equal(two.tokens[0], alone.tokens[0])


def test_small_slots_are_freed_before_larger_ones_are_allocated(family, prompts, monkeypatch):
    """Both together might exceed the GPU's memory."""
    made = []

    class Watched(DecodingSlots):
        def __init__(self, *settings) -> None:
            assert all(before() is None for before in made)
            super().__init__(*settings)
            made.append(weakref.ref(self))

    monkeypatch.setattr(sampling, "DecodingSlots", Watched)
    sampler = Sampler(PolicyModel(small_vlm.build(family)), **SETTINGS)
    for count in (2, 4, 3, 9):
        sampler.sample(prompts, ROWS[-count:], generators(ROWS[-count:]))
    assert len(made) == 3
    sampler.steps += 2 * COLUMN_MULTIPLE
    for count in (3, 9):  # fewer rows but more columns, then more rows
        sampler.sample(prompts, ROWS[-count:], generators(ROWS[-count:]))
    assert len(made) == 4


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5"])
def test_as_many_slots_as_fit_in_memory(name, tmp_path, monkeypatch):
    """With fewer slots, the responses are the same, and both batches use the same slots."""
    network = PolicyModel(small_vlm.build(name))
    encoder = small_vlm.encoder(network.model)
    prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    expected = Sampler(network, **SETTINGS).sample(prompts, ROWS, generators(ROWS))
    sampler = Sampler(network, **SETTINGS)
    sampler.sample(prompts, ROWS, generators(ROWS))
    slots = sampler.slots
    tensors = [slots.draws, slots.tokens, slots.log_probs.double()]
    for stored in (slots.cache.keys_values, slots.cache.states):
        tensors += [tensor for pair in stored.values() for tensor in pair]
    size = sum(tensor[0].nbytes for tensor in tensors)

    for memory, rows in ((4.99 * size, 4), (0, 1)):
        available = memory / sampling.SLOT_FRACTION
        monkeypatch.setattr(sampling, "free_memory", lambda device, n=available: n)
        sampler = Sampler(network, **SETTINGS)
        batch = (prompts, ROWS, generators(ROWS))
        first, again = sampler.sample_stream([batch, (prompts, ROWS, generators(ROWS))])
        assert sampler.slots.rows == rows
        assert sampler.slots.columns == slots.columns
        for sampled in (first, again):
            for tokens, own in zip(sampled.tokens, expected.tokens, strict=True):
                assert torch.equal(tokens, own)


def generators(rows):
    return sample_generators(1, 2, list(range(len(rows))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_samples_with_merged_lora(family, prompts, dtype):
    model = small_vlm.build(family).to(dtype)
    policy = VlmPolicy(model, processors=[], compute_dtype=torch.bfloat16)
    layers = lora_layers(policy.model)
    torch.manual_seed(0)
    for layer in layers:
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    sampled = Sampler(policy.network, **SETTINGS).sample(prompts, ROWS, generators(ROWS))
    responses = [Response(r, prompts[r], t) for r, t in zip(ROWS, sampled.tokens, strict=True)]
    batch = pack_responses(responses, small_vlm.PAD)
    old = torch.cat(sampled.log_probs)
    trained = policy.forward_tokens_no_grad(batch)["log_probs"][batch.mask]
    with disable_lora(layers):
        without = policy.forward_tokens_no_grad(batch)["log_probs"][batch.mask]
    assert (old - trained).abs().mean() < 0.1 < 0.3 < (old - without).abs().mean()
    assert not any(layer.disable_adapters for layer in layers)


def test_sibling_projections_are_fused_in_half_precision(family, prompts, monkeypatch):
    """Fused projections use the merged weights, and the model is restored after sampling.

    They serve the layers that have no compiled form.
    """
    monkeypatch.setattr(fused_layer, "LAYER_CLASSES", set())
    policy = VlmPolicy(small_vlm.build(family), processors=[], compute_dtype=torch.bfloat16)
    for layer in lora_layers(policy.model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    sampler = Sampler(policy.network, **SETTINGS)
    fused, layers = sampler.eager_step.fused_projections, small_vlm.TEXT["num_hidden_layers"]
    assert len(fused) == 2 * layers
    stored = {weight.data_ptr() for weight in sampler.eager_step.weights.values()}
    for projection in fused:
        assert {part.data_ptr() for part in projection.weight.split(projection.sizes)} <= stored
        x = torch.randn(3, projection.weight.shape[1])
        for layer, part in zip(
            projection.siblings.layers, projection.product(x.bfloat16()), strict=True
        ):
            expected = layer(x)
            assert (part - expected).norm() < 0.03 * expected.norm()
    products, product = [], FusedProjection.product
    monkeypatch.setattr(
        FusedProjection, "product", lambda *args: products.append(1) or product(*args)
    )
    sampled = sampler.sample(prompts, ROWS, generators(ROWS))
    steps = max(map(len, sampled.tokens)) - 1
    assert 2 * layers * steps <= len(products) < 2 * layers * (steps + sampling.STEPS_PER_CHECK)
    assert not any("forward" in vars(module) for module in lora_layers(policy.model))


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, *VLMS])
def test_fused_decoder_layers_equal_those_of_transformers(kind):
    """Both decode the same tokens in float32, with LoRA, and layers are restored afterwards."""
    torch.manual_seed(0)
    if isinstance(kind, str):
        model = small_vlm.build(kind)
    else:
        config = kind.config_class(**small_vlm.TEXT)
        model = kind(config).eval()
    policy = VlmPolicy(model, processors=[])
    for layer in lora_layers(policy.model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    axes = policy.network.family.axes
    prompts = [
        EncodedPrompt(torch.arange(20, 20 + n), torch.arange(n).expand(axes, -1), n)
        for n in (3, 5, 9)
    ]
    theirs = Sampler(policy.network, **SETTINGS).sample(prompts, ROWS, generators(ROWS))
    sampler = Sampler(policy.network, **SETTINGS)
    decoder = policy.model.get_decoder()
    decoder.layers[0].forward = before = partial(decoder.layers[0].forward)  # as if compiled
    fused = sampler.eager_step.fused_decoder = FusedDecoder(decoder, torch.float32)
    assert len(fused.layers) == len(decoder.layers)
    ours = sampler.sample(prompts, ROWS, generators(ROWS))
    for i, tokens in enumerate(theirs.tokens):
        assert torch.equal(ours.tokens[i], tokens)
        torch.testing.assert_close(ours.log_probs[i], theirs.log_probs[i], rtol=0, atol=1e-4)
    assert decoder.layers[0].forward is before
    assert "forward" not in vars(decoder.layers[1])


def test_decoder_layers_that_are_not_fused():
    """Layers with other biases, and weights that need no copy."""
    config = LlamaForCausalLM.config_class(**small_vlm.TEXT, attention_bias=True)
    biased = VlmPolicy(LlamaForCausalLM(config), processors=[]).model.get_decoder()
    plain = LlamaForCausalLM(LlamaForCausalLM.config_class(**small_vlm.TEXT)).model
    assert not FusedDecoder(biased, torch.bfloat16).layers
    assert not FusedDecoder(plain, torch.float32).layers
    assert FusedDecoder(plain, torch.bfloat16).layers


def test_nf4_weights_are_dequantized_if_they_fit_in_memory(monkeypatch):
    """Decoding reads copies with LoRA merged instead of dequantizing them in every step."""
    config = LlamaForCausalLM.config_class(**small_vlm.TEXT)
    model = LlamaForCausalLM(config).eval()
    quantize_linears([model.model], "nf4", torch.device("cpu"))
    policy = VlmPolicy(model, processors=[], compute_dtype=torch.bfloat16)
    for layer in lora_layers(policy.model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    decoder = policy.model.get_decoder()
    quantized = [x for x in decoder.modules() if isinstance(x, Nf4Linear)]
    size = 2 * sum(x.in_features * x.out_features for x in quantized)
    fused = {}
    for free in (2 * size - 2, 2 * size):
        monkeypatch.setattr(fused_layer, "free_memory", lambda device, n=free: n)
        fused[free] = FusedDecoder(decoder, torch.bfloat16)
    less, enough = fused.values()
    assert not less.layers
    assert len(enough.layers) == len(decoder.layers)

    for layer, (weights, _) in enough.layers.items():
        x = torch.randn(3, config.hidden_size)
        expected = layer.self_attn.q_proj(x)
        own = functional.linear(x, weights.qkv.float())[:, : expected.shape[1]]
        assert (own - expected).norm() < 0.03 * expected.norm()
        without = layer.self_attn.q_proj.base_layer(x)
        assert (own - without).norm() > 0.1 * expected.norm()


def test_compiled_training_shares_code_between_layers(monkeypatch):
    """Layers are equal functions to the compiler, and ratios are exactly 1."""
    monkeypatch.setattr(compile_utils, "missing_compile_dependency", str)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    outputs = []
    for is_compiled in (False, True):
        model = small_vlm.build("qwen2_5_vl").to(torch.bfloat16)
        settings = {"compute_dtype": torch.bfloat16, "compiled": is_compiled}
        policy = VlmPolicy(model, processors=[], **settings)
        prompt = EncodedPrompt(torch.arange(20, 25), torch.arange(5).expand(3, -1), 5)
        responses = [Response(0, prompt, torch.arange(20, 20 + n)) for n in (3, 5)]
        batch = pack_responses(responses, small_vlm.PAD)
        log_probs = policy.forward_tokens(batch)["log_probs"]
        log_probs.sum().backward()
        old = policy.forward_tokens_no_grad(batch)["log_probs"]
        assert torch.equal(old, log_probs)
        assert not old.requires_grad
        outputs.append([log_probs.detach(), *(p.grad for p in policy.parameters())])
    assert counters["stats"]["unique_graphs"] == 1
    assert len(policy.model.get_decoder().layers) > 1
    assert all(map(torch.equal, *outputs))


def test_unmergeable_lora_is_applied_in_sampling(family, prompts):
    """LoRA with dropout cannot be merged."""
    model = small_vlm.build(family)
    network = VlmPolicy(model, processors=[], compute_dtype=torch.bfloat16).network
    for layer in lora_layers(network):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
        layer.lora_dropout["default"] = torch.nn.Dropout(0.1)
    sampler = Sampler(network, **SETTINGS)
    assert not sampler.eager_step.lora
    assert not sampler.eager_step.fused_projections
    with_it = sampler.sample(prompts, ROWS, generators(ROWS))
    with disable_lora(lora_layers(network)):
        without = sampler.sample(prompts, ROWS, generators(ROWS))
    assert not all(map(torch.equal, with_it.tokens, without.tokens))


def test_single_query_attention_is_restored_after_an_error(family, monkeypatch):
    monkeypatch.setattr(attention, "compile_once", partial)
    decoder = PolicyModel(small_vlm.build(family)).model.get_decoder()
    files, original = rotary_modules(decoder), decoder.config._attn_implementation
    assert files

    def fail() -> None:
        assert decoder.config._attn_implementation != original
        assert {type(function) for function in rotary_modules(decoder).values()} == {partial}
        raise InterruptedError

    with pytest.raises(InterruptedError), single_query_attention(decoder, files):
        fail()
    assert decoder.config._attn_implementation == original
    assert rotary_modules(decoder) == files


def test_cache_has_half_precision_even_if_weights_are_float32(family, prompts):
    policy = VlmPolicy(
        small_vlm.build(family).to(torch.bfloat16),
        processors=[],
        use_lora=False,
        compute_dtype=torch.bfloat16,
    )
    sampler = Sampler(policy.network, **SETTINGS)
    sampled = sampler.sample(prompts, ROWS, generators(ROWS))
    stored = [each for pair in sampler.slots.cache.keys_values.values() for each in pair]
    assert {each.dtype for each in stored} == {torch.bfloat16}
    responses = [Response(r, prompts[r], t) for r, t in zip(ROWS, sampled.tokens, strict=True)]
    batch = pack_responses(responses, small_vlm.PAD)
    trained = policy.forward_tokens_no_grad(batch)["log_probs"][batch.mask]
    assert (torch.cat(sampled.log_probs) - trained).abs().mean() < 0.1


def test_fused_rms_norms_equal_those_of_the_model(family):
    hidden = torch.randn(3, 5, small_vlm.TEXT["hidden_size"], dtype=torch.float64).float()
    model = small_vlm.build(family)
    norm = model.model.language_model.norm
    original = norm(hidden)
    fuse_rms_norms(model)
    torch.testing.assert_close(norm(hidden), original, rtol=1e-5, atol=1e-6)
    assert norm(hidden.bfloat16()).dtype == torch.float32  # other dtypes use the original


def test_half_precision_matmul_has_a_float32_result():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).bfloat16() for n in (3, 50))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    exact = x.detach().double() @ weight.detach().double().T
    product = Float32OutputMatmul.apply(x, weight)
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-5)
    (product * torch.arange(50.0)).sum().backward()
    of_x = torch.arange(50.0, dtype=torch.float64) @ weight.detach().double()
    torch.testing.assert_close(x.grad.double(), of_x.expand(3, -1), rtol=2e-2, atol=0.5)
    of_weight = torch.arange(50.0, dtype=torch.float64)[:, None] * x.detach().double().sum(0)
    torch.testing.assert_close(weight.grad.double(), of_weight, rtol=2e-2, atol=0.5)


@given(
    vocabulary=st.integers(2, 3 * CUMSUM_CHUNK),
    seed=st.integers(0, 2**32 - 1),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_selects_the_token_at_which_the_cdf_exceeds_it(vocabulary, seed, draw):
    rng = np.random.default_rng(seed)
    p = rng.random(vocabulary) * (rng.random(vocabulary) < 0.3)  # many are zero
    p[rng.integers(vocabulary)] += 1
    p /= p.sum()
    with np.errstate(divide="ignore"):
        log_probs = torch.from_numpy(np.log(p))[None]
    token = int(sample_tokens(log_probs, torch.tensor([draw], dtype=torch.float64)))
    reached = np.cumsum(p)
    assert p[token] > 0
    assert reached[token] - p[token] <= draw + 1e-9
    assert reached[token] >= draw - 1e-9


def test_nan_log_probs_yield_a_valid_token():
    """Training reports NaN in one line; an invalid index would be a device-side assert on a GPU."""
    for vocabulary in (50, 3 * CUMSUM_CHUNK):
        log_probs = torch.full((2, vocabulary), torch.nan)
        tokens = sample_tokens(log_probs, torch.tensor([0.0, 0.999], dtype=torch.float64))
        assert ((tokens >= 0) & (tokens < vocabulary)).all()


def test_graphs_are_not_captured_with_float32_experts():
    model = small_vlm.build("qwen3_vl_moe")
    assert not can_capture_graphs(model)
    assert can_capture_graphs(model.to(torch.bfloat16))
    assert can_capture_graphs(small_vlm.build("qwen3_5"))  # 3D weights, but no experts
