"""Whole runs of scripts/train_vlm.py on a small random model."""

import json
import math
import re
from fractions import Fraction
from itertools import cycle
from pathlib import Path
from typing import Any

import answer_runs
import numpy as np
import pytest
import small_vlm
import torch
import train_vlm
from planted import renew_manifest
from safetensors.torch import load_file

from flow_grpo.answer import fields, presets
from flow_grpo.answer.batches import PackedBatch
from flow_grpo.answer.check import check
from flow_grpo.answer.credit import Fixed
from flow_grpo.answer.critic import split_saved_groups
from flow_grpo.answer.losses import AGGREGATIONS, KINDS
from flow_grpo.answer.losses.base import Counts
from flow_grpo.answer.objective import Objective
from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.answer.rollout import BASELINE, ENDED, LENGTH, Rollout
from flow_grpo.answer.session import build_session, lighter_settings
from flow_grpo.errors import UserError
from flow_grpo.files import dotted
from flow_grpo.speed.lora import lora_layers
from flow_grpo.speed.low_bits import LowBitLinear


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("answers")
    model, data = small_vlm.save(folder / "model"), small_vlm.small_data(folder / "data")
    return {"pretrained.model": str(model), "dataset": str(data)}


@pytest.fixture
def run(places, tmp_path):
    def run(**fields: Any):
        return answer_runs.run(**{**places, "logdir": str(tmp_path), **fields})

    return run


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("precision", "most"), [("nf4", 1e-5), ("fp8", 0.1)])
def test_frozen_weights_may_have_few_bits(run, precision, most):
    """In 8 bits inputs are rounded too, so that the last bits of a token by itself and of one in
    its row may differ by a whole step."""
    session = run(num_epochs=1, **{"pretrained.base_precision": precision, "train.beta": 0.1})
    layers = [layer.base_layer for layer in lora_layers(session.policy.network)]
    assert any(isinstance(layer, LowBitLinear) for layer in layers)  # some are too narrow here
    assert metrics_of(session.folder)[-1]["train/first_update_ratio_dev"] <= most


def test_a_run_leaves_what_the_image_trainer_leaves(run):
    whole = run(num_epochs=2, eval_freq=1, **{"train.ema": True}).folder
    lines = metrics_of(whole)
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert lines[-1]["step"] == 4
    expected = {"reward/avg", "reward/mine", "reward/std_within_group", "reward/zero_std_ratio"}
    expected |= {f"train/{name}" for name in ("loss", "policy_loss", "grad_norm", "lr")}
    expected |= {f"train/{name}" for name in ("ratio_mean", "clip_low", "clip_high", "approx_kl")}
    expected |= {"answer/length", "answer/cut_off", "time/sample", "time/train", "eval/avg"}
    assert expected <= lines[-1].keys()
    for line in lines[1:]:
        assert line["train/first_update_ratio_dev"] <= 1e-5
    for kind in ("train-00002", "eval-00002"):
        rows = (whole / "samples" / kind / "samples.jsonl").read_text().splitlines()
        assert len(rows) == (4 if kind.startswith("train") else 2)  # a whole group, log_images
        for row in map(json.loads, rows):
            assert {"prompt", "answer", "truth", "mine", "avg"} <= row.keys()
            assert ("file" in row) == (row["prompt"] != "What is 1+2?")
    config = json.loads((whole / "config.json").read_text())
    assert config["sample"]["group_size"] == 4
    lora = load_file(whole / "checkpoints/latest/lora/adapter_model.safetensors")
    assert any(weight.any() for name, weight in lora.items() if "lora_B" in name)
    assert not any("visual" in name for name in lora)  # the tower is frozen unless told


def test_the_moving_average_is_evaluated(run):
    fields = {"train.ema": True, "train.ema_update_interval": 1, "train.learning_rate": 0.03}
    session = run(num_epochs=2, eval_questions=4, log_images=4, **fields)

    def answers() -> list[str]:
        rows = list(range(4))
        prompts = session.answerer.encode(session.test_questions, rows)
        with session.answerer.awake():
            return [sample.text for sample in session.answerer.answer(prompts, rows)]

    shown = (session.folder / "samples/eval-00002/samples.jsonl").read_text().splitlines()
    shown = [json.loads(line)["answer"] for line in shown]
    assert answers() != shown
    with session.averaged():
        assert answers() == shown


@pytest.mark.parametrize(("loss", "aggregation"), [*zip(KINDS, cycle(AGGREGATIONS), strict=False)])
def test_every_loss_trains(run, loss, aggregation):
    fields = {"train.loss": loss, "train.aggregation": aggregation}
    fields |= {"train.dual_clip": 0.0 if loss == "cispo" else 3.0}
    fields |= {"train.recompute_old": True, "train.beta": 0.01, "num_epochs": 1}
    fields |= {"train.tokens_per_batch": 60, "train.gradient_checkpointing": True}
    line = metrics_of(run(**fields).folder)[-1]
    assert line["train/first_update_ratio_dev"] == 0  # where old log-probabilities are recomputed
    assert line["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("use_lora", "fields"),
    [
        (True, {"reward": "flat_for_some"}),  # some micro-batches have no gradient
        (False, {"train.beta": 0.01, "train.advantage": "gae"}),
    ],
)
def test_half_precision_trains_weights_in_float32(run, use_lora, fields):
    fields = {**fields, "mixed_precision": "bf16", "use_lora": use_lora}
    session = run(**fields, num_epochs=1, **{"train.tokens_per_batch": 100})
    line = metrics_of(session.folder)[-1]
    # old log-probabilities are recomputed, in the same micro-batches
    assert line["train/first_update_ratio_dev"] == 0
    assert line["answer/engine_dev"] > 0
    assert line["train/grad_norm"] > 0
    assert {p.dtype for p in session.policy.parameters()} == {torch.float32}
    frozen = {p.dtype for p in session.policy.network.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}


def test_a_run_starts_from_a_lora(run):
    first = run(run_name="first", num_epochs=1)
    lora = str(first.folder / "checkpoints/latest/lora")
    second = run(run_name="second", num_epochs=1, **{"train.lora_path": lora})
    after, before = metrics_of(first.folder)[-1], metrics_of(second.folder)[0]
    assert before["eval/avg"] == pytest.approx(after["eval/avg"], abs=1e-6)
    start, end = (
        load_file(f"{lora}/adapter_model.safetensors"),
        load_file(second.folder / "checkpoints/latest/lora/adapter_model.safetensors"),
    )
    assert start.keys() == end.keys()
    assert any(not torch.equal(start[name], end[name]) for name in start)
    with pytest.raises(UserError, match="cannot be loaded as a LoRA of this model"):
        run(run_name="third", **{"train.lora_path": str(first.folder)})


def test_the_reference_is_the_lora_that_the_run_started_from(run, tmp_path):
    """Not the base without it, nor what a resumed run loads. Words first, then pictures."""
    words = {"dataset": str(small_vlm.sums(tmp_path / "sums")), "train.learning_rate": 0.03}
    first = run(run_name="first", num_epochs=1, **words)
    lora = first.folder / "checkpoints/latest/lora"
    fields = {"train.lora_path": str(lora), "train.beta": 0.1, "train.updates_per_epoch": 1}
    whole = run(run_name="whole", num_epochs=2, **fields)
    _, start, moved = metrics_of(whole.folder)
    assert start["train/kl"] == 0
    assert moved["train/kl"] > 0
    run(run_name="half", num_epochs=1, **fields)
    (lora / "adapter_model.safetensors").write_bytes(
        (whole.folder / "checkpoints/latest/lora/adapter_model.safetensors").read_bytes()
    )
    half = run(run_name="half", num_epochs=2, resume="auto", **fields)
    assert metrics_of(half.folder)[-1]["train/kl"] == moved["train/kl"]


def test_micro_batches_do_not_change_the_run(run):
    """Nor how many answers are sampled together."""
    one = run(run_name="one", num_epochs=1)
    two = run(
        run_name="two", num_epochs=1, **{"train.tokens_per_batch": 50, "sample.batch_size": 3}
    )
    first, second = metrics_of(one.folder)[-1], metrics_of(two.folder)[-1]
    assert first["reward/avg"] == second["reward/avg"]
    assert first["train/loss"] == pytest.approx(second["train/loss"], abs=1e-6)
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-3)


@pytest.fixture
def trained(monkeypatch) -> list[tuple[list[Fixed], PackedBatch, Counts]]:
    """What the losses of a run are given."""
    calls, usual = [], Objective.loss

    def watched(objective, batch, scores, fixed, counts):
        calls.append((fixed, batch, counts))
        return usual(objective, batch, scores, fixed, counts)

    monkeypatch.setattr(Objective, "loss", watched)
    return calls


@pytest.mark.parametrize(
    ("questions", "flat"),
    [(2, 0), (8, 0.5)],  # with others to take instead, and without
)
def test_groups_without_spread_are_refilled_and_never_trained(
    run, trained, questions, flat, monkeypatch
):
    """Not even for the KL, which would pull at them too."""
    fields = {"reward": "flat_for_some", "sample.questions_per_epoch": questions}
    fields |= {"sample.refills": 3, "train.beta": 0.01}
    keys, sample_generators = [], train_vlm.sample_generators

    def watched(seed, epoch, index):
        keys.extend(index)
        return sample_generators(seed, epoch, index)

    monkeypatch.setattr(train_vlm, "sample_generators", watched)
    line = metrics_of(run(num_epochs=1, **fields).folder)[-1]
    assert len(keys) == len(set(keys))  # no answer takes the random numbers of another
    assert len(keys) > 8
    assert line["answer/refilled"] * 4 == len(keys) - 4 * questions
    assert line["reward/zero_std_ratio"] == flat
    learnt = [own for fixed, _, _ in trained for own in fixed]
    assert len(learnt) == 4 * questions * (1 - flat)
    assert all(own.advantages.any() for own in learnt)
    assert len({own.advantages[0].item() for own in learnt}) > 4
    for _, _, counts in trained:  # nor are they counted
        own = [batch.mask for _, batch, same in trained if same is counts]
        assert counts == Counts(sum(m.sum().item() for m in own), sum(map(len, own)))


@pytest.mark.parametrize(("refills", "epochs"), [(1, 2), (3, 1)])
def test_a_run_goes_on_while_there_are_questions_that_it_did_not_draw(run, refills, epochs, caplog):
    """Of 8, an epoch draws 2 and two more for each refill."""
    fields = {"reward": "same_for_all", "sample.questions_per_epoch": 2, "sample.refills": refills}
    with caplog.at_level("INFO", logger="flow_grpo"):
        session = run(num_epochs=2, state_freq=9, **fields)
    assert metrics_of(session.folder)[-1]["epoch"] == epochs
    assert session.progress.step == 0
    ends = "there is nothing left to learn from, so training ends here" in caplog.text
    assert ends == (epochs == 1)
    assert session.progress.kept  # as the last checkpoint of any run


AT_ONCE = {"most_at_once": 8}


def test_refills_take_other_questions_while_there_are_any():
    plan = AnswerPlan(1, questions=3, group_size=2, updates_per_pass=1, inner_epochs=1, **AT_ONCE)
    rollout = Rollout.draw(plan, [(5, Fraction(1))], seed=1, epoch=0)
    first = rollout.rows.copy()
    rollout.keep_groups_with(np.array([-1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    assert rollout.learns.tolist() == [True, True, False, False, False, False]
    assert rollout.updates().tolist() == [rollout.learns.tolist()]
    rollout.prompts = dict.fromkeys(first.tolist())
    assert rollout.refill().tolist() == [2, 3, 4, 5]
    assert list(rollout.prompts) == [first[0]]  # pictures of the others would fill the memory
    assert rollout.rows[0] == first[0]
    assert sorted({*first, *rollout.rows}) == list(range(5))
    assert rollout.has_drawn_all
    assert rollout.refill().tolist() == []  # none is left
    assert rollout.refilled == 2


@pytest.mark.parametrize(
    ("advantage", "rewards", "kept"),
    [
        ("grpo", [0, 1, 1, 1, math.nan, 1], [True, False, False]),
        ("rloo", [0, 1, 0, 0, 1, 1], [True, False, False]),
        ("remax", [0, 1, 1, 1, 0, 0], [True, True, False]),  # a greedy answer scores 0
        ("reinforce_pp", [1, 1, 0, 0, 0.5, 0.5], [True, True, False]),  # compared with all
    ],
)
def test_groups_with_advantages_are_kept(run, advantage, rewards, kept, monkeypatch):
    """Also those whose rewards are all the same, where the estimator compares with others."""
    found, refill = [], Rollout.refill

    def scored(accelerator, index, scores):
        columns = {"avg": rewards, "mine": rewards, LENGTH: [5] * 6, ENDED: [1] * 6}
        columns |= {BASELINE: [0] * 6} if advantage == "remax" else {}
        return {name: np.array(values, float)[index] for name, values in columns.items()}

    def watched(rollout):
        found.append(rollout.learns[::2].tolist())
        return refill(rollout)

    monkeypatch.setattr(train_vlm, "gather_scores", scored)
    monkeypatch.setattr(Rollout, "refill", watched)
    monkeypatch.setattr(train_vlm, "run_evaluation", lambda *_, **__: {})
    fields = {"sample.questions_per_epoch": 3, "sample.group_size": 2, "sample.refills": 1}
    fields |= {"train.updates_per_epoch": 1, "max_failed_fraction": 0.5, "log_images": 0}
    run(num_epochs=1, **fields, **{"train.advantage": advantage})
    assert found == [kept]


@pytest.fixture
def drawn(monkeypatch) -> list[list[int]]:
    """The questions of each epoch, after its refills."""
    epochs, sample_epoch = [], train_vlm.sample_epoch

    def watched(session, epoch, timer):
        rollout = sample_epoch(session, epoch, timer)
        epochs.append(rollout.rows.tolist())
        return rollout

    monkeypatch.setattr(train_vlm, "sample_epoch", watched)
    return epochs


def test_a_resumed_run_draws_the_questions_that_are_left(run, drawn, caplog):
    """Of 8, an epoch draws 3 and as many more as it refills: half of them score alike."""
    fields = {"reward": "flat_for_some", "sample.questions_per_epoch": 3, "sample.refills": 1}
    fields |= {"train.updates_per_epoch": 1}
    session = run(run_name="whole", num_epochs=3, **fields)
    [state] = session.progress.questions
    assert state["taken"] > 9  # questions that were replaced count
    whole = drawn.copy()
    assert len({tuple(rows) for rows in whole}) == 3
    drawn.clear()
    for epochs in (1, 3):
        run(run_name="parts", num_epochs=epochs, resume="auto", **fields)
    assert drawn == whole
    assert "a new pass" not in caplog.text
    checkpoint = (session.folder / "checkpoints/latest").resolve()
    path = checkpoint / "state/progress.json"
    progress = json.loads(path.read_text())
    del progress["questions"]  # as of older versions
    path.write_text(json.dumps(progress))
    renew_manifest(checkpoint)
    drawn.clear()
    run(run_name="whole", num_epochs=4, resume="auto", **fields)
    assert "a new pass" in caplog.text
    assert len(drawn) == 1


def test_processes_share_the_samples_of_each_update():
    def shares(processes: int) -> list[list[int]]:
        plan = AnswerPlan(processes, 4, 4, updates_per_pass=2, inner_epochs=1, most_at_once=3)
        rollout = Rollout.draw(plan, [(8, Fraction(1))], seed=1, epoch=0)
        return [rollout.own(p, np.arange(16)) for p in range(processes)]

    assert shares(1) == [list(range(16))]
    assert shares(2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("samples", "most", "size"),
    [(16, 3, 3), (16, 16, 16), (16, 99, 16), (62, 30, 21), (127, 64, 64)],
)
def test_batches_are_about_equal_whether_or_not_they_divide(samples, most, size):
    plan = AnswerPlan(1, samples, 1, updates_per_pass=1, inner_epochs=1, most_at_once=most)
    assert plan.batch_size == size
    assert plan.batches == -(-samples // most)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train.loss": "ppo"}, f"train.loss='ppo' must be one of {', '.join(map(repr, KINDS))}"),
        ({"train.advantage": "vine"}, "train.advantage='vine' must be one of"),
        ({"train.dual_clip": 1.1}, "train.dual_clip=1.1 must be above 1 + train.clip_high=1.2"),
        ({"sample.group_size": 1}, "sample.group_size=1 leaves train.advantage='grpo' nothing"),
        ({"sample.temperature": 0.0}, "sample.temperature=0.0 must be at least 0.01"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' must be one of 'no', 'bf16'"),
        ({"sample.refills": 1, "train.advantage": "gae"}, "sample.refills=1 is incompatible"),
        ({"train.beta": 0.1, "train.kl": "k1"}, "train.kl='k1' is incompatible with train.kl_in"),
        ({"train.critic_warmup": 1}, "train.critic_warmup=1 has no effect with train.advantage"),
        ({"train.critic_learning_rate": 1e-4}, "train.critic_learning_rate=0.0001 has no effect"),
        (
            {"train.advantage": "gae", "train.critic_warmup": 4, "num_epochs": 4},
            "train.critic_warmup=4 must be below num_epochs=4",
        ),
        (
            {"train.advantage": "gdpo", "train.beta": 0.01, "train.kl_in": "reward"},
            "train.kl_in='reward' does not go with train.advantage='gdpo'",
        ),
        (
            {"train.loss": "gspo", "train.clip_high": 0.3},
            "train.clip_low=0.0003 and train.clip_high=0.3 never hold a ratio of "
            "train.loss='gspo'; use --config.train.clip_low=0.0003 --config.train.clip_high=0.0004 "
            "--config.train.aggregation=sequence",
        ),
        ({"train.loss": "cispo", "train.dual_clip": 3.0}, "train.dual_clip=3.0 does not go with"),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels=9 must be at most max_pixels=4"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_wrong_settings_are_told_in_one_line(fields, message):
    with pytest.raises(UserError) as told:
        check(answer_runs.config_of(**fields))
    assert str(told.value).startswith(message)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("kl_in", "kl", "used", "warned"),
    [
        ("loss", None, "k3", False),
        ("reward", None, "k1", False),
        ("loss", "k2", "k2", False),
        ("reward", "k3", "k3", True),
        ("reward", "k2", "k2", True),
    ],
)
def test_the_estimator_of_the_kl_goes_with_its_place(kl_in, kl, used, warned, caplog):
    given = {"train.beta": 0.1, "train.kl_in": kl_in, **({"train.kl": kl} if kl else {})}
    assert check(answer_runs.config_of(**given)).train.kl == used
    assert ("does not give the gradient of the KL" in caplog.text) == warned


@pytest.mark.parametrize("name", ["", *presets.PRESETS])
def test_presets_hold_to_the_rules(name):
    config = presets.get_config(name)
    check(config)
    for processes in (1, 2, 4, 8):
        plan = AnswerPlan(
            processes,
            config.sample.questions_per_epoch,
            config.sample.group_size,
            config.train.updates_per_epoch,
            config.train.num_inner_epochs,
            config.sample.batch_size,
        )
        assert plan.batch_size * processes <= plan.samples


@pytest.mark.parametrize("name", sorted({"", *presets.PRESETS} - {"tiny_text", "tiny_vlm"}))
def test_who_answers_as_the_prompt_asks_has_the_whole_reward(places, tmp_path, name):
    """Who answers with the truth alone has none, so nobody gets there without being asked."""
    config = presets.get_config(name)
    config.update_from_flattened_dict(
        {**places, "logdir": str(tmp_path), "device": "cpu", "mixed_precision": "no"}
        | {"sample.max_new_tokens": 10, "sample.questions_per_epoch": 8}
        | dict.fromkeys(("max_prompt_length", "min_pixels", "max_pixels"), 0)
    )
    session = build_session(config)
    try:
        question = session.questions[0]
        prompt = session.answerer.encode(session.questions, [0])[0]
        asked = session.answerer.encoder.decode(prompt.ids)
        *thinking, last = re.findall(r"<\w+>|\\boxed{", asked)
        ends = {"<think>": "</think>", "<answer>": "</answer>", "\\boxed{": "}"}
        said = "".join(f"{tag}so{ends[tag]}" for tag in thinking) + last + question.answer
        scores = session.reward(
            [said + ends[last], question.answer], ["", ""], [question.metadata] * 2
        )
    finally:
        session.close()
    assert scores["avg"].tolist() == [1, 0]


def test_every_field_has_a_reason():
    known = fields.ANSWER.reasons()
    names = [name for name, _ in dotted(fields.get_config().to_dict())]
    without = [n for n in names if not known.get(n) and not n.startswith("reward_")]
    assert not without
    assert known["train.clip_high"].startswith("The ratio is held within")


def test_a_preset_that_is_not_there_is_told():
    with pytest.raises(UserError, match=r"unknown preset 'tiny_vml'.* did you mean tiny_vlm\?"):
        presets.get_config("tiny_vml")


def test_numbers_that_do_not_divide_are_told(run):
    with pytest.raises(UserError, match=r"16 samples per epoch = .* do not divide into"):
        run(**{"train.updates_per_epoch": 3})
    with pytest.raises(UserError, match="has 8 questions to train on but an epoch needs 9"):
        run(**{"sample.questions_per_epoch": 9, "train.updates_per_epoch": 1})
    with pytest.raises(UserError, match=r"train.jsonl.* has .* tokens, more than max_prompt"):
        run(max_prompt_length=12)
    with pytest.raises(UserError, match="do not fit into the model's 256 positions"):
        run(**{"sample.max_new_tokens": 300})


def test_the_value_head_learns_the_reward(run):
    fields = {"train.advantage": "gae", "train.value_weight": 1.0, "train.lr_scheduler": "linear"}
    session = run(num_epochs=2, **fields, **{"train.critic_learning_rate": 4e-3})
    assert session.policy.network.value.bias.item() > 0
    lines = metrics_of(session.folder)
    assert math.isfinite(lines[-1]["train/value_loss"])
    assert lines[1]["train/first_update_ratio_dev"] <= 1e-5
    for line in lines[1:]:  # the same schedule from another learning rate
        assert line["train/critic_lr"] == pytest.approx(4 * line["train/lr"])
    assert lines[2]["train/lr"] < lines[1]["train/lr"]


def test_in_its_warmup_the_value_head_alone_is_trained(run):
    """Weight decay and the KL would move the other weights too, and Adam would count the steps."""
    fields = {"train.advantage": "gae", "train.critic_warmup": 1, "train.adam_weight_decay": 0.5}
    fields |= {"train.beta": 0.1, "num_epochs": 2, "save_freq": 1, "use_lora": False}
    session = run(**fields)
    _, first, second = metrics_of(session.folder)
    assert first["train/critic_lr"] == second["train/critic_lr"] == pytest.approx(9e-6)  # LMM-R1's
    assert first["train/lr"] == 0
    assert second["train/lr"] == 1e-3
    assert first["train/kl"] == 0
    assert first["train/grad_norm"] > 0
    states = [session.folder / f"checkpoints/checkpoint-{step}/state" for step in (2, 4)]
    start = {f"model.{name}": p for name, p in small_vlm.build().named_parameters()}
    warm, trained = (load_file(state / "trained.safetensors") for state in states)
    changed = {n for n, w in warm.items() if not torch.equal(w, start.get(n, torch.zeros_like(w)))}
    assert changed == {"value.weight", "value.bias"}
    assert all(not torch.equal(weight, warm[name]) for name, weight in trained.items())
    assert len(torch.load(states[0] / "optimizer.bin")["state"]) == 2


def test_a_checkpoint_without_a_group_for_the_value_head_is_resumed(caplog):
    def optimizer(*groups: list[int]) -> torch.optim.AdamW:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(2, generator=generator, requires_grad=True) for _ in range(4)]
        own = torch.optim.AdamW([{"params": [weights[i] for i in each]} for each in groups])
        own.register_load_state_dict_pre_hook(split_saved_groups)
        return own

    def step(optimizer: torch.optim.AdamW) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for number, weight in enumerate(weights):
            weight.grad = torch.full((2,), number - 1.5)
        optimizer.step()

    old, new = optimizer([0, 1, 2, 3]), optimizer([0, 1], [2, 3])
    step(old)
    step(new)
    assert not caplog.text
    fresh = optimizer([0, 1], [2, 3])
    fresh.load_state_dict(old.state_dict())
    assert "train.critic_learning_rate" in caplog.text
    saved = fresh.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2, 3]]
    for number, state in new.state_dict()["state"].items():
        assert torch.equal(saved["state"][number]["exp_avg"], state["exp_avg"])


def test_advice_for_less_memory_names_settings_that_are_allowed():
    usual = lighter_settings(answer_runs.config_of())
    assert usual[0] == "--config.sample.batch_size=64 --config.train.tokens_per_batch=8192"
    least = {"sample.batch_size": 1, "train.gradient_checkpointing": True}
    assert lighter_settings(answer_runs.config_of(**least)) == [usual[0].split()[1]]
