"""Advantage estimators improve the small VLM of the repository.

They are those that differ in more than a formula, which tests/test_advantages.py tests: REMAX has
greedy responses as its baseline, and PPO's GAE a value head.
"""

import json

import pytest
import train_vlm

from flow_grpo.vlm.config_checks import GAE
from flow_grpo.vlm.presets import get_config
from flow_grpo.vlm.session import VlmSession, build_session

# a smaller version of the preset: 2 epochs of 48 responses, a higher learning rate
FIELDS = {
    "device": "cpu",
    "eval_freq": 0,
    "eval_questions": 48,
    "log_images": 0,
    "num_epochs": 2,
    "sample.questions_per_epoch": 6,
    "train.learning_rate": 3e-4,
}


def make_session(logdir, **fields) -> VlmSession:
    config = get_config("tiny_vlm")
    config.update_from_flattened_dict(
        {**FIELDS, "logdir": str(logdir), "run_name": "run", **fields}
    )
    return build_session(config)


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> float:
    """Held-out reward of greedy responses before training."""
    session = make_session(tmp_path_factory.mktemp("before"))
    try:
        return train_vlm.run_evaluation(session, epoch=0)["eval/avg"]
    finally:
        session.close()


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "remax", GAE])
def test_an_estimator_improves_the_held_out_reward(before, advantage, tmp_path):
    """With the seeds that were tried, the reward rises by at least 0.5."""
    session = make_session(tmp_path, **{"train.advantage": advantage})
    session.progress.epoch = 0  # skip the evaluation before training, which is the same for all
    try:
        train_vlm.train(session)
    finally:
        session.close()
    *_, last = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert before <= 0.5
    assert last["eval/avg"] >= before + 0.2
    assert last["train/first_update_ratio_dev"] <= 1e-5
    assert ("train/value_loss" in last) == (advantage == GAE)
