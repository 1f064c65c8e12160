"""Training on given responses: formulas, TRL's numbers, prompts, settings and whole runs."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import given_runs
import numpy as np
import pytest
import small_vlm
import torch
import vlm_runs
from test_vlm_losses import finite_differences, numbers
from user_errors import raises_user_error

from flow_grpo.data.chats import Turn
from flow_grpo.data.questions import Question
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.fields import get_config
from flow_grpo.vlm.given_responses import estimate_mismatched_kl
from flow_grpo.vlm.losses import GIVEN_LOSSES, build_loss
from flow_grpo.vlm.losses.base import UpdateCounts
from flow_grpo.vlm.losses.given import GivenBatch
from flow_grpo.vlm.packing import Response, micro_batches
from flow_grpo.vlm.prompts import EncodedPrompt

LENGTHS = torch.tensor([5, 2, 4, 1])
MASK = torch.arange(5) < LENGTHS[:, None]
REFERENCE = (numbers(0, 1.0) - 2.0) * MASK
POLICY = REFERENCE + numbers(1, 0.5) * MASK
LIKED = torch.tensor([True, False, False, True])
KL, BETA = 0.3, 0.4
SETTINGS = SimpleNamespace(
    aggregation="token", beta=BETA, desirable_weight=1.5, undesirable_weight=0.5
)
RECORDED = json.loads(
    (given_runs.ROOT / "tests/vlm/trl_given_losses.json").read_text(encoding="utf-8")
)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def by_hand(name):
    """Return the loss of the four responses, computed one by one."""
    ratios = ((POLICY - REFERENCE) * MASK).sum(1).tolist()
    lengths = LENGTHS.tolist()
    pairs = [(0, 1), (2, 3)]
    if name == "sft":
        return -sum(POLICY[i, t].item() for i in range(4) for t in range(lengths[i])) / 12
    if name == "dpo":
        return sum(-math.log(sigmoid(BETA * (ratios[a] - ratios[b]))) for a, b in pairs) / 2
    if name == "ipo":
        gaps = [ratios[a] / lengths[a] - ratios[b] / lengths[b] for a, b in pairs]
        return sum((gap - 1 / (2 * BETA)) ** 2 for gap in gaps) / 2
    terms = [
        1.5 * (1 - sigmoid(BETA * (r - KL))) if liked else 0.5 * (1 - sigmoid(BETA * (KL - r)))
        for r, liked in zip(ratios, LIKED.tolist(), strict=True)
    ]
    return sum(terms) / 4


def total(name, policy, parts=((0, 4),)):
    """Return the loss of an update of the four responses in one or more micro-batches."""
    loss = build_loss(name, SETTINGS)
    counts = UpdateCounts(tokens=12.0, responses=4.0, mismatched_kl=KL)
    found = 0.0
    for start, end in parts:
        own = slice(start, end)
        batch = GivenBatch(policy[own], MASK[own], counts, 8, REFERENCE[own], LIKED[own], MASK[own])
        found = found + loss.terms(batch).per_sample.sum()
    return found / loss.num_terms(counts)


@pytest.mark.parametrize("name", GIVEN_LOSSES)
def test_losses_and_gradients_are_those_of_the_formulas(name):
    policy = POLICY.clone().requires_grad_()
    loss = total(name, policy)
    assert loss.item() == pytest.approx(by_hand(name), rel=1e-6)
    loss.backward()
    expected = finite_differences(lambda at: total(name, at).item(), POLICY) * MASK
    torch.testing.assert_close(policy.grad * MASK, expected, rtol=1e-6, atol=1e-8)
    assert total(name, POLICY, ((0, 2), (2, 4))).item() == pytest.approx(loss.item(), abs=1e-12)


@pytest.mark.parametrize(
    "case", ["sft tiny-text", "ipo tiny-text", "kto tiny-text", "dpo tiny-vlm"]
)
def test_an_update_equals_trls(tmp_path, case):
    """The numbers of tests/gpu/compare_trl_losses.py, which runs TRL."""
    recorded = RECORDED[case]
    found = given_runs.run_update(*case.split(), tmp_path)
    assert found.micro_batches >= 2
    assert found.loss == pytest.approx(recorded["loss"], abs=1e-6)
    norm = sum((gradient**2).sum() for gradient in found.gradients.values()).sqrt()
    assert norm.item() == pytest.approx(recorded["norm"], rel=1e-6)
    start = found.gradients[recorded["weight"]].flatten()[:4]
    torch.testing.assert_close(
        start, torch.tensor(recorded["gradient"], dtype=torch.float64), rtol=0, atol=1e-6
    )
    for name, value in recorded["metrics"].items():
        assert found.metrics[f"train/{name}"] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("sign", [1, -1])
def test_ktos_kl_is_that_of_each_prompt_with_the_response_before_it(sign):
    """Samples 0, 2 and 3 are an update, and 3 is another process's. Log-ratios of (prompt,
    response): 3 of (0, 3), 5 of (2, 0), 7 of (3, 2), and 100 of all others; a mean below 0 is 0."""
    ratios = torch.full((4, 4), 100.0)
    ratios[0, 3], ratios[2, 0], ratios[3, 2] = 3.0, 5.0, 7.0
    prompts = [EncodedPrompt(torch.tensor([i]), torch.zeros(1, 1), 1) for i in range(4)]
    tokens = [(torch.tensor([i]),) for i in range(4)]

    def log_probs(batch: Response, *, given: bool) -> torch.Tensor:
        assert given
        return sign * ratios[batch.prompt.ids, batch.tokens][:, None] - 1

    session = SimpleNamespace(
        given=SimpleNamespace(tokens=tokens),
        policy=SimpleNamespace(
            gathered_weights=nullcontext,
            forward_tokens_no_grad=lambda batch, given: {
                "log_probs": log_probs(batch, given=given)
            },
            reference_log_probs=lambda batch, given: torch.full((1, 1), -1.0),
        ),
        accelerator=SimpleNamespace(device="cpu", reduce=lambda own: own + sign * ratios[3, 2]),
    )
    rollout = SimpleNamespace(
        samples={0: None, 2: None},
        row_of=lambda index: index,
        response=lambda index, shares_prompt: Response(index, prompts[index], tokens[index][0]),
    )
    members = np.array([True, False, True, True])
    found = estimate_mismatched_kl(session, rollout, members, pack=list)
    assert found == pytest.approx(5.0 if sign > 0 else 0.0)


def test_pairs_stay_in_one_micro_batch():
    prompt = EncodedPrompt(torch.zeros(4, dtype=torch.long), torch.zeros(1, 4), 4)
    tokens = [torch.zeros(n, dtype=torch.long) for n in (3, 9, 2, 2, 8, 8)]
    responses = [Response(i // 2, prompt, own) for i, own in enumerate(tokens)]
    parts = list(micro_batches(responses, 20, together=2))
    assert parts == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert [p.start for p in micro_batches(responses, 10)] != [0, 2, 4]
    assert list(micro_batches(responses, 100, together=2)) == [slice(0, 6)]


def test_responses_are_encoded_as_if_sampled(tmp_path):
    encoder = small_vlm.encoder(small_vlm.build())
    eos = small_vlm.EOS
    assert encoder.stop_token([77, eos]) == eos
    tokens = encoder.encode_response("ab", "row", eos)
    assert encoder.decode(tokens[:-1].tolist()) == "ab"
    assert tokens[-1] == eos
    assert torch.equal(encoder.encode_response("ab<|im_end|>", "row", eos), tokens)
    literal = encoder.encode_response("<|im_end|>b", "row", eos).tolist()
    assert literal.count(eos) == 1


def test_earlier_turns_are_part_of_the_prompt(tmp_path):
    small_vlm.questions(tmp_path)
    encoder = small_vlm.encoder(small_vlm.build(), question_format="Q: {question}")
    turns = (Turn("user", "<image>A?"), Turn("assistant", "a"))
    question = Question("B?", (tmp_path / "0.png",), where="row", history=turns)
    prompt = encoder.encode(question)
    text = encoder.tokenizer.decode([i for i in prompt.ids.tolist() if i != small_vlm.IMAGE])
    marks = "<|im_start|><|vision_start|><|vision_end|>"
    end = "<|im_end|><|im_start|>"
    assert text.replace(" ", "") == f"{marks}A?{end}a{end}Q:B?{end}"
    assert len(prompt.vision_inputs) == 1
    assert len(prompt) == encoder.prompt_length(question)


@pytest.mark.parametrize(
    ("loss", "field", "value"),
    [
        ("sft", "sample.group_size", 4),
        ("dpo", "sample.temperature", 0.5),
        ("kto", "train.advantage", "rloo"),
        ("sft", "train.clip_low", 0.1),
        ("sft", "train.beta", 0.1),
        ("dpo", "train.beta", 0.0),
        ("dpo", "train.aggregation", "token"),
        ("dpo", "train.desirable_weight", 2.0),
        ("clip", "response_key", "answer"),
    ],
)
def test_settings_without_an_effect_are_rejected(loss, field, value):
    config = get_config()
    config.update_from_flattened_dict({"train.loss": loss, field: value})
    with raises_user_error(field=field, value=value):
        check_config(config)


def test_checked_settings_can_be_checked_again():
    for loss in GIVEN_LOSSES:
        config = get_config()
        config.train.loss = loss
        checked = check_config(config)
        assert check_config(checked) == checked
        assert checked.train.beta == (0 if loss == "sft" else 0.1)


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return {
        "pretrained.model": str(small_vlm.save(folder / "model")),
        "dataset": str(small_vlm.write_given_data(folder / "data")),
        "logdir": str(folder / "logs"),
        "num_epochs": 1,
        "eval_freq": 1,
        "sample.max_new_tokens": 14,
        "sample.group_size": 8,  # the default
    }


def test_a_run_learns_the_demonstrations(fields):
    """Also in bf16, where sampled responses have other log-probabilities than given ones."""
    settings = {"train.loss": "sft", "train.learning_rate": 0.01, "num_epochs": 4}
    settings |= {"use_lora": False}
    session = vlm_runs.run(**{**fields, **settings}, mixed_precision="bf16", run_name="sft")
    lines = vlm_runs.read_metrics(session)
    assert lines[-1]["train/nll"] < 0.8 * lines[1]["train/nll"]
    assert lines[-1]["train/perplexity"] == pytest.approx(math.exp(lines[-1]["train/nll"]))
    assert 0 <= lines[-1]["train/mean_token_accuracy"] <= 1
    assert "reward/avg" not in lines[-1]
    assert all("eval/avg" in line for line in lines)
    assert session.progress.step == 8


def test_bad_sets_are_rejected(fields, tmp_path):
    with raises_user_error("train.jsonl:", "sample.max_new_tokens=3"):
        vlm_runs.run(**{**fields, "train.loss": "dpo", "sample.max_new_tokens": 3})
    with raises_user_error(field="dataset"):
        alone = {"dataset": f"{fields['dataset']}/train.jsonl"}
        vlm_runs.run(**{**fields, **alone, "train.loss": "dpo"})
    with raises_user_error(field="train.updates_per_epoch", value=4):
        vlm_runs.run(
            **{**fields, "train.loss": "dpo", "sample.questions_per_epoch": 6},
            **{"train.updates_per_epoch": 4},
        )
    with raises_user_error(field="sample.questions_per_epoch", value=2):
        vlm_runs.run(**{**fields, "train.loss": "kto", "sample.questions_per_epoch": 2})
    liked = [
        {"question": f"{i} + 1 = ?", "answer": "2", "completion": "2", "label": True}
        for i in range(9)
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in liked))
    with raises_user_error("liked", field="dataset"):
        vlm_runs.run(**{**fields, "train.loss": "kto", "dataset": str(tmp_path)})
