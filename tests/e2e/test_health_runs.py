"""Short runs provoke each health warning."""

import logging
import sys
from pathlib import Path

import degenerate_rewards
import pytest
from ml_collections import ConfigDict
from sessions import short_config

from flow_grpo.diffusion.session import build_session
from flow_grpo.report.health import CHECKS, Finding, run_checks
from flow_grpo.report.run_reader import read_metrics
from flow_grpo.training.session import run_training

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train import train

SMALL = {"resolution": 32, "height": 0, "width": 0}
QUICK = {"eval_prompts": 1, "eval_freq": 0, "save_freq": 0, "log_images": 0}
ONE_BATCH = {  # two groups of four
    "sample.train_batch_size": 8,
    "sample.num_batches_per_epoch": 1,
    "sample.num_image_per_prompt": 4,
    "train.batch_size": 8,
    "train.gradient_accumulation_steps": 1,
}

# Reward functions of degenerate_rewards.py, their options, config fields, expected health messages
RUNS = {
    "narrow clip range, sudden reward, weights modified between sampling and training": (
        {"bright": "Bright"},
        {"levels": [0.0] * 4, "scales": [1e-12, 1e-12, 1e-12, 1.0], "nudge": 1e-3},
        {
            "sample.train_batch_size": 4,
            "sample.noise_level": 0.05,
            "sample.guidance_scale": 1.0,
            "train.batch_size": 4,
            "train.num_inner_epochs": 5,
            "train.learning_rate": 1.5e-3,
            "train.clip_range": 1e-7,
            "train.max_grad_norm": 1e-3,
            "train.beta": 1e-4,
            "train.kl_type": "gaussian",
        },
        {
            "on-policy ratios": "on-policy ratios ",
            "clip shares": "of the losses were clipped",
            "KL": "the KL to the reference jumped from",
            "gradient norm": "times its median so far",
        },
    ),
    "wide clip range, saturated reward": (
        {"bright": "Bright"},
        {"levels": [0.0, 0.0, 9.0, 9.0, 9.0], "scales": [1.0, 1.0, 0.0, 0.0, 0.0]},
        {
            "train.num_inner_epochs": 3,
            "train.learning_rate": 0.5,
            "train.clip_range": 1.0,
            "train.beta": 1e-4,
            "train.kl_type": "velocity",
        },
        {
            "ratio drift": "more than 1.0e-02",
            "velocity norm": "velocit",
            "norm against the reference": "reference",
            "KL": "the KL to the reference is",
            "flat groups": "to 9: ",
        },
    ),
    "tiny reward, then a small trust region of dppo, then a constant reward": (
        {"bright": "Bright"},
        {"levels": [0.0] * 5, "scales": [1e-35, 1.0, 0.0, 0.0, 0.0]},
        {
            "algorithm": "dppo",
            "dppo.delta": 1e-12,
            "dppo.beta": 0.0,
            "train.num_inner_epochs": 5,
            "train.learning_rate": 0.01,
        },
        {
            "gradient norm": "the gradient is 0",
            "clip shares": "of the losses were masked",
            "flat groups": "100% of the groups",
        },
    ),
    "reward for blank images, and a failing reward": (
        {"white": "white", "dark": "dark", "failing": "every_fourth_fails"},
        {},
        {
            "pretrained.model": "assets/tiny-sd3",
            "resolution": 0,
            "height": 32,
            "width": 96,
            "max_failed_fraction": 0.5,
            "sample.guidance_scale": 1.0,
            "algorithm": "awm",
            "awm.times": 2,
            "awm.old_beta": 0.1,
            "awm.kl_beta": 0.0,
            "anchors.norm_guard": 1e-6,
            "anchors.reset_epochs": 1,
            "sample.num_batches_per_epoch": 2,
            "sample.num_image_per_prompt": 8,
            "train.num_inner_epochs": 2,
            "train.learning_rate": 3e-3,
        },
        {
            "failed rewards": "4 of 16 samples could not be scored, most of them by reward/failing",
            "diversity": "the reward may be hacked",
            "second reward": "while reward/dark fell from",
            "reference resets": "reset in 3 epochs",
        },
    ),
}


@pytest.fixture
def run_findings(tmp_path, tiny_sd3, caplog):
    """Function that trains with two prompts and returns the findings of the health checks."""

    def run(rewards: dict[str, str], options: dict, fields: dict) -> list[Finding]:
        for split in ("train", "test"):
            (tmp_path / f"{split}.txt").write_text('a sign that says "ACE"\na sign of "OAK"\n')
        config = short_config(tmp_path, "run")
        files = {"pretrained.model": str(tiny_sd3), "dataset": str(tmp_path), **SMALL}
        config.update_from_flattened_dict({**files, **QUICK, **ONE_BATCH, **fields})
        config.eval_reward_fn = config.reward_fn
        weights = {name: 0.1**i for i, name in enumerate(rewards)}
        weights |= {"dark": 0.0} if "dark" in weights else {}  # held out: only logged
        config.reward_fn = ConfigDict(weights)
        config.custom_rewards = ConfigDict(
            {n: f"degenerate_rewards:{f}" for n, f in rewards.items()}
        )
        config.reward_options = ConfigDict({name: options for name in rewards if options})
        config.num_epochs = len(options.get("levels", "four"))
        with caplog.at_level(logging.WARNING, "flow_grpo"):
            session = build_session(config)
            degenerate_rewards.TRAINED[:] = session.policy.parameters()
            run_training(session, train, advice=[])
        rows = read_metrics(tmp_path / "run")
        assert all(row["train/velocity_norm"] > 0 for row in rows[1:])
        return run_checks(rows)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_each_finding_is_logged_once_with_advice(run_findings, caplog, name):
    rewards, options, fields, expected = RUNS[name]
    found = run_findings(rewards, options, fields)
    logged = [message for message in caplog.messages if message.startswith("health, ")]
    assert sorted(logged) == sorted(f"health, epoch {f.epoch}: {f.text}; {f.advice}" for f in found)
    texts = {finding.check: finding.text for finding in found}
    for check, words in expected.items():
        assert words in texts.get(check, ""), texts


def test_these_runs_provoke_every_check():
    """Except those that need many epochs, pairs or NaN gradients (tests/report/test_health.py)."""
    provoked = {check for *_, expected in RUNS.values() for check in expected}
    elsewhere = {"past the best", "falling reward", "skipped updates", "preferred images"}
    assert provoked == {*CHECKS} - elsewhere
