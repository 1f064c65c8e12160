"""Whole runs of scripts/train_vlm.py on a small random model."""

import json
import math
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import small_vlm
import torch
import train_vlm
import vlm_runs
from malicious_files import rewrite_manifest
from runner import ROOT
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer
from user_errors import raises_user_error

from flow_grpo.perf.lora import lora_layers
from flow_grpo.perf.quantization import QuantizedLinear
from flow_grpo.untrusted_files import flatten_fields
from flow_grpo.vlm import fields, presets
from flow_grpo.vlm.adaptive_kl import current_kl_weight, next_kl_weight, update_kl_weight
from flow_grpo.vlm.advantages import ResponseTensors
from flow_grpo.vlm.builders import memory_saving_options
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.critic import split_saved_param_groups
from flow_grpo.vlm.losses import AGGREGATIONS, BUILT_IN_LOSSES, LOSS_NAMES
from flow_grpo.vlm.losses.base import UpdateCounts
from flow_grpo.vlm.objective import Objective
from flow_grpo.vlm.packing import PackedBatch, Response, pack_responses
from flow_grpo.vlm.plan import VlmBatchPlan
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.rollout import BASELINE, EOS_REACHED, LENGTH, Rollout, RolloutEngine
from flow_grpo.vlm.separate_critic import check_critic_model
from flow_grpo.vlm.session import VlmSession, build_session


@pytest.fixture
def run(model_and_data, tmp_path):
    def run(**fields: Any):
        return vlm_runs.run(**{**model_and_data, "logdir": str(tmp_path), **fields})

    return run


@pytest.mark.parametrize(("precision", "limit"), [("nf4", 1e-5), ("fp8", 0.1)])
def test_frozen_weights_may_be_quantized(run, precision, limit):
    """FP8 also rounds the inputs, so a last-bit difference may grow to a quantization step."""
    session = run(num_epochs=1, **{"pretrained.base_precision": precision, "train.beta": 0.1})
    layers = [layer.base_layer for layer in lora_layers(session.policy.network)]
    assert any(
        isinstance(layer, QuantizedLinear) for layer in layers
    )  # narrow layers are not quantized
    assert vlm_runs.read_metrics(session)[-1]["train/first_update_ratio_dev"] <= limit


def test_a_run_writes_metrics_samples_config_and_checkpoints(run, monkeypatch):
    gathered, gather = [], train_vlm.gather_object
    monkeypatch.setattr(train_vlm, "gather_object", lambda x: gathered.append(x) or gather(x))
    fields = {"train.ema": True, "sample.engine": "auto"}  # without vLLM
    session = run(num_epochs=2, eval_freq=1, eval_questions=3, **fields)
    # processes exchange the logged responses only
    assert [[row for row, _ in own] for own in gathered] == [[0, 1]] * 3
    whole = session.folder
    lines = vlm_runs.read_metrics(session)
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
    assert config["sample"]["engine"] == "auto"  # a resumed run chooses again
    assert type(session.rollout_engine) is RolloutEngine
    lora = load_file(whole / "checkpoints/latest/lora/adapter_model.safetensors")
    assert any(weight.any() for name, weight in lora.items() if "lora_B" in name)
    assert not any("visual" in name for name in lora)  # the tower is frozen by default


def test_evaluation_uses_the_ema_weights(run):
    fields = {"train.ema": True, "train.ema_update_interval": 1, "train.learning_rate": 0.03}
    session = run(num_epochs=2, eval_questions=4, log_images=4, **fields)

    def greedy_responses() -> list[str]:
        rows = list(range(4))
        prompts = session.rollout_engine.encode(session.test_questions, rows)
        with session.rollout_engine.generation_mode():
            return [sample.text for sample in session.rollout_engine.generate(prompts, rows)]

    shown = (session.folder / "samples/eval-00002/samples.jsonl").read_text().splitlines()
    shown = [json.loads(line)["answer"] for line in shown]
    assert greedy_responses() != shown
    with session.ema_weights():
        assert greedy_responses() == shown


@pytest.mark.parametrize(
    ("loss", "aggregation"), [*zip(LOSS_NAMES, cycle(AGGREGATIONS), strict=False)]
)
def test_every_loss_trains(run, loss, aggregation):
    fields = {"train.loss": loss, "train.aggregation": aggregation}
    fields |= {"train.dual_clip": 3.0 if loss in ("clip", "gspo") else 0.0}
    fields |= {"train.recompute_old": True, "train.beta": 0.01, "num_epochs": 1}
    fields |= {"train.tokens_per_batch": 60, "train.gradient_checkpointing": True}
    line = vlm_runs.read_metrics(run(**fields))[-1]
    assert line["train/first_update_ratio_dev"] == 0  # where old log-probabilities are recomputed
    assert line["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("use_lora", "fields"),
    [
        (True, {"reward": "constant_for_some"}),  # some micro-batches have no gradient
        (False, {"train.beta": 0.01, "train.advantage": "gae"}),
    ],
)
def test_half_precision_trains_weights_in_float32(run, use_lora, fields):
    fields = {**fields, "mixed_precision": "bf16", "use_lora": use_lora}
    session = run(**fields, num_epochs=1, **{"train.tokens_per_batch": 100})
    line = vlm_runs.read_metrics(session)[-1]
    # old log-probabilities are recomputed, in the same micro-batches
    assert line["train/first_update_ratio_dev"] == 0
    assert line["answer/engine_dev"] > 0
    assert line["train/grad_norm"] > 0
    assert {p.dtype for p in session.policy.parameters()} == {torch.float32}
    frozen = {p.dtype for p in session.policy.network.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}


@pytest.mark.parametrize("updates", [1, 4])
def test_the_first_update_yields_its_own_old_log_probs(run, monkeypatch, updates):
    """Other updates need a forward pass before it; weights are as if all had one."""
    fields = {"exact": True, "num_epochs": 1, "train.recompute_old": True}
    fields |= {"train.updates_per_epoch": updates, "train.num_inner_epochs": 2}
    responses, forward = [], VlmPolicy.forward_tokens_no_grad

    def counted(policy, batch, **settings):
        responses[-1] += len(batch.row)
        return forward(policy, batch, **settings)

    def run_and_count(name: str) -> tuple[dict, dict]:
        responses.append(0)
        session = run(run_name=name, **fields)
        lora = session.folder / "checkpoints/latest/lora/adapter_model.safetensors"
        return vlm_runs.read_metrics(session)[-1], load_file(lora)

    monkeypatch.setattr(VlmPolicy, "forward_tokens_no_grad", counted)
    line, lora = run_and_count("first")
    compute = train_vlm.compute_old_log_probs
    monkeypatch.setattr(
        train_vlm,
        "compute_old_log_probs",
        lambda session, rollout, tensors, _: compute(session, rollout, tensors, rollout.updates()),
    )
    before, expected = run_and_count("before")
    assert responses[0] * updates == pytest.approx(responses[1] * (updates - 1), abs=updates * 4)
    assert (responses[0] == 0) == (updates == 1)
    assert responses[1] > responses[0]
    assert line["train/first_update_ratio_dev"] == before["train/first_update_ratio_dev"] == 0
    assert line["train/ratio_max"] > 1
    assert line["train/entropy"] == pytest.approx(before["train/entropy"], rel=1e-6)
    for name, weight in lora.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-6)


def test_a_run_starts_from_a_lora(run):
    first = run(run_name="first", num_epochs=1)
    lora = str(first.folder / "checkpoints/latest/lora")
    second = run(run_name="second", num_epochs=1, **{"train.lora_path": lora})
    after, before = vlm_runs.read_metrics(first)[-1], vlm_runs.read_metrics(second)[0]
    assert before["eval/avg"] == pytest.approx(after["eval/avg"], abs=1e-6)
    start, end = (
        load_file(f"{lora}/adapter_model.safetensors"),
        load_file(second.folder / "checkpoints/latest/lora/adapter_model.safetensors"),
    )
    assert start.keys() == end.keys()
    assert any(not torch.equal(start[name], end[name]) for name in start)
    with raises_user_error(first.folder, "LoRA"):
        run(run_name="third", **{"train.lora_path": str(first.folder)})


def test_the_reference_is_the_initial_lora(run, tmp_path):
    """Neither the base model without LoRA nor the LoRA that a resumed run would load now."""
    text_only = {
        "dataset": str(small_vlm.write_text_data(tmp_path / "sums")),
        "train.learning_rate": 0.03,
    }
    first = run(run_name="first", num_epochs=1, **text_only)
    lora = first.folder / "checkpoints/latest/lora"
    fields = {"train.lora_path": str(lora), "train.beta": 0.1, "train.updates_per_epoch": 1}
    whole = run(run_name="whole", num_epochs=2, **fields)
    _, start, moved = vlm_runs.read_metrics(whole)
    assert start["train/kl"] == 0
    assert moved["train/kl"] > 0
    run(run_name="half", num_epochs=1, **fields)
    (lora / "adapter_model.safetensors").write_bytes(
        (whole.folder / "checkpoints/latest/lora/adapter_model.safetensors").read_bytes()
    )
    half = run(run_name="half", num_epochs=2, resume="auto", **fields)
    assert vlm_runs.read_metrics(half)[-1]["train/kl"] == moved["train/kl"]


def test_batch_sizes_of_sampling_and_training_do_not_change_the_run(run):
    one = run(run_name="one", num_epochs=1)
    two = run(
        run_name="two", num_epochs=1, **{"train.tokens_per_batch": 50, "sample.batch_size": 3}
    )
    first, second = vlm_runs.read_metrics(one)[-1], vlm_runs.read_metrics(two)[-1]
    assert first["reward/avg"] == second["reward/avg"]
    assert first["train/loss"] == pytest.approx(second["train/loss"], abs=1e-6)
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-3)


@pytest.fixture
def trained(monkeypatch) -> list[tuple[list[ResponseTensors], PackedBatch, UpdateCounts]]:
    """Record the arguments of each call of `Objective.loss`."""
    calls, original = [], Objective.loss

    def watched(objective, batch, scores, fixed, counts):
        calls.append((fixed, batch, counts))
        return original(objective, batch, scores, fixed, counts)

    monkeypatch.setattr(Objective, "loss", watched)
    return calls


@pytest.mark.parametrize(
    ("questions", "flat"),
    [(2, 0), (8, 0.5)],  # with and without undrawn questions
)
def test_groups_without_advantages_are_refilled_and_not_trained(
    run, trained, questions, flat, monkeypatch
):
    """The KL penalty does not include them either."""
    fields = {"reward": "constant_for_some", "sample.questions_per_epoch": questions}
    fields |= {"sample.refills": 3, "train.beta": 0.01}
    keys, sample_generators = [], train_vlm.sample_generators

    def watched(seed, epoch, index):
        keys.extend(index)
        return sample_generators(seed, epoch, index)

    monkeypatch.setattr(train_vlm, "sample_generators", watched)
    line = vlm_runs.read_metrics(run(num_epochs=1, **fields))[-1]
    assert len(keys) == len(set(keys))  # random numbers are not reused
    assert len(keys) > 8
    assert line["answer/refilled"] * 4 == len(keys) - 4 * questions
    assert line["reward/zero_std_ratio"] == flat
    trained_tensors = [own for fixed, _, _ in trained for own in fixed]
    assert len(trained_tensors) == 4 * questions * (1 - flat)
    assert all(own.advantages.any() for own in trained_tensors)
    assert len({own.advantages[0].item() for own in trained_tensors}) > 4
    for _, _, counts in trained:  # they are not counted either
        own = [batch.mask for _, batch, same in trained if same is counts]
        assert counts == UpdateCounts(sum(m.sum().item() for m in own), sum(map(len, own)))


@pytest.mark.parametrize(("refills", "epochs"), [(1, 2), (3, 1)])
def test_a_run_without_advantages_ends_once_all_questions_were_drawn(run, refills, epochs, caplog):
    """An epoch draws 2 of the 8 questions, and 2 more per refill."""
    fields = {
        "reward": "constant_reward",
        "sample.questions_per_epoch": 2,
        "sample.refills": refills,
    }
    with caplog.at_level("INFO", logger="flow_grpo"):
        session = run(num_epochs=2, state_freq=9, **fields)
    assert vlm_runs.read_metrics(session)[-1]["epoch"] == epochs
    assert session.progress.step == 0
    assert ("all questions were drawn" in caplog.text) == (epochs == 1)
    assert session.progress.kept  # a final checkpoint was written


def scored_rollout(**scores: list[float]) -> Rollout:
    """Return an epoch of three groups of two samples."""
    plan = VlmBatchPlan(1, 3, 2, 1, 1, 8)
    return Rollout(plan, np.arange(3), scores={name: np.array(own) for name, own in scores.items()})


def test_groups_are_filtered_by_the_mean_of_a_reward():
    """The bounds are exclusive, failed samples are ignored, and groups stay excluded."""
    rollout = scored_rollout(mine=[0.1, 0.3, 0.5, math.nan, math.nan, math.nan])
    rollout.keep_groups_within("mine", 0.15, 0.5)
    assert rollout.is_trained.tolist() == [True, True, False, False, False, False]
    rollout.keep_groups_within("mine", 0.0, 1.0)
    assert rollout.is_trained.tolist() == [True, True, False, False, False, False]
    rollout.keep_groups_within("mine", 0.2, 1.0)
    assert not rollout.is_trained.any()


def test_filtered_groups_are_refilled_and_not_trained(run, trained):
    """Half of the rewards are constant; means of the others are below 0.3."""
    fields = {"reward": "constant_for_some", "sample.questions_per_epoch": 2, "train.beta": 0.01}
    fields |= {"sample.refills": 1, "sample.filter_reward": "avg", "sample.filter_high": 1e-6}
    fields |= {"sample.filter_low": 0.0}
    line = vlm_runs.read_metrics(run(num_epochs=1, **fields))[-1]
    assert not trained
    assert line["answer/refilled"] == 2
    assert "train/loss" not in line


def test_truncated_responses_are_scored_but_not_trained(run, trained):
    """Tokens of truncated responses are not counted either."""
    fields = {"train.mask_truncated": True, "sample.max_new_tokens": 12, "num_epochs": 1}
    line = vlm_runs.read_metrics(run(**fields))[-1]
    cut_off = round(line["answer/cut_off"] * 16)
    assert 0 < cut_off < 16
    masks = [mask for _, batch, _ in trained for mask in batch.mask]
    assert 0 < len(masks) <= 16 - cut_off
    assert all(mask.sum() <= 12 for mask in masks)
    assert sum(counts.responses for counts in {id(c): c for *_, c in trained}.values()) == (
        16 - cut_off
    )


def test_an_epoch_of_truncated_responses_makes_no_update_and_does_not_end_the_run(run, caplog):
    fields = {"train.mask_truncated": True, "sample.max_new_tokens": 1, "num_epochs": 2}
    with caplog.at_level("INFO", logger="flow_grpo"):
        session = run(**fields, **{"sample.questions_per_epoch": 8})
    assert session.progress.step == 0
    assert vlm_runs.read_metrics(session)[-1]["epoch"] == 2
    assert "has a zero advantage or is truncated" in caplog.text


def test_next_kl_weight_by_hand():
    """The relative error of the KL is limited to 20 %."""
    rule = {"target": 0.1, "horizon": 1000.0, "samples": 100}
    for kl, expected in [(0.11, 2.02), (0.5, 2.04), (0.095, 1.99), (-1.0, 1.96), (0.1, 2.0)]:
        assert next_kl_weight(2.0, kl, **rule) == pytest.approx(expected)
    for kl in (math.nan, math.inf):
        assert next_kl_weight(2.0, kl, **rule) == 2.0
    # a short horizon does not make the weight negative
    assert next_kl_weight(2.0, 0.0, **{**rule, "horizon": 1.0}) == pytest.approx(1.6)


def test_the_adapted_kl_weight_restarts_if_beta_changes():
    train, state = fields.VlmTrainConfig(beta=0.5, kl_target=0.1), {}
    update_kl_weight(train, state, {"train/kl": 1.0}, samples=10_000)
    assert current_kl_weight(train, state) == pytest.approx(0.6)
    assert current_kl_weight(replace(train, beta=0.2), state) == 0.2


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_kl_weight_adapts_and_is_resumed(run, kl_in):
    """A resumed run continues with the adapted weight of an uninterrupted run."""
    fields = {"train.beta": 0.5, "train.kl_in": kl_in, "train.kl_target": 1e-4}
    fields |= {"train.kl_horizon": 16.0, "train.learning_rate": 0.01, "state_freq": 1}
    whole = vlm_runs.read_metrics(run(num_epochs=3, **fields, run_name="whole"))
    weights = [line["train/kl_weight"] for line in whole if "train/kl_weight" in line]
    steps = [line["train/kl"] for line in whole if "train/kl" in line]
    assert weights[0] == 0.5
    for before, after, kl in zip(weights, weights[1:], steps, strict=False):
        error = min(max(kl / 1e-4 - 1, -0.2), 0.2)
        assert after == pytest.approx(before * (1 + error))
    assert len(set(weights)) == 3
    run(num_epochs=2, **fields)
    resumed = vlm_runs.read_metrics(run(num_epochs=3, **fields, resume="auto"))[-1]
    assert resumed["train/kl_weight"] == weights[-1]
    assert resumed["train/loss"] == whole[-1]["train/loss"]


def test_refills_draw_new_questions_while_there_are_any():
    plan = VlmBatchPlan(
        1, questions=3, group_size=2, updates_per_pass=1, inner_epochs=1, max_batch_size=8
    )
    rollout = Rollout.draw(plan, [(5, Fraction(1))], seed=1, epoch=0)
    first = rollout.rows.copy()
    rollout.keep_groups_with_advantage(np.array([-1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    assert rollout.is_trained.tolist() == [True, True, False, False, False, False]
    assert rollout.updates().tolist() == [rollout.is_trained.tolist()]
    rollout.prompts = dict.fromkeys(first.tolist())
    assert rollout.refill().tolist() == [2, 3, 4, 5]
    assert list(rollout.prompts) == [first[0]]  # the others are freed with their images
    assert rollout.rows[0] == first[0]
    assert sorted({*first, *rollout.rows}) == list(range(5))
    assert rollout.all_questions_drawn
    assert rollout.refill().tolist() == []  # no question is left
    assert rollout.refilled == 2


@pytest.mark.parametrize(
    ("advantage", "rewards", "kept"),
    [
        ("grpo", [0, 1, 1, 1, math.nan, 1], [True, False, False]),
        ("rloo", [0, 1, 0, 0, 1, 1], [True, False, False]),
        ("remax", [0, 1, 1, 1, 0, 0], [True, True, False]),  # greedy responses score 0
        (
            "reinforce_pp",
            [1, 1, 0, 0, 0.5, 0.5],
            [True, True, False],
        ),  # compared with the whole batch
    ],
)
def test_groups_with_advantages_are_kept(run, advantage, rewards, kept, monkeypatch):
    """Including groups of equal rewards, if the estimator does not compare within groups."""
    found, refill = [], Rollout.refill

    def scored(accelerator, index, scores):
        columns = {"avg": rewards, "mine": rewards, LENGTH: [5] * 6, EOS_REACHED: [1] * 6}
        columns |= {BASELINE: [0] * 6} if advantage == "remax" else {}
        return {name: np.array(values, float)[index] for name, values in columns.items()}

    def watched(rollout):
        found.append(rollout.is_trained[::2].tolist())
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
    """Record the questions of each epoch after its refills."""
    epochs, sample_epoch = [], train_vlm.sample_epoch

    def watched(session, epoch, timer):
        rollout = sample_epoch(session, epoch, timer)
        epochs.append(rollout.rows.tolist())
        return rollout

    monkeypatch.setattr(train_vlm, "sample_epoch", watched)
    return epochs


def test_a_resumed_run_continues_the_pass_over_the_questions(run, drawn, caplog):
    """An epoch draws 3 of 8 questions and refills the half of them with equal rewards."""
    fields = {
        "reward": "constant_for_some",
        "sample.questions_per_epoch": 3,
        "sample.refills": 1,
    }
    fields |= {"train.updates_per_epoch": 1}
    session = run(run_name="whole", num_epochs=3, **fields)
    [state] = session.progress.questions
    assert state["taken"] > 9  # replaced questions count
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
    del progress["questions"]  # as in checkpoints of earlier versions
    path.write_text(json.dumps(progress))
    rewrite_manifest(checkpoint)
    drawn.clear()
    run(run_name="whole", num_epochs=4, resume="auto", **fields)
    assert "a new pass" in caplog.text
    assert len(drawn) == 1


def test_each_process_samples_an_equal_part_of_each_update():
    def indices(processes: int) -> list[list[int]]:
        plan = VlmBatchPlan(processes, 4, 4, updates_per_pass=2, inner_epochs=1, max_batch_size=3)
        rollout = Rollout.draw(plan, [(8, Fraction(1))], seed=1, epoch=0)
        return [rollout.process_indices(p, np.arange(16)) for p in range(processes)]

    assert indices(1) == [list(range(16))]
    assert indices(2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("samples", "limit", "size"),
    [(16, 3, 3), (16, 16, 16), (16, 99, 16), (62, 30, 21), (127, 64, 64)],
)
def test_batches_have_about_equal_sizes(samples, limit, size):
    plan = VlmBatchPlan(1, samples, 1, updates_per_pass=1, inner_epochs=1, max_batch_size=limit)
    assert plan.batch_size == size
    assert plan.batches == -(-samples // limit)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"train.loss": "ppo"},
            f"train.loss='ppo' must be one of {', '.join(map(repr, BUILT_IN_LOSSES))}",
        ),
        ({"train.advantage": "vine"}, "train.advantage='vine' must be one of"),
        ({"train.dual_clip": 1.1}, "train.dual_clip=1.1 must be above 1 + train.clip_high=1.2"),
        ({"sample.group_size": 1}, "sample.group_size=1 must be at least 2"),
        ({"sample.temperature": 0.0}, "sample.temperature=0.0 must be at least 0.01"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' must be one of 'no', 'bf16'"),
        ({"sample.refills": 1, "train.advantage": "gae"}, "sample.refills=1 is incompatible"),
        ({"train.beta": 0.1, "train.kl": "k1"}, "train.kl='k1' is incompatible with train.kl_in"),
        ({"train.critic_warmup": 1}, "train.critic_warmup=1 "),
        ({"train.critic_learning_rate": 1e-4}, "train.critic_learning_rate=0.0001 "),
        (
            {"train.advantage": "gae", "train.critic_warmup": 4, "num_epochs": 4},
            "train.critic_warmup=4 must be below num_epochs=4",
        ),
        (
            {"train.advantage": "gdpo", "train.beta": 0.01, "train.kl_in": "reward"},
            "train.kl_in='reward' is incompatible with train.advantage='gdpo'",
        ),
        (
            {"train.loss": "gspo", "train.clip_high": 0.3},
            "train.clip_high=0.3 must be at most",
        ),
        ({"train.loss": "cispo", "train.dual_clip": 3.0}, "train.dual_clip=3.0 is incompatible"),
        ({"image_dir": "no/such"}, "image_dir='no/such' is not a directory"),
        ({"chat_template": "none.jinja"}, "chat_template='none.jinja' is neither a file nor a"),
        ({"response_turns": "all"}, "response_turns='all' "),
        ({"train.kl_target": 0.1}, "train.kl_target=0.1 "),
        (
            {"sample.refills": 1, "sample.filter_reward": "other"},
            "sample.filter_reward='other' is not a reward of the run; choose one of mine, avg",
        ),
        (
            {"sample.refills": 1, "sample.filter_reward": "avg", "sample.filter_low": 1.0},
            "sample.filter_low=1.0 must be below sample.filter_high=0.99",
        ),
        ({"sample.filter_reward": "avg"}, "sample.filter_reward='avg' "),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels=9 must be at most max_pixels=4"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_invalid_settings_are_rejected(fields, message):
    """Asserts the field, its value and the start of the rule, as several rules share a field."""
    with raises_user_error() as caught:
        check_config(vlm_runs.make_config(**fields))
    assert str(caught.value).startswith(message)


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
def test_default_kl_estimator_depends_on_kl_in(kl_in, kl, used, warned, caplog):
    given = {"train.beta": 0.1, "train.kl_in": kl_in, **({"train.kl": kl} if kl else {})}
    assert check_config(vlm_runs.make_config(**given)).train.kl == used
    assert ("train.kl='k1'" in caplog.text) == warned


@pytest.mark.parametrize("name", ["", *presets.PRESETS])
def test_presets_are_valid(name):
    config = presets.get_config(name)
    check_config(config)
    for processes in (1, 2, 4, 8):
        plan = VlmBatchPlan(
            processes,
            config.sample.questions_per_epoch,
            config.sample.group_size,
            config.train.updates_per_epoch,
            config.train.num_inner_epochs,
            config.sample.batch_size,
        )
        assert plan.batch_size * processes <= plan.samples


# the prompts of the small models do not name the tags of the final answer
ONLINE = [n for n in presets.PRESETS if not n.startswith("tiny_")]


@pytest.mark.parametrize("name", ["", *ONLINE])
def test_the_requested_format_gets_the_full_reward(model_and_data, tmp_path, name):
    """The bare reference answer gets none, so the format has to be learned."""
    config = presets.get_config(name)
    config.update_from_flattened_dict(
        {**model_and_data, "logdir": str(tmp_path), "device": "cpu", "mixed_precision": "no"}
        | {"sample.max_new_tokens": 10, "sample.questions_per_epoch": 8}
        | dict.fromkeys(("max_prompt_length", "min_pixels", "max_pixels"), 0)
    )
    session = build_session(config)
    try:
        question = session.questions[0]
        prompt = session.rollout_engine.encode(session.questions, [0])[0]
        prompt_text = session.rollout_engine.encoder.decode(prompt.ids)
        *thinking, last = re.findall(r"<\w+>|\\boxed{", prompt_text)
        ends = {"<think>": "</think>", "<answer>": "</answer>", "\\boxed{": "}"}
        response = "".join(f"{tag}so{ends[tag]}" for tag in thinking) + last + question.answer
        scores = session.reward(
            [response + ends[last], question.answer], ["", ""], [question.metadata] * 2
        )
    finally:
        session.close()
    assert scores["avg"].tolist() == [sum(config.reward_fn.values()), 0]


def test_every_field_has_a_help_text():
    known = fields.VLM_SPEC.help_texts()
    names = [name for name, _ in flatten_fields(fields.get_config().to_dict())]
    assert not [n for n in names if not known.get(n) and not n.startswith("reward_")]


def test_an_unknown_preset_is_rejected():
    with raises_user_error("'tiny_vml'", "tiny_vlm"):
        presets.get_config("tiny_vml")


def test_inconsistent_sizes_are_rejected(run):
    with raises_user_error("16 samples", field="train.updates_per_epoch", value=3):
        run(**{"train.updates_per_epoch": 3})
    with raises_user_error("has 8 training questions", " 9 "):
        run(**{"sample.questions_per_epoch": 9, "train.updates_per_epoch": 1})
    with raises_user_error("train.jsonl", "max_prompt_length=12"):
        run(max_prompt_length=12)
    with raises_user_error("256", field="sample.max_new_tokens", value=300):
        run(**{"sample.max_new_tokens": 300})
    with raises_user_error(
        "sample.max_new_tokens=200", "256", field="max_prompt_length", value=100
    ):
        run(**{"sample.max_new_tokens": 200, "max_prompt_length": 100})


def test_the_value_head_is_trained_with_its_own_learning_rate(run):
    fields = {"train.advantage": "gae", "train.value_weight": 1.0, "train.lr_scheduler": "linear"}
    session = run(num_epochs=2, **fields, **{"train.critic_learning_rate": 4e-3})
    assert session.policy.network.value.bias.item() > 0
    lines = vlm_runs.read_metrics(session)
    assert math.isfinite(lines[-1]["train/value_loss"])
    assert lines[1]["train/first_update_ratio_dev"] <= 1e-5
    for line in lines[1:]:  # the same schedule, another learning rate
        assert line["train/critic_lr"] == pytest.approx(4 * line["train/lr"])
    assert lines[2]["train/lr"] < lines[1]["train/lr"]


def test_critic_warmup_trains_only_the_value_head(run):
    """Neither weight decay, nor the KL, nor Adam's step counts affect the other weights."""
    fields = {"train.advantage": "gae", "train.critic_warmup": 1, "train.adam_weight_decay": 0.5}
    fields |= {"train.beta": 0.1, "num_epochs": 2, "save_freq": 1, "use_lora": False}
    session = run(**fields)
    _, first, second = vlm_runs.read_metrics(session)
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


SEPARATE = {"train.advantage": "gae", "train.critic": "separate", "save_freq": 1}


def saved_weights(session: VlmSession, step: int) -> dict[str, Tensor]:
    state = session.folder / f"checkpoints/checkpoint-{step}/state"
    return load_file(state / "trained.safetensors")


def test_a_separate_critic_is_trained_alone_in_its_warmup_and_resumed(run):
    fields = {**SEPARATE, "train.critic_warmup": 1, "train.adam_weight_decay": 0.5}
    fields |= {"use_lora": False, "run_name": "whole"}
    session = run(num_epochs=2, **fields)
    warm, trained = saved_weights(session, 2), saved_weights(session, 4)
    start = {f"model.{name}": weight for name, weight in small_vlm.build().named_parameters()}
    assert {name for name in warm if not name.startswith("value.")} <= start.keys()
    for name, weight in warm.items():
        inner = name.removeprefix("value.network.")  # the critic starts from the policy's weights
        before = torch.zeros_like(weight) if name.startswith("value.head") else start[inner]
        assert torch.equal(weight, before) != name.startswith("value."), name
    assert not [name for name in warm if "lm_head" in name or "visual" in name]
    assert all(not torch.equal(weight, warm[name]) for name, weight in trained.items())
    assert vlm_runs.read_metrics(session)[1]["train/lr"] == 0
    moments = torch.load(session.folder / "checkpoints/checkpoint-2/state/optimizer.bin")["state"]
    assert len(moments) == sum(name.startswith("value.") for name in warm)
    checkpoint = str(session.folder / "checkpoints/checkpoint-2")  # after the warm-up
    resumed = run(num_epochs=2, **{**fields, "run_name": "resumed"}, resume=checkpoint)
    for name, weight in saved_weights(resumed, 4).items():
        assert torch.equal(weight, trained[name]), name


def test_the_gradients_of_a_separate_critic_are_clipped_separately(run):
    """A larger value loss changes neither the policy's gradients nor how they are clipped."""
    fields = {**SEPARATE, "num_epochs": 1, "train.max_grad_norm": 1e-3}
    weights = [
        saved_weights(run(**fields, **{"train.value_weight": w}, run_name=str(w)), 2)
        for w in (0.1, 10.0)
    ]
    policy = [name for name in weights[0] if not name.startswith("value.")]
    assert policy
    for name in policy:
        assert torch.equal(weights[0][name], weights[1][name]), name
    head = "value.head.weight"
    assert not torch.equal(weights[0][head], weights[1][head])


def test_a_separate_critic_has_the_values_of_its_own_model(tmp_path):
    """The critic replaces a token that only the policy's embeddings have with another one."""
    policy = VlmPolicy(
        small_vlm.build(), processors=[], critic_model=small_vlm.build(seed=1), use_lora=False
    )
    nn.init.normal_(policy.network.value.head.weight)
    encoder = small_vlm.encoder(policy.model)
    question, tokens = small_vlm.questions(tmp_path)[1], torch.tensor([40, 50, small_vlm.EOS])
    prompt = encoder.encode(question)
    batch = pack_responses([Response(0, prompt, tokens)] * 2, small_vlm.PAD)
    values = policy.forward_tokens(batch)["values"]
    images = {name: x for name, x in prompt.vision_inputs[0].items() if name != "seconds_per_grid"}
    ids = torch.cat([prompt.ids, tokens])[None]
    with torch.no_grad():
        stock = small_vlm.build(seed=1).model(
            input_ids=ids, mm_token_type_ids=(ids == small_vlm.IMAGE).int(), **images
        )
        expected = policy.network.value.head(stock.last_hidden_state[0, len(prompt) - 1 : -1])[:, 0]
    torch.testing.assert_close(values, expected.expand(2, -1), rtol=0, atol=1e-5)
    values.sum().backward()
    critic, other = policy.network.value, policy.network.model
    assert critic.network.model.model.language_model.norm.weight.grad.any()
    assert all(p.grad is None or not p.grad.any() for p in other.parameters())


def test_a_critic_that_cannot_read_the_inputs_is_rejected_before_loading(run, tmp_path):
    other = small_vlm.save(tmp_path / "other", "qwen2_5_vl")
    fields = {**SEPARATE, "train.critic_model": str(other)}
    with raises_user_error("model_type='qwen2_5_vl'", field="train.critic_model"):
        run(**fields)
    with raises_user_error("nowhere", field="train.critic_model"):
        run(**{**fields, "train.critic_model": "./nowhere"})
    shrunk = small_vlm.build()
    shrunk.resize_token_embeddings(50)
    shrunk.save_pretrained(tmp_path / "shrunk")
    with raises_user_error("tokenizer", field="train.critic_model"):
        run(**{**fields, "train.critic_model": str(tmp_path / "shrunk")})
    small_vlm.build_tokenizer().save_pretrained(tmp_path / "shrunk")
    with raises_user_error("50 token embeddings", field="train.critic_model"):
        run(**{**fields, "train.critic_model": str(tmp_path / "shrunk")})


def test_a_critic_with_another_vocabulary_is_rejected(tmp_path):
    """Further special tokens, such as for padding, are fine."""
    text, enhancer = (str(ROOT / "assets" / name) for name in ("tiny-text", "tiny-enhancer"))
    for policy, critic in ((text, enhancer), (enhancer, text)):
        with raises_user_error("vocabulary", "None", field="train.critic_model", value=critic):
            check_critic_model(policy, critic)
    shutil.copytree(text, tmp_path / "padded")
    tokenizer = AutoTokenizer.from_pretrained(text)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "padded")
    check_critic_model(text, str(tmp_path / "padded"))
    with raises_user_error("'[PAD]'", field="train.critic_model", value=text):
        check_critic_model(str(tmp_path / "padded"), text)


def test_an_optimizer_checkpoint_with_one_parameter_group_is_split(caplog):
    def optimizer(*groups: list[int]) -> torch.optim.AdamW:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(2, generator=generator, requires_grad=True) for _ in range(4)]
        own = torch.optim.AdamW([{"params": [weights[i] for i in each]} for each in groups])
        own.register_load_state_dict_pre_hook(split_saved_param_groups)
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


def test_memory_saving_options_are_valid_settings():
    default = memory_saving_options(vlm_runs.make_config())
    assert default[0] == "--config.sample.batch_size=64 --config.train.tokens_per_batch=8192"
    least = {"sample.batch_size": 1, "train.gradient_checkpointing": True}
    assert memory_saving_options(vlm_runs.make_config(**least)) == [default[0].split()[1]]
