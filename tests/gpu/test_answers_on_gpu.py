"""Models that answer on a GPU: steps of sampling as CUDA graphs give what plain steps give, and the
small model learns.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import pytest
import small_vlm
import torch
from benchmark_vlm import make_prompt
from untrained.answering import build

from flow_grpo.answer.batches import Answer, packed
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.sampling import Sampler
from flow_grpo.data.seeding import sample_generators
from flow_grpo.speed.lora import lora_layers

CUDA = torch.device("cuda")
ROWS = [i // 4 for i in range(16)]
STOP = list(range(0, 152000, 40))  # so many that answers end at unlike steps


@pytest.mark.parametrize("use_lora", [True, False])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_graphs_sample_what_plain_steps_do(use_lora, compute_dtype):
    model = build("small", CUDA, compute_dtype or torch.float32)
    policy = AnswerPolicy(model, parts=[], use_lora=use_lora, compute_dtype=compute_dtype)
    for layer in lora_layers(policy.model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    prompts = [make_prompt(model, 20 + 7 * i, 56, i) for i in range(4)]

    def answers(sampler: Sampler, count: int = len(ROWS)):
        drawn = sample_generators(0, 0, list(range(count)))
        return sampler.sample(prompts, ROWS[:count], drawn)

    settings = {"max_new_tokens": 300, "stop": STOP, "pad": 0}
    graphed = Sampler(policy.network, **settings)
    plain = answers(Sampler(policy.network, **settings, cuda_graphs=False))
    answers(graphed, 5)  # for more answers there have to be other slots, recorded anew
    for _ in range(2):  # recorded, and replayed
        again = answers(graphed)
        assert all(map(torch.equal, plain.tokens, again.tokens))
        assert max(map(_furthest, plain.log_probs, again.log_probs)) < 1e-5
    assert len(graphed.step.recorded) > 2  # fewer slots as answers end
    fewer = answers(graphed, 5)
    assert all(map(torch.equal, plain.tokens, fewer.tokens))


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", small_vlm.FAMILIES)
def test_graphs_of_every_family_sample_what_plain_steps_do(family, compute_dtype, tmp_path):
    """Also those with experts, and with states beside keys and values."""
    model = small_vlm.build(family).to(CUDA, compute_dtype or torch.float32)
    policy = AnswerPolicy(model, parts=[], use_lora=False, compute_dtype=compute_dtype)
    encoder = small_vlm.encoder(model)
    prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    rows = [i // 4 for i in range(12)]
    settings = {"max_new_tokens": 60, "stop": [small_vlm.EOS], "pad": small_vlm.PAD}
    graphed = Sampler(policy.network, **settings)
    plain = Sampler(policy.network, **settings, cuda_graphs=False)
    for _ in range(2):  # recorded, and replayed
        drawn = [sample_generators(0, 0, list(range(12))) for _ in range(2)]
        one, two = plain.sample(prompts, rows, drawn[0]), graphed.sample(prompts, rows, drawn[1])
        assert all(map(torch.equal, one.tokens, two.tokens))
        assert max(map(_furthest, one.log_probs, two.log_probs)) < 1e-5
    answers = [Answer(i, prompts[rows[i]], own) for i, own in enumerate(one.tokens)]
    batch = packed(answers, small_vlm.PAD).to(CUDA)
    trained = policy.fixed_scores(batch)["log_probs"].cpu()
    pairs = zip(trained, one.log_probs, strict=True)
    off = torch.cat([own[: len(sampled)] - sampled for own, sampled in pairs]).abs()
    print(f"{family} {compute_dtype}: off by {off.mean():.2g}, {off.max():.2g} at most")
    assert off.mean() < (1e-5 if compute_dtype is None else 0.05)


@pytest.mark.parametrize("family", small_vlm.FAMILIES)
def test_answers_in_slots_that_others_left_are_those_that_have_their_own(family, tmp_path):
    """With graphs, in four slots."""
    model = small_vlm.build(family).to(CUDA)
    network = AnswerPolicy(model, parts=[], use_lora=False).network
    encoder = small_vlm.encoder(model)
    prompts = [encoder.encode(question) for question in small_vlm.questions(tmp_path)]
    rows = [i // 4 % 3 for i in range(32)]
    ends = [small_vlm.EOS, *range(20, 26)]
    settings = {"max_new_tokens": 60, "stop": ends, "pad": small_vlm.PAD}
    drawn = sample_generators(0, 0, list(range(32)))
    alone = Sampler(network, **settings, cuda_graphs=False).sample(prompts, rows, drawn)
    drawn = sample_generators(0, 0, list(range(32)))
    batches = [(prompts, rows[i : i + 4], drawn[i : i + 4]) for i in range(0, 32, 4)]
    graphed = Sampler(network, **settings)
    together = list(graphed.stream(batches))
    assert graphed.slots.rows == 4
    tokens = [own for sampled in together for own in sampled.tokens]
    log_probs = [own for sampled in together for own in sampled.log_probs]
    assert all(map(torch.equal, alone.tokens, tokens))
    assert max(map(_furthest, alone.log_probs, log_probs)) < 1e-5


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_what_is_recomputed_is_what_training_computes(gradient_checkpointing):
    model = build("small", CUDA, torch.bfloat16)
    policy = AnswerPolicy(
        model,
        parts=[],
        compute_dtype=torch.bfloat16,
        gradient_checkpointing=gradient_checkpointing,
    )
    prompt = make_prompt(model, 40, 56, 0)
    drawn = torch.Generator().manual_seed(0)
    tokens = [torch.randint(10, 1000, (50 + i,), generator=drawn) for i in range(6)]
    batch = packed([Answer(0, prompt, own) for own in tokens], 0).to(CUDA)
    scores = policy.scores(batch)["log_probs"]
    assert scores.requires_grad
    assert torch.equal(policy.fixed_scores(batch)["log_probs"], scores)


def _furthest(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max())
