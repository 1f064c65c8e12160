"""Text responses, which a server scores instead of images."""

import json

import numpy as np
import pytest
import small_reward_model
from server_process import GOOD, body, error

from flow_grpo.rewards import build_reward, close_scorers

WEIGHTS = {"math_answer": 0.9, "answer_format": 0.1}


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> dict[str, str]:
    """Return the options of a reward model."""
    return {"model": str(small_reward_model.save(tmp_path_factory.mktemp("judge")))}


@pytest.fixture(scope="module")
def server(start, judge):
    rewards = ",".join((*WEIGHTS, "reward_model"))
    return start(rewards, "--options", json.dumps({"reward_model": judge}))


def test_a_server_scores_with_a_reward_model(server, judge):
    rows = ["1", "<answer>2</answer>", "x" * 300], ["How many?"] * 3, [{}] * 3
    here = build_reward({"reward_model": 1.0}, options={"reward_model": judge})
    there = build_reward({"reward_model": 1.0}, servers={"reward_model": server.url})
    wanted, got = here(*rows)["reward_model"], there(*rows)["reward_model"]
    assert np.isnan(wanted).tolist() == [False, False, True]
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert "more than max_length=256" in there.last_errors["reward_model"]
    close_scorers(here, there)


def test_a_server_scores_responses_as_in_process(server):
    answers = [
        "<think>1+1</think><answer>2</answer>",
        r"\boxed{\sqrt{4}}",
        "<answer>3</answer>",
        "<answer>two</answer>",
        "<answer>x</answer>",
    ] * 8
    unread = [{"answer": "2"}] * 4 + [{"answer": r"9^{9^{9^9}}"}]
    rows = ["How many?"] * 40, unread * 8
    here = build_reward(WEIGHTS)
    there = build_reward(WEIGHTS, servers=dict.fromkeys(WEIGHTS, server.url))
    wanted, got = here(answers, *rows), there(answers, *rows)
    assert wanted.keys() == got.keys()
    for name in wanted:
        np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)
    assert np.isnan(got["math_answer"]).sum() == 8
    assert "'9^{9^{9^9}}'" in there.last_errors["math_answer"]
    close_scorers(here)


def test_images_and_responses_are_exclusive(server):
    fields = {"reward": "answer_format", "prompts": ["a"]}
    both = server.score({**fields, "images": [GOOD], "answers": ["x"]})
    assert error(both) == (422, "invalid_request")
    assert error(server.score({**fields, "answers": []})) == (422, "no_images")
    assert error(server.score({**fields, "answers": [GOOD, GOOD]})) == (422, "counts_differ")
    images = server.score(body("answer_format", "a"))
    assert images.status_code == 500
    assert "text responses" in images.json()["error"]["message"]
