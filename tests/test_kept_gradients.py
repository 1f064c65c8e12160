"""Gradients kept from the rollout: the same update, without a second forward pass."""

import logging
from types import SimpleNamespace

import exact_run
import numpy as np
import psutil
import pytest
import torch
from accelerate.utils import DistributedType
from methods import METHODS, method, move, taken
from ml_collections import ConfigDict
from train import count_passes, sample_epoch, train_epoch

from flow_grpo.draw.algorithms import ALGORITHMS
from flow_grpo.draw.algorithms.grpo import Grpo
from flow_grpo.draw.check import check, check_kept, unusual
from flow_grpo.draw.fields import get_config
from flow_grpo.draw.session import Session, build_algorithm, build_session
from flow_grpo.errors import UserError

KEPT = ("grpo", "grpo_guard", "dppo", "mix")
SMALL = {
    "max_sequence_length": 4,
    "sample.num_steps": 3,
    "sample.train_batch_size": 1,
    "sample.num_batches_per_epoch": 4,
    "sample.num_image_per_prompt": 2,
    "train.batch_size": 1,
    "train.gradient_accumulation_steps": 4,
    "train.max_grad_norm": 1e6,
    "grpo.beta": 0.0,
}
CREDIT = np.array([1.5, -0.7, 0.0, -9.0])  # the last one is cut


def settings(**fields) -> ConfigDict:
    config = get_config()
    config.update_from_flattened_dict({**exact_run.FIELDS, **SMALL, **fields})
    config.custom_rewards = ConfigDict({"light": "light:score"})
    config.reward_fn = ConfigDict({"light": 1.0})
    return config


def open_session(folder, dataset, family="sd3", **fields) -> Session:
    config = settings(logdir=str(folder), dataset=str(dataset), **fields)
    name = "kept" if config.train.keep_gradients else "plain"
    config.run_name = f"{name}-{len(list(folder.iterdir()))}"
    return build_session(config, load=lambda config, _: exact_run.load(family, config))


def one_update(session: Session) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient that the optimizer gets, and the metrics; from weights off the reference."""
    found = []

    def note(*_) -> None:
        found.append(torch.cat([p.grad.flatten() for p in session.policy.parameters()]))

    move(session.policy, torch.Generator().manual_seed(0), 0.2)
    session.optimizer.optimizer.register_step_pre_hook(note)
    try:
        samples = sample_epoch(session, 0)
        session.policy.count(sum(s.steps for s in samples))
        metrics = train_epoch(session, 0, samples, CREDIT)
    finally:
        session.close()
    [gradient] = found
    return gradient, {**metrics, "passes": count_passes(session)}


@pytest.mark.parametrize(
    ("family", "fields", "passes", "off"),
    [  # 4 samples in 3 steps, of which 2 are trained: of 3 samples where one has no credit
        ("sd3", {}, (4 * 3 + 3 * 2 * 3, 4 * 3 + 4 * 2 * 2), 1e-10),
        (
            "sd3",
            {"grpo.beta": 0.3, "anchors.norm_guard": 2.0, "train.gradient_checkpointing": True},
            (4 * 3 + 4 * 2 * 4, 4 * 3 + 4 * 2 * 5),
            1e-10,
        ),
        # sampling works out what its texts give once, without gradient; its norms are in float32
        ("qwen_image_21", {"resolution": 32}, (4 * 3 + 3 * 2 * 3, 4 * 3 + 4 * 2 * 2), 1e-6),
    ],
)
def test_the_gradient_is_that_of_the_plain_loop(
    family, fields, passes, off, tmp_path, prompt_folder
):
    """With guidance, so that a step takes two passes."""
    (plain, expected), (kept, found) = (
        one_update(open_session(tmp_path, prompt_folder, family, **fields, **switch))
        for switch in ({}, {"train.keep_gradients": True})
    )
    assert kept.dtype == torch.float64
    assert plain.norm() > 1e-4
    assert (kept - plain).abs().max() < off * plain.abs().max()
    assert (expected.pop("passes"), found.pop("passes")) == (2 * passes[0], 2 * passes[1])
    assert found.pop("train/first_update_ratio_dev") == 0.0
    assert expected.pop("train/first_update_ratio_dev") < 1e-12
    assert found == pytest.approx(expected, rel=off, abs=off)
    assert ("train/kl" in found) == ("grpo.beta" in fields)


def test_methods_that_say_so_are_linear_in_credit():
    assert {name for name in METHODS if ALGORITHMS[name].linear_in_credit} == {*KEPT}
    for name in KEPT:
        step = taken([0.0] * 4, [1.0, -2.0, 0.5, 0.0], std=0.3)
        loss, _ = method(name).surrogate(step)
        [slope] = torch.autograd.grad(loss.sum(), step.log_ratio, retain_graph=True)
        for found in (loss, slope):
            torch.testing.assert_close(found, step.credit * found[0], rtol=1e-12, atol=0)


def test_a_surrogate_of_your_own_has_to_say_so():
    def surrogate(self, taken):
        return -taken.credit.exp() * taken.log_ratio, {}

    own = type("Own", (Grpo,), {"name": "", "surrogate": surrogate})
    assert not own.linear_in_credit
    for name in ("hold", "policy_loss"):
        assert not type("Other", (Grpo,), {"name": "", name: None}).linear_in_credit
    assert not type("Further", (own,), {}).linear_in_credit
    assert type("Sure", (own,), {"linear_in_credit": True, "loss": None}).linear_in_credit
    assert type("Same", (Grpo,), {"name": ""}).linear_in_credit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"algorithm": "awm", "awm.times": 2},
            "train.keep_gradients=True does not go with algorithm='awm': it needs a gradient that "
            "is the credit times one of the sample alone; use grpo, mix, grpo_guard or dppo",
        ),
        (
            {"grpo.ratio": "trajectory"},
            "grpo.ratio='trajectory' has no effect with train.keep_gradients=True, whose ratios "
            "are all 1; leave it at 'step'",
        ),
        (
            {"train.gradient_accumulation_steps": 2},
            "train.keep_gradients=True needs one update an epoch, by the weights that sampled it, "
            "and here are 2; set train.num_inner_epochs=1 and train.gradient_accumulation_steps=4",
        ),
        (
            {"train.num_inner_epochs": 3},
            "train.keep_gradients=True needs one update an epoch, by the weights that sampled it, "
            "and here are 3; set train.num_inner_epochs=1 and train.gradient_accumulation_steps=4",
        ),
        (
            {"sample.train_batch_size": 2, "train.batch_size": 2},
            "train.keep_gradients=True takes the gradient of one sample at a time, so "
            "sample.train_batch_size=2 must be 1; where larger batches are faster, set it to False",
        ),
        (
            {"sample.async_depth": 1},
            "train.keep_gradients=True does not go with sample.async_depth=1, whose samples are by "
            "older weights than those that train; set it to 0",
        ),
        (
            {"anchors.kl_gate": 0.5, "grpo.beta": 0.1, "reward_fn": {"light": 1.0, "ocr": 0.0}},
            "train.keep_gradients=True does not go with anchors.kl_gate=0.5, which chooses whom "
            "the KL holds when all are drawn; set it to 0",
        ),
        (
            {"use_lora": False},
            "train.keep_gradients=True needs use_lora=True: it keeps a gradient of each sample",
        ),
    ],
)
def test_what_would_not_be_exact_is_refused_before_weights_load(fields, message, tmp_path):
    config = settings(logdir=str(tmp_path), **{"train.keep_gradients": True})
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError) as caught:
        build_session(config, load=lambda *_: pytest.fail("the model was loaded"))
    assert str(caught.value) == message


def test_engines_that_shard_are_refused():
    config = check(settings(**{"train.keep_gradients": True}))
    plan = SimpleNamespace(updates=1, sample_batch_size=1)
    for engine in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        with pytest.raises(UserError, match="does not go with DeepSpeed or FSDP; use plain data"):
            check_kept(
                config, build_algorithm(config), plan, SimpleNamespace(distributed_type=engine)
            )


def test_the_memory_is_told_and_too_much_refused(tmp_path, prompt_folder, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "flow_grpo")
    fields = {"train.keep_gradients": True}
    session = open_session(tmp_path, prompt_folder, **fields)
    session.close()
    numbers = sum(p.numel() for p in session.policy.parameters())
    told = f"4 x {8 * numbers / 2**20:.1f} MiB of LoRA"
    assert (
        f"{'kept gradients':<21} {told} = 0.0 GiB of the host's memory per process" in caplog.text
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**12))
    with pytest.raises(UserError) as caught:
        session.gradients.describe(4)
    assert str(caught.value) == (
        f"train.keep_gradients=True would keep {told} on each of 1 processes, and 0.0 GiB of this "
        "machine's memory are free; lower sample.num_batches_per_epoch or train.lora_rank"
    )


@pytest.mark.parametrize("name", ["grpo.beta", "anchors.norm_guard"])
def test_where_it_saves_no_time_it_is_told(name):
    told = "train.keep_gradients=True saves no time with a KL or anchors.norm_guard"
    plain, held = (
        unusual(settings(**{"train.keep_gradients": True, name: weight})) for weight in (0.0, 0.1)
    )
    assert [line.startswith(told) for line in held] == [True]
    assert plain == []
