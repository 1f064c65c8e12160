"""Token log-probabilities and sampled responses of small random models of two families."""

import copy
import itertools
import sys
from dataclasses import replace

import pytest
import small_vlm
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from user_errors import raises_user_error

from flow_grpo.data.chats import Turn
from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import sample_generators
from flow_grpo.errors import UserError
from flow_grpo.vlm.decoding import sample_tokens
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import Response, concat_vision_inputs, micro_batches, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import EncodedPrompt, PromptEncoder
from flow_grpo.vlm.sampling import SampledTokens, Sampler

FAMILIES = ("qwen3_vl", "qwen2_5_vl")
ROWS = [0, 0, 1, 1, 1, 2, 2]  # questions of the samples below


@pytest.fixture(scope="module", params=FAMILIES)
def network(request) -> PolicyModel:
    return PolicyModel(small_vlm.build(request.param), temperature=0.9)


@pytest.fixture(scope="module")
def prompts(network, tmp_path_factory) -> list[EncodedPrompt]:
    encoder = small_vlm.encoder(network.model)
    return [encoder.encode(q) for q in small_vlm.questions(tmp_path_factory.mktemp("questions"))]


def sample(network, prompts, rows=ROWS, index=None, **settings) -> SampledTokens:
    index = list(range(len(rows))) if index is None else index
    settings = {"max_new_tokens": 24, "stop": [small_vlm.EOS], "pad": small_vlm.PAD, **settings}
    generators = settings.pop("generators", sample_generators(1, 2, index))
    return Sampler(network, **settings).sample(prompts, rows, generators)


@pytest.fixture(scope="module")
def sampled(network, prompts) -> SampledTokens:
    return sample(network, prompts)


def as_responses(prompts, sampled: SampledTokens, rows=ROWS) -> list[Response]:
    return [Response(r, prompts[r], t) for r, t in zip(rows, sampled.tokens, strict=True)]


def log_probs(network, responses: list[Response]) -> list[Tensor]:
    batch = pack_responses(responses, small_vlm.PAD)
    values = network(batch)["log_probs"]
    return [row[own] for row, own in zip(values, batch.mask, strict=True)]


def max_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_log_probs_of_decoding_and_training_agree(network, prompts, sampled):
    assert len({len(tokens) for tokens in sampled.tokens}) > 1  # unequal lengths
    with torch.no_grad():
        trained = log_probs(network, as_responses(prompts, sampled))
    assert max_difference(trained, sampled.log_probs) < 2e-6


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("use_lora", [False, True])
def test_recomputed_old_log_probs_equal_those_of_training(
    network, prompts, sampled, use_lora, recomputes
):
    """Rows contain several responses; also with gradient checkpointing."""
    policy = VlmPolicy(
        copy.deepcopy(network.model),
        processors=[],
        use_lora=use_lora,
        rank=4,
        freeze_vision=False,
        temperature=network.temperature,
        gradient_checkpointing=recomputes,
    )
    batch = pack_responses(as_responses(prompts, sampled), small_vlm.PAD)
    assert batch.row.tolist() == ROWS  # rows of 2, 3 and 2 responses
    old = policy.forward_tokens_no_grad(batch)["log_probs"]
    new = policy.forward_tokens(batch)["log_probs"]
    assert torch.equal(old, new)
    assert new.requires_grad
    assert max_difference([old[batch.mask]], [torch.cat(sampled.log_probs)]) < 2e-6


@pytest.mark.parametrize("freeze_vision", [False, True])
@pytest.mark.parametrize("use_lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_equals_the_initial_policy(
    network, prompts, sampled, dtype, use_lora, freeze_vision
):
    policy = VlmPolicy(
        copy.deepcopy(network.model).to(dtype),
        processors=[],
        use_lora=use_lora,
        rank=4,
        freeze_vision=freeze_vision,
        with_reference=True,
        compute_dtype=None if dtype == torch.float32 else dtype,
    )
    batch = pack_responses(as_responses(prompts, sampled), small_vlm.PAD)
    start = policy.reference_log_probs(batch)
    assert torch.equal(start, policy.forward_tokens(batch)["log_probs"])
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01
    assert torch.equal(policy.reference_log_probs(batch), start)
    assert not torch.allclose(policy.forward_tokens(batch)["log_probs"], start, atol=1e-3)


def test_training_has_no_kv_cache(network, prompts, sampled):
    kept = []
    hook = network.model.model.register_forward_hook(
        lambda _, __, out: kept.append(out.past_key_values)
    )
    network(pack_responses(as_responses(prompts, sampled), small_vlm.PAD))
    hook.remove()
    assert kept == [None]


def test_batching_does_not_change_log_probs_or_samples(network, prompts, sampled):
    """Prompts with zero, one and two images and several responses each."""
    rows = as_responses(prompts, sampled)
    assert [len(rows[i].prompt.sources) for i in (0, 2, 5)] == [0, 1, 2]
    with torch.no_grad():
        together = log_probs(network, rows)
        alone = [log_probs(network, [row])[0] for row in rows]
    assert max_difference(together, alone) < 1e-5
    for i, row in enumerate(ROWS):
        own = sample(network, prompts[row : row + 1], [0], [i])
        assert torch.equal(own.tokens[0], sampled.tokens[i])
        assert max_difference(own.log_probs, sampled.log_probs[i : i + 1]) < 1e-5


def test_log_probs_equal_those_of_transformers(network, prompts, sampled):
    """One unpadded row, with the position ids and causal mask of transformers."""
    for response in as_responses(prompts, sampled):
        prompt = response.prompt
        ids = torch.cat([prompt.ids, response.tokens])[None]
        extra = concat_vision_inputs(prompt.vision_inputs)
        if extra:
            extra["mm_token_type_ids"] = (ids == small_vlm.IMAGE).int()
        with torch.no_grad():
            network.model.model.rope_deltas = None
            logits = network.model(input_ids=ids, **extra).logits[0, len(prompt) - 1 : -1]
            logits = logits / network.temperature
            logits[:, network.banned_token_ids] = -torch.inf
            expected = logits.log_softmax(-1).gather(-1, response.tokens[:, None])[:, 0]
            ours = log_probs(network, [response])[0]
        assert float((ours - expected).abs().max()) < 2e-6


def test_values_are_computed_at_the_positions_that_predict_the_tokens(network, prompts, sampled):
    valued = PolicyModel(network.model, with_value=True)
    valued.value.weight.data = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    rows = as_responses(prompts, sampled)
    batch = pack_responses(rows, small_vlm.PAD)
    values = valued(batch)["values"]
    for response, own, mask in zip(rows[:2], values, batch.mask, strict=False):  # no images
        ids = torch.cat([response.prompt.ids, response.tokens])[None]
        hidden = network.model.model(input_ids=ids).last_hidden_state[0]
        expected = valued.value(hidden[len(response.prompt) - 1 : -1])[:, 0]
        assert torch.allclose(own[mask], expected, atol=1e-4)
    values.sum().backward()  # the gradient reaches the model too
    assert next(network.model.model.language_model.layers.parameters()).grad.abs().max() > 0
    network.zero_grad()


def test_images_change_log_probs(network, prompts, sampled):
    """Otherwise the tests above would pass for a model that ignores images."""
    own = as_responses(prompts, sampled)[2]
    inverted_images = [
        {**image, "pixel_values": -image["pixel_values"]} for image in own.prompt.vision_inputs
    ]
    other = replace(own.prompt, vision_inputs=inverted_images)
    with torch.no_grad():
        original, inverted = (
            log_probs(network, [Response(0, p, own.tokens)]) for p in (own.prompt, other)
        )
    assert max_difference(original, inverted) > 1e-3


@pytest.fixture
def image_counts(network, monkeypatch) -> list[int]:
    """Number of images in each forward pass of the tower."""
    counts, tower = [], network.model.model.visual
    forward = tower.forward

    def counted(pixels, grid_thw, **kwargs):
        counts.append(len(grid_thw))
        return forward(pixels, grid_thw=grid_thw, **kwargs)

    monkeypatch.setattr(tower, "forward", counted)
    return counts


def test_tower_processes_each_image_once_per_group(network, prompts, sampled, image_counts):
    with torch.no_grad():
        log_probs(network, as_responses(prompts, sampled))
        sample(network, prompts, max_new_tokens=3)
    assert image_counts == [3, 3]  # one image of the second question, two of the third


def test_tower_processes_an_image_of_several_questions_once(network, tmp_path, image_counts):
    """Images are files and bytes; the second question contains one image twice."""
    encoder = small_vlm.encoder(network.model)
    _, one, two = small_vlm.questions(tmp_path)
    small, large = two.images[0].read_bytes(), one.images[0]
    questions = [
        replace(two, images=(large, small)),
        replace(two, images=(small, small)),
        replace(one, text="How few?", images=(large,)),
    ]
    prompts = [encoder.encode(question) for question in questions]
    together = sample(network, prompts, [0, 1, 1, 2])
    rows = as_responses(prompts, together, [0, 1, 1, 2])
    (trained := torch.cat(log_probs(network, rows))).sum().backward()
    assert image_counts == [2, 2]
    weight = next(network.model.model.visual.parameters())
    gradient = weight.grad.clone()
    network.zero_grad()

    # treat all occurrences as distinct images
    numbers = itertools.count()
    prompts = [replace(p, sources=tuple(next(numbers) for _ in p.sources)) for p in prompts]
    alone = sample(network, prompts, [0, 1, 1, 2])
    rows = as_responses(prompts, alone, [0, 1, 1, 2])
    (expected := torch.cat(log_probs(network, rows))).sum().backward()
    assert image_counts == [2, 2, 5, 5]
    for ours, theirs in zip(together.tokens, alone.tokens, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.allclose(trained, expected, atol=1e-5)
    assert torch.allclose(gradient, weight.grad, rtol=1e-3, atol=1e-4)
    assert weight.grad.abs().max() > 0
    network.zero_grad()


def test_batch_size_does_not_change_sampled_tokens(network, prompts, sampled):
    for part in ([0], [1, 2], [3, 4, 5, 6]):
        rows = [ROWS[i] for i in part]
        own = sample(network, prompts, rows, part)
        for i, tokens in zip(part, own.tokens, strict=True):
            assert torch.equal(tokens, sampled.tokens[i])
    other = sample(network, prompts, index=[i + 100 for i in range(len(ROWS))])
    assert any(not torch.equal(a, b) for a, b in zip(other.tokens, sampled.tokens, strict=True))


def test_responses_end_at_a_stop_token_or_are_truncated(network, prompts, sampled):
    longer = sample(network, prompts, rows=[0] * 64, max_new_tokens=40)
    assert {True, False} == set(longer.ended)
    for tokens, ended in zip(longer.tokens, longer.ended, strict=True):
        stops = (tokens == small_vlm.EOS).nonzero()[:, 0].tolist()
        assert stops == ([len(tokens) - 1] if ended else [])
        assert ended or len(tokens) == 40


def test_greedy_decoding_selects_the_most_likely_token(network, prompts):
    greedy = sample(network, prompts, [0, 1, 2], generators=None, max_new_tokens=6)
    response = Response(1, prompts[1], greedy.tokens[1])
    batch = pack_responses([response], small_vlm.PAD)
    with torch.no_grad():
        hidden = network.hidden_states(batch.inputs)[0, batch.column[0]]
        assert torch.equal(network.log_probs(hidden).argmax(-1), response.tokens)


def test_banned_tokens_are_never_sampled(network, prompts, monkeypatch):
    """Sample 1e5 tokens from a model that prefers banned tokens: for any hidden state, one of them
    has by far the largest logit.
    """
    head = torch.nn.Linear(32, small_vlm.VOCABULARY, bias=False)
    head.weight.data = network.model.lm_head.weight.data.clone()
    towards = torch.randn(32, generator=torch.Generator().manual_seed(0))
    head.weight.data[network.banned_token_ids] = torch.stack([towards, -towards] * 2) * 1000
    monkeypatch.setitem(network.model._modules, "lm_head", head)
    settings = {"max_new_tokens": 40, "stop": [-1]}  # no response ends early
    drawn = sample(network, prompts[1:2], [0] * 2500, **settings)
    greedy = sample(network, prompts[1:2], [0], generators=None, **settings)
    assert len(torch.cat(drawn.tokens)) == 100_000
    for tokens in (torch.cat(drawn.tokens), *greedy.tokens):
        assert not set(network.banned_token_ids) & set(tokens.tolist())
    assert torch.cat(drawn.log_probs).isfinite().all()
    monkeypatch.setattr(network, "banned_token_ids", [])  # the model does prefer them
    free = sample(network, prompts[1:2], [0] * 4, **settings)
    assert all(set(tokens.tolist()) <= {3, 4, 5, 6} for tokens in free.tokens)


def test_extreme_draws_never_select_a_token_with_probability_zero():
    scores = torch.tensor([[-torch.inf, 0.25, 0.75, -torch.inf]]).log()
    scores[:, 0] = scores[:, 3] = -torch.inf
    for draw, token in [(0.0, 1), (0.2499, 1), (0.2501, 2), (1.0, 2)]:
        assert sample_tokens(scores, torch.tensor([draw], dtype=torch.float64)).tolist() == [token]


def test_chunked_log_probs_equal_unchunked_ones(network, prompts, sampled, monkeypatch):
    rows = as_responses(prompts, sampled)
    whole = torch.cat(log_probs(network, rows))
    whole.sum().backward()
    weight = network.model.lm_head.weight
    gradient, weight.grad = weight.grad.clone(), None
    monkeypatch.setattr("flow_grpo.vlm.network.MAX_CHUNK_LOGITS", 10 * small_vlm.VOCABULARY)
    parts = torch.cat(log_probs(network, rows))
    parts.sum().backward()
    in_parts = weight.grad.clone()
    network.zero_grad()
    assert torch.allclose(whole, parts, atol=1e-6)
    assert torch.allclose(gradient, in_parts, atol=1e-4)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_frozen_head_gives_the_same_gradient_with_fewer_products(dtype, given, monkeypatch):
    """Logits are computed once per chunk instead of twice.

    The first token is a banned one, which has a probability only if the responses are given.
    """
    compute = torch.bfloat16 if dtype == torch.bfloat16 else None
    model = small_vlm.build().to(torch.float32 if compute else dtype)
    network = PolicyModel(model, temperature=0.7, compute_dtype=compute)
    generator = torch.Generator().manual_seed(0)
    width, head = model.config.get_text_config().hidden_size, model.lm_head.weight
    hidden = torch.randn(25, width, generator=generator).to(head.dtype)
    tokens = torch.randint(small_vlm.VOCABULARY, (25,), generator=generator)
    tokens[0] = network.banned_token_ids[0]
    scale = torch.randn(25, generator=generator, dtype=torch.float64)
    scale[0] = 1.0 if given else 0.0  # the log-probability is -inf
    monkeypatch.setattr("flow_grpo.vlm.network.MAX_CHUNK_LOGITS", 10 * small_vlm.VOCABULARY)
    calls, logits = [], network._logits
    monkeypatch.setattr(network, "_logits", lambda x: calls.append(len(x)) or logits(x))
    results = []
    for trained in (False, True):
        head.requires_grad_(trained)
        states = hidden.clone().requires_grad_()
        scores = network.token_scores(states, tokens, given=given)
        kept = slice(None) if given else slice(1, None)
        (scores["log_probs"][kept] * scale[kept].to(scores["log_probs"])).sum().backward()
        assert ("is_top1" in scores) == given
        results.append((scores, states.grad))
    # the backward pass of the trained head computes logits again, in reverse order
    assert calls == [10, 10, 5, 10, 10, 5, 5, 10, 10]
    (scores, gradient), (expected_scores, expected) = results
    for name, column in expected_scores.items():
        assert torch.equal(scores[name], column)
    limit = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    assert expected.norm() > 0.1
    assert (gradient - expected).norm() <= limit * expected.norm()


def test_micro_batches_respect_the_token_budget_and_the_order(prompts, sampled):
    rows = as_responses(prompts, sampled)
    slices = list(micro_batches(rows, budget=120))
    assert [i for part in slices for i in range(len(rows))[part]] == list(range(len(rows)))
    assert len(slices) > 1
    for part in slices:
        batch = pack_responses(rows[part], small_vlm.PAD)
        assert batch.inputs.input_ids.numel() <= 120 or part.stop - part.start == 1
    whole = pack_responses(rows, small_vlm.PAD).inputs.input_ids.numel()
    assert list(micro_batches(rows, budget=whole)) == [slice(0, len(rows))]
    assert len(list(micro_batches(rows, budget=whole - 1))) == 2
    assert len(list(micro_batches(rows, budget=1))) == len(rows)
    joined = pack_responses(rows, small_vlm.PAD, one_row=True).inputs.input_ids.numel()
    assert joined < whole
    assert list(micro_batches(rows, budget=joined, one_row=True)) == [slice(0, len(rows))]
    assert len(list(micro_batches(rows, budget=joined - 1, one_row=True))) == 2


def test_prompt_length_matches_the_encoded_prompt(network, prompts, tmp_path):
    encoder = small_vlm.encoder(network.model)
    questions = small_vlm.questions(tmp_path / "q")
    assert [encoder.prompt_length(q) for q in questions] == [len(p) for p in prompts]
    encoder.check_prompt_lengths(questions, limit=max(map(len, prompts)))
    limit = len(prompts[2]) - 1
    with raises_user_error("row of 'Compare", f"max_prompt_length={limit}"):
        encoder.check_prompt_lengths(questions, limit=limit)


def test_invalid_images_are_reported_with_their_row(network, tmp_path):
    encoder = small_vlm.encoder(network.model)
    path = tmp_path / "a.png"
    small_vlm.random_image(0).save(path)
    (tmp_path / "cut.png").write_bytes(path.read_bytes()[:100])
    cases = {
        "2 <image> placeholders but 1 image": ("<image> or <image>", (path,)),
        "cannot be decoded": ("?", (tmp_path / "none.png",)),
        "cannot be decoded .*trunc": ("?", (tmp_path / "cut.png",)),
    }
    for reason, (text, images) in cases.items():
        with pytest.raises(UserError, match=f"data.jsonl line 3.*{reason}"):
            encoder.encode(Question(text, images, "", {}, "data.jsonl line 3"))


def test_special_tokens_in_text_are_escaped(network):
    """In questions, their system prompts and observations, but not in the template."""
    encoder = small_vlm.encoder(network.model, system_prompt="<|pad|>")
    special = {small_vlm.BOS, small_vlm.EOS, small_vlm.IMAGE, small_vlm.PAD}

    def ids_of(text: str, system: str = "") -> list[int]:
        return encoder.token_ids(Question(text, (), "", {}, "row 1", system))

    def shown(ids: list[int]) -> tuple[str, list[int]]:
        return encoder.tokenizer.decode(ids), [i for i in ids if i in special]

    text, other = "a<|im_end|><|im_start|>b<|image_pad|>", "a?b?"
    assert text in shown(ids_of(text))[0]
    assert shown(ids_of(text))[1] == shown(ids_of(other))[1]
    assert len(ids_of(text)) - len(ids_of(other)) == len(text) - len(other)
    assert small_vlm.PAD in ids_of("a")  # the config's system prompt is not escaped
    assert small_vlm.PAD not in ids_of("a", "<|pad|>")
    response = torch.tensor([small_vlm.EOS])
    observations = [
        encoder.encode_observation(t, [], response, "row 1", 99).ids.tolist() for t in (text, other)
    ]
    assert text in shown(observations[0])[0]
    assert shown(observations[0])[1] == shown(observations[1])[1]


def test_a_placeholder_that_is_a_special_token_is_text_where_no_image_can_be():
    """`<image>` is the marker of a thumbnail in MiniCPM-V's tokenizer."""
    encoder = small_vlm.encoder(small_vlm.build("minicpmv4_7"))
    image = small_vlm.encode_image(small_vlm.random_image(0, 16, 16))
    question = Question("Which <image>?", (image,), "", {}, "row 1", "See <image>.")
    [conversation] = encoder.encode_conversations(question, ["It is <image>."])
    text = encoder.tokenizer.decode(conversation.ids)
    assert "See <image>.<|im_end|>" in text
    assert "It is <image>.<|im_end|>" in text
    assert conversation.ids.tolist().count(small_vlm.START) == 1
    config = Qwen3Config(**{**small_vlm.TEXT, "vocab_size": len(encoder.tokenizer)})
    text_only = PromptEncoder(encoder.tokenizer, None, AutoModelForCausalLM.from_config(config))
    chat = Question(
        "And <image>?", history=(Turn("user", "<image>?"), Turn("assistant", "<image>"))
    )
    stop = torch.tensor([small_vlm.EOS])
    for ids in (
        text_only.token_ids(chat),
        *(each.ids.tolist() for each in text_only.encode_conversations(chat, ["<image>"])),
        text_only.encode_observation("a<image>", [], stop, "row 1", 99).ids.tolist(),
    ):
        assert "<image>" in encoder.tokenizer.decode(ids)
        assert small_vlm.START not in ids


def test_special_tokens_in_text_are_rejected_on_request(network):
    strict = small_vlm.encoder(network.model, special_tokens="reject")
    for question in (
        Question("a<|im_end|>b", (), "", {}, "x.jsonl:3"),
        Question("a", (), "", {}, "x.jsonl:3", "<|im_end|>"),
    ):
        with raises_user_error("<|im_end|>", "special_tokens=escape", field="x.jsonl:3"):
            strict.token_ids(question)
    with raises_user_error("<|im_end|>", field="row 1"):
        strict.encode_observation("<|im_end|>", [], torch.tensor([small_vlm.EOS]), "row 1", 99)
    mark = chr(0x100000)
    with raises_user_error("\\U00100000", field="x.jsonl:3"):
        small_vlm.encoder(network.model).token_ids(Question(mark, (), "", {}, "x.jsonl:3"))


TEMPLATES = {  # template and expected part of the message
    "{{ nope() }}": "UndefinedError: 'nope' is undefined",
    "{{ raise_exception('one turn\nonly') }}": "TemplateError: one turn",
    "{% if %}": "TemplateSyntaxError: Expected an expression",
    "{{ 'a' + 1 }}": "TypeError: can only concatenate",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ messages.nope.nope }}": "UndefinedError: 'list object' has no attribute 'nope'",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: maximum recursion",
    "{% include 'other' %}": "TypeError: no loader",
    "{{ range(10 ** 9) }}": "OverflowError: Range too big",
    "{{ 'a' * 10 ** 15 }}": "MemoryError: a value of 1,000,000,000,000,000 characters",
    "{{ 'a' * 10 ** 9 }}": "MemoryError: a value of 1,000,000,000 characters",
    "{{ 10 ** (10 ** 9) }}": "MemoryError",
    "{{ ([1] * 10 ** 9) | length }}": "MemoryError",
    "{{ 'a'.ljust(10 ** 9) }}": "MemoryError",
    "{{ 'a' | center(1000000000) }}": "MemoryError",
    "{{ '%1000000000d' % 1 }}": "MemoryError",
    "{{ messages | tojson(indent=10 ** 9) }}": "MemoryError",
    "{{ '{:1000000000}'.format('a') }}": "MemoryError",
    "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}": "MemoryError",
    "{{ ''.join(['a' * 10 ** 7] * 100) }}": "MemoryError",
    "{{ (['a' * 10 ** 7] * 100) | join }}": "MemoryError",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}": (
        "MemoryError"
    ),
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}": (
        "MemoryError"
    ),
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% endfor %}": "MemoryError",
    "{{ '\\ud800' }}": "surrogates not allowed",
    "{% for i in range(9 ** 5) %}{% for j in range(9 ** 5) %}{% endfor %}{% endfor %}": (
        "TimeoutError"
    ),
    "{% for i in range(9 ** 5) %}{{ range(9 ** 5) | map('int') | list | length }}{% endfor %}": (
        "200,000 steps"
    ),
}


@pytest.mark.parametrize(("template", "reason"), TEMPLATES.items(), ids=range(len(TEMPLATES)))
def test_a_chat_template_that_fails_or_never_ends_is_reported(template, reason, monkeypatch):
    monkeypatch.setattr("flow_grpo.chat_templates.MAX_TEMPLATE_STEPS", 200_000)
    encoder = small_vlm.encoder(small_vlm.build("qwen3_vl"))
    encoder.tokenizer.chat_template = template
    before = sys.gettrace()
    with raises_user_error(reason, "data.jsonl line 3"):
        encoder.check_prompt_lengths([Question("?", (), "", {}, "data.jsonl line 3")], limit=99)
    assert sys.gettrace() is before


def test_a_chat_template_that_renders_nothing_is_rejected():
    encoder = small_vlm.encoder(small_vlm.build())
    encoder.tokenizer.chat_template = "{% if false %}never{% endif %}"
    with raises_user_error("chat template", "a.jsonl:1"):
        encoder.encode(Question("What?", where="a.jsonl:1"))


def test_a_token_without_an_embedding_is_rejected():
    """With the tokenizer of another model, the embedding would raise an IndexError."""
    model = small_vlm.build()
    question = Question("What?", where="a.jsonl:1")
    most = max(small_vlm.encoder(model).token_ids(question))
    model.resize_token_embeddings(most)
    with raises_user_error(f"token id {most}", "a.jsonl:1", f"{most} token embeddings"):
        small_vlm.encoder(model).token_ids(question)
