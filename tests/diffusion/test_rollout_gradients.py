"""Rollout gradients (`train.keep_gradients`): the same update without a second forward pass."""

import logging
from types import SimpleNamespace

import float64_run
import numpy as np
import psutil
import pytest
import torch
from accelerate.utils import DistributedType
from algorithm_fixtures import METHODS, method, perturb, policy_step
from ml_collections import ConfigDict
from train import reduce_pass_count, sample_epoch, train_epoch
from user_errors import raises_user_error

from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.grpo import Grpo
from flow_grpo.diffusion.config_checks import (
    check_config,
    check_rollout_gradients,
    collect_config_warnings,
)
from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.session import Session, build_algorithm, build_session

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
CREDIT = np.array([1.5, -0.7, 0.0, -9.0])  # the last one is clipped


def settings(**fields) -> ConfigDict:
    config = get_config()
    config.update_from_flattened_dict({**float64_run.FIELDS, **SMALL, **fields})
    config.custom_rewards = ConfigDict({"light": "brightness_reward:score"})
    config.reward_fn = ConfigDict({"light": 1.0})
    return config


def open_session(folder, dataset, family="sd3", **fields) -> Session:
    config = settings(logdir=str(folder), dataset=str(dataset), **fields)
    name = "kept" if config.train.keep_gradients else "plain"
    config.run_name = f"{name}-{len(list(folder.iterdir()))}"
    return build_session(config, load=lambda config, _: float64_run.load(family, config))


def one_update(session: Session) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the optimizer's gradient and the metrics, from weights off the reference."""
    found = []

    def record(*_) -> None:
        found.append(torch.cat([p.grad.flatten() for p in session.policy.parameters()]))

    perturb(session.policy, torch.Generator().manual_seed(0), 0.2)
    session.optimizer.optimizer.register_step_pre_hook(record)
    try:
        samples = sample_epoch(session, 0)
        session.policy.count_passes(sum(s.sample_steps for s in samples))
        metrics = train_epoch(session, 0, samples, CREDIT)
    finally:
        session.close()
    [gradient] = found
    return gradient, {**metrics, "passes": reduce_pass_count(session)}


@pytest.mark.parametrize(
    ("family", "fields", "passes", "off"),
    [  # 4 samples of 3 steps, 2 of them trained; one sample without credit is skipped
        ("sd3", {}, (4 * 3 + 3 * 2 * 3, 4 * 3 + 4 * 2 * 2), 1e-10),
        (
            "sd3",
            {"grpo.beta": 0.3, "anchors.norm_guard": 2.0, "train.gradient_checkpointing": True},
            (4 * 3 + 4 * 2 * 4, 4 * 3 + 4 * 2 * 5),
            1e-10,
        ),
        # sampling precomputes the text inputs without gradient; its norms are in float32
        ("qwen_image_21", {"resolution": 32}, (4 * 3 + 3 * 2 * 3, 4 * 3 + 4 * 2 * 2), 1e-6),
    ],
)
def test_the_gradient_matches_the_plain_loop(family, fields, passes, off, tmp_path, prompt_folder):
    """With guidance, so that a step takes two passes."""
    plain, expected = one_update(open_session(tmp_path, prompt_folder, family, **fields))
    fields = {**fields, "train.keep_gradients": True}
    kept, found = one_update(open_session(tmp_path, prompt_folder, family, **fields))
    assert kept.dtype == torch.float64
    assert plain.norm() > 1e-4
    assert (kept - plain).abs().max() < off * plain.abs().max()
    assert (expected.pop("passes"), found.pop("passes")) == (2 * passes[0], 2 * passes[1])
    assert found.pop("train/first_update_ratio_dev") == 0.0
    assert expected.pop("train/first_update_ratio_dev") < 1e-12
    assert found == pytest.approx(expected, rel=off, abs=off)
    assert ("train/kl" in found) == ("grpo.beta" in fields)


def test_methods_declared_linear_in_credit_are():
    assert {name for name in METHODS if ALGORITHMS[name].linear_in_credit} == {*KEPT}
    for name in KEPT:
        step = policy_step([0.0] * 4, [1.0, -2.0, 0.5, 0.0], std=0.3)
        loss, _ = method(name).surrogate(step)
        [slope] = torch.autograd.grad(loss.sum(), step.log_ratio, retain_graph=True)
        for found in (loss, slope):
            torch.testing.assert_close(found, step.credit * found[0], rtol=1e-12, atol=0)


def test_a_custom_surrogate_must_declare_linearity():
    def surrogate(self, taken):
        return -taken.credit.exp() * taken.log_ratio, {}

    custom = type("Custom", (Grpo,), {"name": "", "surrogate": surrogate})
    assert not custom.linear_in_credit
    for name in ("add_regularization", "policy_loss"):
        assert not type("Other", (Grpo,), {"name": "", name: None}).linear_in_credit
    assert not type("Derived", (custom,), {}).linear_in_credit
    assert type("Declared", (custom,), {"linear_in_credit": True, "loss": None}).linear_in_credit
    assert type("Same", (Grpo,), {"name": ""}).linear_in_credit


KEEP = {"field": "train.keep_gradients", "value": True}


@pytest.mark.parametrize(
    ("fields", "error", "shown"),
    [
        ({"algorithm": "awm", "awm.times": 2}, KEEP, ["algorithm='awm'", "grpo_guard"]),
        ({"grpo.ratio": "trajectory"}, {"field": "grpo.ratio", "value": "trajectory"}, ["'step'"]),
        (
            {"train.gradient_accumulation_steps": 2},
            KEEP,
            ["2; ", "train.num_inner_epochs=1", "train.gradient_accumulation_steps=4"],
        ),
        (
            {"train.num_inner_epochs": 3},
            KEEP,
            ["3; ", "train.num_inner_epochs=1", "train.gradient_accumulation_steps=4"],
        ),
        (
            {"sample.train_batch_size": 2, "train.batch_size": 2},
            KEEP,
            ["sample.train_batch_size=2"],
        ),
        ({"sample.async_depth": 1}, KEEP, ["sample.async_depth=1"]),
        (
            {"anchors.kl_gate": 0.5, "grpo.beta": 0.1, "reward_fn": {"light": 1.0, "ocr": 0.0}},
            KEEP,
            ["anchors.kl_gate=0.5"],
        ),
        ({"use_lora": False}, KEEP, ["use_lora=True"]),
    ],
)
def test_inexact_settings_are_rejected_before_weights_load(fields, error, shown, tmp_path):
    config = settings(logdir=str(tmp_path), **{"train.keep_gradients": True})
    config.update_from_flattened_dict(fields)
    with raises_user_error(*shown, **error):
        build_session(config, load=lambda *_: pytest.fail("the model was loaded"))


def test_sharding_engines_are_rejected():
    config = check_config(settings(**{"train.keep_gradients": True}))
    plan = SimpleNamespace(updates=1, sample_batch_size=1)
    for engine in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        accelerator = SimpleNamespace(distributed_type=engine)
        with raises_user_error("DeepSpeed", "FSDP", **KEEP):
            check_rollout_gradients(config, build_algorithm(config), plan, accelerator)


def test_memory_is_logged_and_too_much_is_rejected(tmp_path, prompt_folder, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "flow_grpo")
    fields = {"train.keep_gradients": True}
    session = open_session(tmp_path, prompt_folder, **fields)
    session.close()
    numbers = sum(p.numel() for p in session.policy.parameters())
    size = f"4 x {8 * numbers / 2**20:.1f} MiB"
    [line] = [line for line in caplog.messages if size in line]
    assert "0.0 GiB" in line
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**12))
    with raises_user_error(size, "1 processes", "0.0 GiB", "train.lora_rank", **KEEP):
        session.rollout_gradients.describe_memory(4)


@pytest.mark.parametrize("name", ["grpo.beta", "anchors.norm_guard"])
def test_a_warning_is_given_where_it_saves_no_time(name):
    plain, regularized = (
        collect_config_warnings(
            check_config(settings(**{"train.keep_gradients": True, name: weight}))
        )
        for weight in (0.0, 0.1)
    )
    assert plain == []
    [line] = regularized
    assert line.startswith("train.keep_gradients=True ")
    assert "anchors.norm_guard" in line
