"""Sampling of VLMs on a GPU: CUDA graphs and slots give the same responses as eager decoding.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import pytest
import small_vlm
import torch
from benchmark_vlm import make_prompt
from untrained.vlm import build

from flow_grpo.data.seeding import sample_generators
from flow_grpo.perf.lora import lora_layers
from flow_grpo.vlm.packing import Response, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.sampling import Sampler

CUDA = torch.device("cuda")
ROWS = [i // 4 for i in range(16)]
STOP = list(range(0, 152000, 40))  # many, so that responses end at different steps


@pytest.mark.parametrize("use_lora", [True, False])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_graphs_sample_the_same_responses_as_eager_decoding(use_lora, compute_dtype):
    model = build("small", CUDA, compute_dtype or torch.float32)
    policy = VlmPolicy(model, processors=[], use_lora=use_lora, compute_dtype=compute_dtype)
    for layer in lora_layers(policy.model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    prompts = [make_prompt(model, 20 + 7 * i, 56, i) for i in range(4)]

    def sample(sampler: Sampler, count: int = len(ROWS)):
        generators = sample_generators(0, 0, list(range(count)))
        return sampler.sample(prompts, ROWS[:count], generators)

    settings = {"max_new_tokens": 300, "stop": STOP, "pad": 0}
    graphed = Sampler(policy.network, **settings)
    plain = sample(Sampler(policy.network, **settings, cuda_graphs=False))
    sample(graphed, 5)  # more responses need more slots, which are captured again
    for _ in range(2):  # captured, then replayed
        again = sample(graphed)
        assert all(map(torch.equal, plain.tokens, again.tokens))
        assert max(map(_furthest, plain.log_probs, again.log_probs)) < 1e-5
    assert len(graphed.step.graphs) > 2  # fewer slots as responses end
    fewer = sample(graphed, 5)
    assert all(map(torch.equal, plain.tokens, fewer.tokens))


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", small_vlm.FAMILIES)
def test_graphs_of_every_family_sample_the_same_responses(family, compute_dtype, tmp_path):
    """Also of families with experts or with recurrent states."""
    model = small_vlm.build(family).to(CUDA, compute_dtype or torch.float32)
    policy = VlmPolicy(model, processors=[], use_lora=False, compute_dtype=compute_dtype)
    encoder = small_vlm.encoder(model)
    prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    rows = [i // 4 for i in range(12)]
    settings = {"max_new_tokens": 60, "stop": [small_vlm.EOS], "pad": small_vlm.PAD}
    graphed = Sampler(policy.network, **settings)
    plain = Sampler(policy.network, **settings, cuda_graphs=False)
    for _ in range(2):  # captured, then replayed
        one, two = (
            sampler.sample(prompts, rows, sample_generators(0, 0, list(range(12))))
            for sampler in (plain, graphed)
        )
        assert all(map(torch.equal, one.tokens, two.tokens))
        assert max(map(_furthest, one.log_probs, two.log_probs)) < 1e-5
    responses = [Response(i, prompts[rows[i]], own) for i, own in enumerate(one.tokens)]
    batch = pack_responses(responses, small_vlm.PAD).to(CUDA)
    trained = policy.forward_tokens_no_grad(batch)["log_probs"].cpu()
    pairs = zip(trained, one.log_probs, strict=True)
    off = torch.cat([own[: len(sampled)] - sampled for own, sampled in pairs]).abs()
    print(f"{family} {compute_dtype}: off by {off.mean():.2g}, {off.max():.2g} at most")
    assert off.mean() < (1e-5 if compute_dtype is None else 0.05)


@pytest.mark.parametrize("family", small_vlm.FAMILIES)
def test_reused_slots_sample_the_same_responses(family, tmp_path):
    """With graphs, in four slots for 32 responses."""
    model = small_vlm.build(family).to(CUDA)
    network = VlmPolicy(model, processors=[], use_lora=False).network
    encoder = small_vlm.encoder(model)
    prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    rows = [i // 4 % 3 for i in range(32)]
    ends = [small_vlm.EOS, *range(20, 26)]
    settings = {"max_new_tokens": 60, "stop": ends, "pad": small_vlm.PAD}
    generators = sample_generators(0, 0, list(range(32)))
    separate = Sampler(network, **settings, cuda_graphs=False).sample(prompts, rows, generators)
    generators = sample_generators(0, 0, list(range(32)))
    batches = [(prompts, rows[i : i + 4], generators[i : i + 4]) for i in range(0, 32, 4)]
    graphed = Sampler(network, **settings)
    together = list(graphed.sample_stream(batches))
    assert graphed.slots.rows == 4
    tokens = [own for sampled in together for own in sampled.tokens]
    log_probs = [own for sampled in together for own in sampled.log_probs]
    assert all(map(torch.equal, separate.tokens, tokens))
    assert max(map(_furthest, separate.log_probs, log_probs)) < 1e-5


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_old_log_probs_equal_those_of_training(gradient_checkpointing):
    model = build("small", CUDA, torch.bfloat16)
    policy = VlmPolicy(
        model,
        processors=[],
        compute_dtype=torch.bfloat16,
        gradient_checkpointing=gradient_checkpointing,
    )
    prompt = make_prompt(model, 40, 56, 0)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(10, 1000, (50 + i,), generator=generator) for i in range(6)]
    batch = pack_responses([Response(0, prompt, own) for own in tokens], 0).to(CUDA)
    scores = policy.forward_tokens(batch)["log_probs"]
    assert scores.requires_grad
    assert torch.equal(policy.forward_tokens_no_grad(batch)["log_probs"], scores)


def _furthest(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max())
