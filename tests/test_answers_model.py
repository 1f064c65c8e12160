"""Token log-probabilities and sampled answers of small random models of both families."""

import copy
import itertools
import sys
from dataclasses import replace

import pytest
import small_vlm
import torch
from torch import Tensor

from flow_grpo.answer.batches import Answer, joined, micro_batches, packed
from flow_grpo.answer.decoding import choose
from flow_grpo.answer.network import AnswerModel
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.prompts import EncodedPrompt
from flow_grpo.answer.sampling import Sampled, Sampler
from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import sample_generators
from flow_grpo.errors import UserError

FAMILIES = ("qwen3_vl", "qwen2_5_vl")
ROWS = [0, 0, 1, 1, 1, 2, 2]  # questions of the samples below


@pytest.fixture(scope="module", params=FAMILIES)
def network(request) -> AnswerModel:
    return AnswerModel(small_vlm.build(request.param), temperature=0.9)


@pytest.fixture(scope="module")
def prompts(network, tmp_path_factory) -> list[EncodedPrompt]:
    encoder = small_vlm.encoder(network.model)
    return [encoder.encode(q) for q in small_vlm.questions(tmp_path_factory.mktemp("questions"))]


def sample(network, prompts, rows=ROWS, index=None, **settings) -> Sampled:
    index = list(range(len(rows))) if index is None else index
    settings = {"max_new_tokens": 24, "stop": [small_vlm.EOS], "pad": small_vlm.PAD, **settings}
    generators = settings.pop("generators", sample_generators(1, 2, index))
    return Sampler(network, **settings).sample(prompts, rows, generators)


@pytest.fixture(scope="module")
def sampled(network, prompts) -> Sampled:
    return sample(network, prompts)


def answers(prompts, sampled: Sampled, rows=ROWS) -> list[Answer]:
    return [Answer(r, prompts[r], t) for r, t in zip(rows, sampled.tokens, strict=True)]


def log_probs(network, answers: list[Answer]) -> list[Tensor]:
    batch = packed(answers, small_vlm.PAD)
    values = network(batch)["log_probs"]
    return [row[own] for row, own in zip(values, batch.mask, strict=True)]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_log_probs_of_decoding_and_training_agree(network, prompts, sampled):
    assert len({len(tokens) for tokens in sampled.tokens}) > 1  # unequal lengths
    with torch.no_grad():
        trained = log_probs(network, answers(prompts, sampled))
    assert furthest(trained, sampled.log_probs) < 2e-6


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("use_lora", [False, True])
def test_old_log_probs_that_are_recomputed_are_exactly_those_of_training(
    network, prompts, sampled, use_lora, recomputes
):
    """In rows of several answers; with gradient checkpointing too."""
    policy = AnswerPolicy(
        copy.deepcopy(network.model),
        parts=[],
        use_lora=use_lora,
        rank=4,
        freeze_vision=False,
        temperature=network.temperature,
        gradient_checkpointing=recomputes,
    )
    batch = packed(answers(prompts, sampled), small_vlm.PAD)
    assert batch.row.tolist() == ROWS  # 2, 3 and 2 answers to a row
    old = policy.fixed_scores(batch)["log_probs"]
    new = policy.scores(batch)["log_probs"]
    assert torch.equal(old, new)
    assert new.requires_grad
    assert furthest([old[batch.mask]], [torch.cat(sampled.log_probs)]) < 2e-6


@pytest.mark.parametrize("freeze_vision", [False, True])
@pytest.mark.parametrize("use_lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_exactly_the_policy_at_the_start(
    network, prompts, sampled, dtype, use_lora, freeze_vision
):
    policy = AnswerPolicy(
        copy.deepcopy(network.model).to(dtype),
        parts=[],
        use_lora=use_lora,
        rank=4,
        freeze_vision=freeze_vision,
        with_reference=True,
        compute_dtype=None if dtype == torch.float32 else dtype,
    )
    batch = packed(answers(prompts, sampled), small_vlm.PAD)
    start = policy.reference(batch)
    assert torch.equal(start, policy.scores(batch)["log_probs"])
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01
    assert torch.equal(policy.reference(batch), start)
    assert not torch.allclose(policy.scores(batch)["log_probs"], start, atol=1e-3)


def test_training_keeps_no_cache(network, prompts, sampled):
    """Keys and values of all layers, for nobody to read."""
    kept = []
    hook = network.model.model.register_forward_hook(
        lambda _, __, out: kept.append(out.past_key_values)
    )
    network(packed(answers(prompts, sampled), small_vlm.PAD))
    hook.remove()
    assert kept == [None]


def test_a_mixed_batch_equals_each_row_alone(network, prompts, sampled):
    """No, one and two pictures, several answers to each; in training and in decoding."""
    rows = answers(prompts, sampled)
    assert [len(rows[i].prompt.sources) for i in (0, 2, 5)] == [0, 1, 2]
    with torch.no_grad():
        together = log_probs(network, rows)
        alone = [log_probs(network, [row])[0] for row in rows]
    assert furthest(together, alone) < 1e-5
    for i, row in enumerate(ROWS):
        own = sample(network, prompts[row : row + 1], [0], [i])
        assert torch.equal(own.tokens[0], sampled.tokens[i])
        assert furthest(own.log_probs, sampled.log_probs[i : i + 1]) < 1e-5


def test_log_probs_are_those_of_transformers_own_forward(network, prompts, sampled):
    """One row, unpadded, with transformers' own positions and causal mask."""
    for answer in answers(prompts, sampled):
        prompt = answer.prompt
        ids = torch.cat([prompt.ids, answer.tokens])[None]
        extra = joined(prompt.seen)
        if extra:
            extra["mm_token_type_ids"] = (ids == small_vlm.IMAGE).int()
        with torch.no_grad():
            network.model.model.rope_deltas = None
            logits = network.model(input_ids=ids, **extra).logits[0, len(prompt) - 1 : -1]
            logits = logits / network.temperature
            logits[:, network.banned] = -torch.inf
            expected = logits.log_softmax(-1).gather(-1, answer.tokens[:, None])[:, 0]
            ours = log_probs(network, [answer])[0]
        assert float((ours - expected).abs().max()) < 2e-6


def test_values_are_those_of_the_places_that_predict_the_tokens(network, prompts, sampled):
    valued = AnswerModel(network.model, with_value=True)
    valued.value.weight.data = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    rows = answers(prompts, sampled)
    batch = packed(rows, small_vlm.PAD)
    values = valued(batch)["values"]
    for answer, own, mask in zip(rows[:2], values, batch.mask, strict=False):  # without pictures
        ids = torch.cat([answer.prompt.ids, answer.tokens])[None]
        hidden = network.model.model(input_ids=ids).last_hidden_state[0]
        expected = valued.value(hidden[len(answer.prompt) - 1 : -1])[:, 0]
        assert torch.allclose(own[mask], expected, atol=1e-4)
    values.sum().backward()  # they teach the model, not only their head
    assert next(network.model.model.language_model.layers.parameters()).grad.abs().max() > 0
    network.zero_grad()


def test_pictures_matter(network, prompts, sampled):
    """Else all of the above would hold for a model that does not look."""
    own = answers(prompts, sampled)[2]
    seen = [{**picture, "pixel_values": -picture["pixel_values"]} for picture in own.prompt.seen]
    other = replace(own.prompt, seen=seen)
    with torch.no_grad():
        seen, inverted = (
            log_probs(network, [Answer(0, p, own.tokens)]) for p in (own.prompt, other)
        )
    assert furthest(seen, inverted) > 1e-3


@pytest.fixture
def seen(network, monkeypatch) -> list[int]:
    """How many pictures the tower sees in each of its forwards."""
    counts, tower = [], network.model.model.visual
    forward = tower.forward

    def counted(pixels, grid_thw, **kwargs):
        counts.append(len(grid_thw))
        return forward(pixels, grid_thw=grid_thw, **kwargs)

    monkeypatch.setattr(tower, "forward", counted)
    return counts


def test_the_tower_runs_once_per_picture_of_a_group(network, prompts, sampled, seen):
    with torch.no_grad():
        log_probs(network, answers(prompts, sampled))
        sample(network, prompts, max_new_tokens=3)
    assert seen == [3, 3]  # the pictures of a question with one and of a question with two


def test_the_tower_runs_once_for_a_picture_of_several_questions(network, tmp_path, seen):
    """Of files and of bytes; the second question shows one picture twice."""
    encoder = small_vlm.encoder(network.model)
    _, one, two = small_vlm.questions(tmp_path)
    small, large = two.images[0].read_bytes(), one.images[0]
    asked = [
        replace(two, images=(large, small)),
        replace(two, images=(small, small)),
        replace(one, text="How few?", images=(large,)),
    ]
    prompts = [encoder.encode(question) for question in asked]
    together = sample(network, prompts, [0, 1, 1, 2])
    rows = answers(prompts, together, [0, 1, 1, 2])
    (trained := torch.cat(log_probs(network, rows))).sum().backward()
    assert seen == [2, 2]
    weight = next(network.model.model.visual.parameters())
    gradient = weight.grad.clone()
    network.zero_grad()

    # as if all were distinct
    numbers = itertools.count()
    prompts = [replace(p, sources=tuple(next(numbers) for _ in p.sources)) for p in prompts]
    alone = sample(network, prompts, [0, 1, 1, 2])
    rows = answers(prompts, alone, [0, 1, 1, 2])
    (expected := torch.cat(log_probs(network, rows))).sum().backward()
    assert seen == [2, 2, 5, 5]
    for ours, theirs in zip(together.tokens, alone.tokens, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.allclose(trained, expected, atol=1e-5)
    assert torch.allclose(gradient, weight.grad, rtol=1e-3, atol=1e-4)
    assert weight.grad.abs().max() > 0
    network.zero_grad()


def test_any_split_into_batches_samples_the_same_tokens(network, prompts, sampled):
    for part in ([0], [1, 2], [3, 4, 5, 6]):
        rows = [ROWS[i] for i in part]
        own = sample(network, prompts, rows, part)
        for i, tokens in zip(part, own.tokens, strict=True):
            assert torch.equal(tokens, sampled.tokens[i])
    other = sample(network, prompts, index=[i + 100 for i in range(len(ROWS))])
    assert any(not torch.equal(a, b) for a, b in zip(other.tokens, sampled.tokens, strict=True))


def test_answers_end_at_the_end_token_or_are_cut_off(network, prompts, sampled):
    longer = sample(network, prompts, rows=[0] * 64, max_new_tokens=40)
    assert {True, False} == set(longer.ended)
    for tokens, ended in zip(longer.tokens, longer.ended, strict=True):
        places = (tokens == small_vlm.EOS).nonzero()[:, 0].tolist()
        assert places == ([len(tokens) - 1] if ended else [])
        assert ended or len(tokens) == 40


def test_greedy_takes_the_likeliest_token(network, prompts):
    greedy = sample(network, prompts, [0, 1, 2], generators=None, max_new_tokens=6)
    answer = Answer(1, prompts[1], greedy.tokens[1])
    batch = packed([answer], small_vlm.PAD)
    with torch.no_grad():
        hidden = network.hidden(batch.inputs)[0, batch.column[0]]
        assert torch.equal(network.log_probs(hidden).argmax(-1), answer.tokens)


def test_no_picture_token_is_ever_sampled(network, prompts, monkeypatch):
    """Of 1e5, decoded from a model that likes them best: whatever the hidden state, the score of
    one of them is far above all others."""
    head = torch.nn.Linear(32, small_vlm.VOCABULARY, bias=False)
    head.weight.data = network.model.lm_head.weight.data.clone()
    towards = torch.randn(32, generator=torch.Generator().manual_seed(0))
    head.weight.data[network.banned] = torch.stack([towards, -towards] * 2) * 1000
    monkeypatch.setitem(network.model._modules, "lm_head", head)
    settings = {"max_new_tokens": 40, "stop": [-1]}  # none ends before
    drawn = sample(network, prompts[1:2], [0] * 2500, **settings)
    greedy = sample(network, prompts[1:2], [0], generators=None, **settings)
    assert len(torch.cat(drawn.tokens)) == 100_000
    for tokens in (torch.cat(drawn.tokens), *greedy.tokens):
        assert not set(network.banned) & set(tokens.tolist())
    assert torch.cat(drawn.log_probs).isfinite().all()
    monkeypatch.setattr(network, "banned", [])  # else the test would show nothing
    free = sample(network, prompts[1:2], [0] * 4, **settings)
    assert all(set(tokens.tolist()) <= {3, 4, 5, 6} for tokens in free.tokens)


def test_draws_at_both_ends_choose_a_token_with_probability():
    scores = torch.tensor([[-torch.inf, 0.25, 0.75, -torch.inf]]).log()
    scores[:, 0] = scores[:, 3] = -torch.inf
    for draw, token in [(0.0, 1), (0.2499, 1), (0.2501, 2), (1.0, 2)]:
        assert choose(scores, torch.tensor([draw], dtype=torch.float64)).tolist() == [token]


def test_large_vocabularies_are_scored_in_chunks(network, prompts, sampled, monkeypatch):
    rows = answers(prompts, sampled)
    whole = torch.cat(log_probs(network, rows))
    whole.sum().backward()
    weight = network.model.lm_head.weight
    gradient, weight.grad = weight.grad.clone(), None
    monkeypatch.setattr("flow_grpo.answer.network.LOGITS", 10 * small_vlm.VOCABULARY)
    parts = torch.cat(log_probs(network, rows))
    parts.sum().backward()
    in_parts = weight.grad.clone()
    network.zero_grad()
    assert torch.allclose(whole, parts, atol=1e-6)
    assert torch.allclose(gradient, in_parts, atol=1e-4)


def test_micro_batches_keep_to_the_budget_and_the_order(prompts, sampled):
    rows = answers(prompts, sampled)
    slices = list(micro_batches(rows, budget=120))
    assert [i for part in slices for i in range(len(rows))[part]] == list(range(len(rows)))
    assert len(slices) > 1
    for part in slices:
        batch = packed(rows[part], small_vlm.PAD)
        assert batch.inputs.input_ids.numel() <= 120 or part.stop - part.start == 1
    whole = packed(rows, small_vlm.PAD).inputs.input_ids.numel()
    assert list(micro_batches(rows, budget=whole)) == [slice(0, len(rows))]
    assert len(list(micro_batches(rows, budget=whole - 1))) == 2
    assert len(list(micro_batches(rows, budget=1))) == len(rows)


def test_lengths_are_known_without_reading_pictures(network, prompts, tmp_path):
    encoder = small_vlm.encoder(network.model)
    asked = small_vlm.questions(tmp_path / "q")
    assert [encoder.length(q) for q in asked] == [len(p) for p in prompts]
    encoder.check_lengths(asked, most=max(map(len, prompts)))
    with pytest.raises(UserError, match=r"row of 'Compare.* has .* tokens, more than max_prompt"):
        encoder.check_lengths(asked, most=len(prompts[2]) - 1)


def test_questions_that_do_not_fit_their_pictures_are_named(network, tmp_path):
    encoder = small_vlm.encoder(network.model)
    path = tmp_path / "a.png"
    small_vlm.picture(0).save(path)
    (tmp_path / "cut.png").write_bytes(path.read_bytes()[:100])
    cases = {
        "marks 2 places": ("<image> or <image>", (path,)),
        "cannot be decoded": ("?", (tmp_path / "none.png",)),
        "cannot be decoded .*trunc": ("?", (tmp_path / "cut.png",)),
    }
    for reason, (text, images) in cases.items():
        with pytest.raises(UserError, match=f"data.jsonl line 3.*{reason}"):
            encoder.encode(Question(text, images, "", {}, "data.jsonl line 3"))


def test_special_tokens_in_a_text_are_plain_characters(network):
    """Of a question, of its system prompt and of an observation; not those of the template."""
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
    assert small_vlm.PAD in ids_of("a")  # the config's own system prompt is taken as it is
    assert small_vlm.PAD not in ids_of("a", "<|pad|>")
    answer = torch.tensor([small_vlm.EOS])
    heard = [encoder.observation(t, [], answer, "row 1", 99).ids.tolist() for t in (text, other)]
    assert text in shown(heard[0])[0]
    assert shown(heard[0])[1] == shown(heard[1])[1]


def test_special_tokens_in_a_text_may_be_rejected(network):
    strict = small_vlm.encoder(network.model, special_tokens="reject")
    for question in (
        Question("a<|im_end|>b", (), "", {}, "x.jsonl:3"),
        Question("a", (), "", {}, "x.jsonl:3", "<|im_end|>"),
    ):
        with pytest.raises(UserError, match=r"x\.jsonl:3: .*<\|im_end\|>.*special_tokens=escape"):
            strict.token_ids(question)
    with pytest.raises(UserError, match=r"row 1: .*<\|im_end\|>"):
        strict.observation("<|im_end|>", [], torch.tensor([small_vlm.EOS]), "row 1", 99)
    mark = chr(0x100000)
    with pytest.raises(UserError, match=r"x\.jsonl:3: .*\\U00100000"):
        small_vlm.encoder(network.model).token_ids(Question(mark, (), "", {}, "x.jsonl:3"))


TEMPLATES = {  # what goes wrong, and what is told of it
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
    "{% for i in range(9 ** 5) %}{% for j in range(9 ** 5) %}{% endfor %}{% endfor %}": "no end",
    "{% for i in range(9 ** 5) %}{{ range(9 ** 5) | map('int') | list | length }}{% endfor %}": (
        "TimeoutError: no end after 200,000 steps"
    ),
}


@pytest.mark.parametrize(("template", "told"), TEMPLATES.items(), ids=range(len(TEMPLATES)))
def test_a_chat_template_that_fails_or_never_ends_is_told_in_one_line(template, told, monkeypatch):
    monkeypatch.setattr("flow_grpo.answer.templates.MOST_STEPS", 200_000)
    encoder = small_vlm.encoder(small_vlm.build("qwen3_vl"))
    encoder.tokenizer.chat_template = template
    before = sys.gettrace()
    with pytest.raises(UserError) as error:
        encoder.check_lengths([Question("?", (), "", {}, "data.jsonl line 3")], most=99)
    assert told in str(error.value)
    assert "data.jsonl line 3" in str(error.value)
    assert "\n" not in str(error.value)
    assert sys.gettrace() is before


def test_a_chat_template_that_writes_nothing_is_rejected():
    encoder = small_vlm.encoder(small_vlm.build())
    encoder.tokenizer.chat_template = "{% if false %}never{% endif %}"
    with pytest.raises(UserError, match=r"renders nothing for a\.jsonl:1"):
        encoder.encode(Question("What?", where="a.jsonl:1"))


def test_a_token_without_an_embedding_is_rejected():
    """As with the tokenizer of another model: the embedding would raise an IndexError."""
    model = small_vlm.build()
    question = Question("What?", where="a.jsonl:1")
    most = max(small_vlm.encoder(model).token_ids(question))
    model.resize_token_embeddings(most)
    with pytest.raises(UserError, match=rf"token id {most} for a\.jsonl:1.* {most} token"):
        small_vlm.encoder(model).token_ids(question)
