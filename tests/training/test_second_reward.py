"""The setting `second_reward`: a reward that only evaluations compute."""

import json

import pytest
from ml_collections import ConfigDict
from sessions import short_config
from train import train
from user_errors import raises_user_error

from flow_grpo.diffusion.session import build_session

TRAINED, SECOND = "jpeg_compressibility", "jpeg_incompressibility"


def test_a_second_reward_is_only_evaluated(tmp_path):
    fields = {"reward_fn": ConfigDict({TRAINED: 1.0}), "num_epochs": 1, "eval_freq": 1}
    config = short_config(tmp_path, "run", second_reward=SECOND, **fields)
    with build_session(config) as session:
        train(session)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert len(rows) == 2
    assert f"reward/{TRAINED}" in rows[-1]
    assert f"reward/{SECOND}" not in rows[-1]
    for row in rows:
        assert row[f"eval/{SECOND}"] > 0
        assert row["eval/avg"] == pytest.approx(row[f"eval/{TRAINED}"])


def test_an_unsuitable_second_reward_is_rejected(tmp_path):
    for name, message in {TRAINED: "reward_fn", "ocrr": "unknown", "vlm_pairwise": "group"}.items():
        with raises_user_error(message, name):
            build_session(short_config(tmp_path, "run", second_reward=name))
    assert not (tmp_path / "run").exists()
