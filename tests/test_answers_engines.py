"""Answers that another engine sampled: what it is sent, and how its tokens are weighted.

tests/gpu/test_vllm_engine.py runs vLLM itself, where it is installed.
"""

import itertools
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import answer_runs
import pytest
import small_vlm
import torch
import train_vlm
from peft import PeftModel
from safetensors import safe_open

from flow_grpo.answer import check
from flow_grpo.answer.batches import joined
from flow_grpo.answer.dry import AnswerLoop
from flow_grpo.answer.fields import ANSWER
from flow_grpo.answer.losses.base import Counts, importance_weights, token_weights
from flow_grpo.answer.losses.clip import Clip
from flow_grpo.answer.objective import Objective
from flow_grpo.answer.plan import build_plan
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.prompts import EncodedPrompt
from flow_grpo.answer.rollout import Answerer
from flow_grpo.answer.session import VlmSession, build_session
from flow_grpo.answer.vllm_engine import (
    VllmAnswerer,
    check_family,
    drawn,
    engine_files,
    named_weights,
)
from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import sample_generators
from flow_grpo.errors import UserError
from flow_grpo.run.policy import ADAPTER
from flow_grpo.speed.low_bits import to_low_bits

FAMILIES = ("qwen3_vl", "qwen2_5_vl")


# --- the weights of tokens -----------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.0, 1.2, 100.0])
def test_weights_make_an_engines_tokens_those_of_the_policy(cap):
    """Over all answers of two tokens out of three: the mean over the engine's answers is the
    gradient of the policy's expected reward, token by token, as far as no weight is held."""
    logits = torch.tensor([[0.2, -0.4, 0.7], [0.5, 0.1, -0.9]], dtype=torch.float64)
    logits.requires_grad_()
    engine = torch.tensor([[0.0, 0.1, 0.4], [-0.3, 0.2, 0.0]], dtype=torch.float64).log_softmax(-1)
    reward = torch.tensor([1.0, 0.3, -0.5], dtype=torch.float64)
    mask, estimate, expected = torch.ones(1, 2, dtype=torch.bool), 0.0, 0.0
    counts = Counts(tokens=2.0, answers=1.0)
    for answer in itertools.product(range(3), repeat=2):
        chosen = torch.tensor(answer)
        new = logits.log_softmax(-1).gather(1, chosen[:, None]).T  # (1, 2)
        theirs = engine.gather(1, chosen[:, None]).T
        advantages = reward[chosen][None]  # each token has its own, so that tokens stand alone
        loss = Clip(0.2, 0.2, dual_clip=0.0).per_token(new, new.detach(), advantages, mask).loss
        weights = token_weights("token", mask, counts, 2)
        (plain,) = torch.autograd.grad((loss * weights).sum(), logits, retain_graph=True)
        weighted = loss * weights * importance_weights(new, theirs, cap)
        (corrected,) = torch.autograd.grad(weighted.sum(), logits)
        estimate = estimate + theirs.sum().exp() * corrected
        expected = expected + new.detach().sum().exp() * plain
    off = (estimate - expected).abs().max()
    assert off < 1e-12 if cap == 100.0 else off > 1e-3


# --- a run with an engine whose log-probabilities are not ours -----------------------------------


class OtherTemperature(Answerer):
    """An engine that is off: it samples at another temperature, and says so truthfully."""

    exact: ClassVar[bool] = False
    factor: ClassVar[float] = 1.5
    woken: ClassVar[list[bool]] = []

    @contextmanager
    def awake(self):
        self.woken.append(True)
        with super().awake():
            yield
        self.woken.append(False)

    def answers(self, batches):
        assert self.woken[-1]
        network, own = self.policy.network, self.policy.network.temperature
        network.temperature = own * self.factor
        try:
            yield from list(super().answers(batches))
        finally:
            network.temperature = own


class SameTemperature(OtherTemperature):
    factor: ClassVar[float] = 1.0


def session_with(kind: type[Answerer], folder: Path, **fields) -> VlmSession:
    model, data = small_vlm.save(folder / "model"), small_vlm.small_data(folder / "data")
    places = {"pretrained.model": str(model), "dataset": str(data), "logdir": str(folder / "logs")}
    session = build_session(answer_runs.config_of(**places, num_epochs=1, **fields))
    own = session.answerer
    session.answerer = kind(own.policy, own.encoder, own.max_new_tokens, own.stop)
    return session


def run_with(kind: type[Answerer], folder: Path, **fields) -> tuple[list[dict], list]:
    """Metrics, and what each call of the loss got and gave."""
    session = session_with(kind, folder, **fields)
    calls, usual = [], Objective.loss

    def watched(objective, batch, scores, fixed, counts):
        loss = usual(objective, batch, scores, fixed, counts)
        calls.append((objective, batch, scores, [replace(f) for f in fixed], counts, loss))
        return loss

    Objective.loss = watched
    try:
        train_vlm.train(session)
    finally:
        Objective.loss = usual
        session.close()
    lines = (session.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], calls


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    OtherTemperature.woken.clear()
    fields = {"sample.group_size": 8, "train.updates_per_epoch": 1, "train.beta": 0.1}
    return run_with(OtherTemperature, tmp_path_factory.mktemp("hot"), **fields)


def test_an_engine_that_is_off_is_told_and_weighted(hot):
    (_, line), calls = hot
    assert line["answer/engine_dev"] > 0.1
    assert line["answer/engine_dev_max"] > 3 * line["answer/engine_dev"]
    # old log-probabilities are computed again, as if recompute_old was set
    assert line["train/first_update_ratio_dev"] == 0
    # the mean of a ratio over what it is divided by is 1, but for chance and the bound of 2
    assert line["train/importance"] == pytest.approx(1, abs=0.15)
    weights = torch.cat([fixed.importance for *_, every, _, _ in calls for fixed in every])
    assert weights.max() == 2
    assert line["train/importance"] == pytest.approx(weights.mean().item(), abs=1e-5)


def test_the_policy_loss_of_a_token_is_multiplied_by_its_weight_and_the_kl_is_not(hot):
    objective, batch, scores, fixed, counts, loss = hot[1][0]
    ones = [replace(own, importance=torch.ones_like(own.old)) for own in fixed]
    # away from the reference, from which the run has just begun
    moved = [replace(own, reference=own.reference - 0.3) for own in fixed]
    loss = objective.loss(batch, scores, moved, counts)
    importance = torch.cat([own.importance for own in fixed])
    assert torch.equal(loss.columns["importance"], importance)
    plain = objective.loss(batch, scores, ones, counts)
    kl, policy = loss.columns["kl"], loss.columns["policy_loss"]
    assert kl.min() > 0.01
    assert torch.allclose(policy, plain.columns["policy_loss"] * importance, atol=1e-6)
    assert torch.allclose(loss.per_sample, policy + 0.1 * kl, atol=1e-6)


def test_engines_are_awake_while_they_answer_and_not_else(hot):
    # evaluation, the epoch's answers, and the evaluation after them
    assert OtherTemperature.woken == [True, False] * 3


def test_an_engine_that_is_not_off_trains_as_ours(tmp_path):
    lines, calls = run_with(SameTemperature, tmp_path / "same")
    assert lines[-1]["answer/engine_dev_max"] <= 1e-5
    weights = torch.cat([fixed.importance for *_, every, _, _ in calls for fixed in every])
    assert torch.allclose(weights, torch.ones_like(weights), atol=1e-5)
    ours, _ = run_with(Answerer, tmp_path / "ours", **{"train.recompute_old": True})
    assert "answer/engine_dev" not in ours[-1]
    assert "train/importance" not in ours[-1]
    for name in ("train/loss", "train/grad_norm", "reward/avg"):
        assert lines[-1][name] == pytest.approx(ours[-1][name], rel=1e-3, abs=1e-6)


def test_a_dry_run_goes_through_another_engine_too(tmp_path):
    session = session_with(OtherTemperature, tmp_path)
    steps = (train_vlm.sample_epoch, train_vlm.prepare, train_vlm.give_credit)
    loop = AnswerLoop(*steps, train_vlm.train_epoch, train_vlm.run_evaluation)
    try:
        measured, *_ = loop.measure(session, tmp_path / "out")
    finally:
        session.close()
    assert measured.train > 0


# --- what vLLM is sent ---------------------------------------------------------------------------


def policy_with_lora(family: str, dtype: torch.dtype = torch.float32) -> AnswerPolicy:
    model = small_vlm.build(family).to(dtype)
    return with_lora(AnswerPolicy(model, parts=[], rank=4, freeze_vision=False))


def with_lora(policy: AnswerPolicy) -> AnswerPolicy:
    """That does something."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_peft_merges_under_the_names_of_the_model(family, tmp_path):
    policy = policy_with_lora(family)
    policy.save(tmp_path)
    sent = dict(named_weights(policy.model))
    stock = small_vlm.build(family)
    before = {name: weight.clone() for name, weight in stock.named_parameters()}
    merged = PeftModel.from_pretrained(stock, tmp_path / "lora").merge_and_unload()
    expected = dict(merged.named_parameters())
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(sent[name], weight, atol=1e-6), name
    moved = [name for name, weight in before.items() if not torch.equal(weight, sent[name])]
    layers = [name for name, _ in policy.model.named_parameters() if f"lora_A.{ADAPTER}" in name]
    assert len(moved) == len(layers) > 0
    for name, weight in policy.model.named_parameters():  # nothing of the model itself has changed
        if "lora_" not in name:
            assert torch.equal(weight, before[name.replace(".base_layer", "")]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_without_lora_weights_are_sent_as_they_are(family, tmp_path):
    model = small_vlm.build(family)
    policy = AnswerPolicy(model, parts=[], use_lora=False)
    sent = dict(named_weights(policy.model))
    assert all(torch.equal(sent[name], weight) for name, weight in model.named_parameters())
    stock = small_vlm.build(family, seed=1)
    missing, unexpected = stock.load_state_dict(sent, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])  # tied to the embedding
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(file.keys()) == len(sent)
        if family == "qwen3_vl":  # Qwen2.5-VL is stored under older names, and vLLM takes both
            assert set(file.keys()) == set(sent)


@torch.no_grad()
@pytest.mark.parametrize(("precision", "near"), [("nf4", 1e-4), ("fp8", 0.5)])
def test_weights_in_few_bits_are_sent_as_what_they_stand_for(precision, near):
    """In 8 bits inputs are rounded too, which vLLM does not do."""
    model, stock = small_vlm.build("qwen3_vl", wide=True), small_vlm.build("qwen3_vl", wide=True)
    ids = torch.tensor([[small_vlm.BOS, *range(40, 60)]])
    to_low_bits([model.model], precision, torch.device("cpu"))
    policy = with_lora(AnswerPolicy(model, parts=[], rank=4))
    sent = dict(named_weights(policy.model))
    assert sent.keys() == dict(stock.named_parameters()).keys()
    before = stock(input_ids=ids).logits
    stock.load_state_dict(sent, strict=False)
    off = [policy.model(input_ids=ids).logits - x for x in (stock(input_ids=ids).logits, before)]
    assert off[0].abs().max() < near < off[1].abs().max()


@torch.no_grad()
def test_lora_is_not_rounded_away_in_half_precision():
    policy = policy_with_lora("qwen3_vl", torch.bfloat16)
    name = "model.language_model.layers.0.self_attn.q_proj"
    layer = policy.model.get_submodule(name)
    layer.lora_B[ADAPTER].weight *= 1e-5
    before, added = layer.base_layer.weight, layer.get_delta_weight(ADAPTER).float()
    sent = dict(named_weights(policy.model))[f"{name}.weight"]
    assert sent.dtype == torch.bfloat16
    nearest = (before.float() + added).bfloat16()
    assert (nearest != before).float().mean() < 0.01
    moved = sent.float() - before.float()
    assert (moved != 0).sum() > 2 * (nearest != before).sum()
    assert (moved[moved != 0].sign() == added[moved != 0].sign()).all()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> tuple[VllmAnswerer, list[Question]]:
    """All of it but vLLM."""
    folder = tmp_path_factory.mktemp("engine")
    policy = policy_with_lora("qwen3_vl")
    policy.network.temperature = 0.7
    encoder = small_vlm.encoder(policy.model)
    answerer = VllmAnswerer(policy, encoder, 10, (2, 9), engine=None, sleeps=False)
    questions = small_vlm.questions(folder / "data")
    return answerer, [*questions, small_vlm.odd_question(folder / "data")]


def test_requests_are_prompts_with_one_mark_for_each_picture(engine):
    answerer, questions = engine
    prompts = answerer.encode(questions, [0, 1, 2, 3, 1])
    assert list(prompts) == [0, 1, 2, 3]
    for row, count in enumerate([0, 1, 2, 1]):
        prompt, asked = prompts[row], answerer.request(prompts[row])
        ids = asked["prompt_token_ids"]
        assert ids.count(small_vlm.IMAGE) == count
        assert ids == answerer.encoder.token_ids(questions[row])
        pictures = asked.get("multi_modal_data", {"image": []})["image"]
        assert len(pictures) == count
        if count:  # of their last size, and what is read again is the same
            seen = joined(prompt.seen)
            sizes = [
                (8 * width, 8 * height) for _, height, width in seen["image_grid_thw"].tolist()
            ]
            assert [picture.size for picture in pictures] == sizes
            again = answerer.encoder.images(images=pictures, return_tensors="pt")
            assert all(torch.equal(again[name], seen[name]) for name in again)


def test_samples_have_seeds_of_their_own_and_no_tokens_of_pictures(engine):
    answerer, _ = engine
    generators = sample_generators(42, 3, [0, 1, 2, 3])
    seeds = [drawn(g) for g in generators]
    assert len({*seeds, *map(drawn, generators)}) == 8  # the next answer's is another
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[2:] == list(map(drawn, sample_generators(42, 3, [2, 3])))
    settings = answerer.settings(seeds[0])
    assert (settings["seed"], settings["temperature"]) == (seeds[0], 0.7)
    assert (settings["max_tokens"], settings["stop_token_ids"]) == (10, [2, 9])
    marks = [small_vlm.IMAGE, small_vlm.VIDEO, small_vlm.START, small_vlm.END]
    assert settings["logit_bias"] == dict.fromkeys(marks, float("-inf"))
    assert answerer.settings(None)["temperature"] == 0


def said(prompt: list[int], tokens: list[int], reason: str) -> SimpleNamespace:
    """As vLLM gives it."""
    steps = [{token: SimpleNamespace(logprob=-0.5 * i)} for i, token in enumerate(tokens)]
    out = SimpleNamespace(token_ids=tokens, logprobs=steps, finish_reason=reason)
    return SimpleNamespace(prompt_token_ids=prompt, outputs=[out])


def test_answers_are_read_and_another_prompt_is_refused(engine):
    answerer, _ = engine
    prompt = EncodedPrompt(torch.tensor([1, 40, 41]), torch.zeros(3, 3), 3)
    sample = answerer._sample(7, prompt, said([1, 40, 41], [50, 51, 2], "stop"))
    assert (sample.row, sample.tokens.tolist(), sample.ended) == (7, [50, 51, 2], True)
    assert sample.log_probs.tolist() == [0, -0.5, -1]
    assert sample.text == answerer.encoder.decode([50, 51])
    assert not answerer._sample(7, prompt, said([1, 40, 41], [50], "length")).ended
    with pytest.raises(UserError, match="vLLM reads 2 tokens in a prompt where training reads 3"):
        answerer._sample(7, prompt, said([1, 40], [50], "length"))


def test_the_engine_reads_the_weights_where_they_are(engine, tmp_path):
    answerer, _ = engine
    source = small_vlm.save(tmp_path / "model")
    before = {path: path.read_bytes() for path in source.iterdir()}
    with engine_files(str(source), "main", answerer) as folder:
        links = [path for path in Path(folder).iterdir() if path.is_symlink()]
        assert [path.name for path in links] == ["model.safetensors"]
        names = {path.name for path in Path(folder).iterdir()}
        assert {"config.json", "tokenizer.json", "video_preprocessor_config.json"} <= names
    assert {path: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize(
    ("installed", "fields", "message"),
    [
        (False, {}, "sample.engine='vllm' needs vLLM: pip install -e '.[vllm]', or use"),
        (True, {"sample.temperature": 2.5}, "sample.temperature=2.5 must be from 0.01 to 2.0 for"),
        (True, {"sample.vllm_memory": 1.5}, "sample.vllm_memory=1.5 must be at most 1"),
        (True, {"sample.vllm_memory": 0.0}, "sample.vllm_memory=0.0 must be above 0"),
        (
            True,
            {"sample.vllm_tensor_parallel": 2, "sample.engine": "transformers"},
            "sample.vllm_tensor_parallel=2 has no use with sample.engine='transformers'; use",
        ),
        (True, {"train.importance_cap": -1.0}, "train.importance_cap=-1.0 must be at least 0"),
        (True, {"sample.engine": "vlm"}, "sample.engine='vlm' must be one of 'transformers', 'v"),
    ],
)
def test_what_does_not_go_with_vllm_is_told_in_one_line(installed, fields, message, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: installed or None)
    with pytest.raises(UserError) as told:
        check.check(answer_runs.config_of(**{"sample.engine": "vllm", **fields}))
    assert str(told.value).startswith(message)
    assert "\n" not in str(told.value)


def test_a_family_whose_pictures_vllm_reads_in_another_way_is_told_before_it_loads(tmp_path):
    start = small_vlm.save(tmp_path, "internvl")
    with pytest.raises(UserError, match=r"sample.engine='vllm' does not go with InternVL"):
        check_family(str(start), "main")


def test_parts_that_an_engine_cannot_have_are_told_before_it_loads(tmp_path, monkeypatch):
    source = str(small_vlm.save(tmp_path))
    check_family(source, "main", 2)
    with pytest.raises(UserError, match=r"^sample.vllm_tensor_parallel=3 must divide the 4 att"):
        check_family(source, "main", 3)
    fields = {"sample.engine": "vllm", "sample.vllm_tensor_parallel": 2}
    config = ANSWER.check(answer_runs.config_of(**fields))
    told = "^sample.vllm_tensor_parallel=2 does not divide the processes of a node, {}; start a"
    with pytest.raises(UserError, match=told.format(1)):
        build_plan(config, 1)
    build_plan(config, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # on each of four nodes
    with pytest.raises(UserError, match=told.format(1)):
        build_plan(config, 4)
