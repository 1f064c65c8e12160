"""The setting `second_reward`: a reward that only evaluations compute."""

import json

import pytest
from train import train
from user_errors import raises_user_error

TRAINED, SECOND = "jpeg_compressibility", "jpeg_incompressibility"


def test_a_second_reward_is_only_evaluated(make_session):
    session = make_session(second_reward=SECOND, num_epochs=1, eval_freq=1, eval_prompts=2)
    train(session)
    rows = [json.loads(line) for line in (session.folder / "metrics.jsonl").open()]
    assert [row["epoch"] for row in rows] == [0, 1]
    assert f"reward/{TRAINED}" in rows[1]
    assert f"reward/{SECOND}" not in rows[1]
    for row in rows:
        assert row[f"eval/{SECOND}"] > 0
        assert row["eval/avg"] == pytest.approx(row[f"eval/{TRAINED}"])


@pytest.mark.parametrize(("name", "message"), [(TRAINED, "reward_fn"), ("ocrr", "unknown")])
def test_an_unsuitable_second_reward_is_rejected(make_session, name, message):
    with raises_user_error(message, name):
        make_session(second_reward=name)
