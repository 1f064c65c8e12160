"""Answers, which a server scores in the place of images."""

import numpy as np
import pytest
from serving import GOOD, body, error

from flow_grpo.rewards import build_reward, close_scorers

WEIGHTS = {"math_answer": 0.9, "answer_format": 0.1}


@pytest.fixture(scope="module")
def server(start):
    return start(",".join(WEIGHTS))


def test_a_server_scores_answers_as_in_process(server):
    answers = [
        "<think>1+1</think><answer>2</answer>",
        r"\boxed{\sqrt{4}}",
        "<answer>3</answer>",
        "<answer>two</answer>",
        "x" * 200_000,
    ] * 8
    rows = ["How many?"] * 40, [{"answer": "2"}] * 40
    here = build_reward(WEIGHTS)
    there = build_reward(WEIGHTS, servers=dict.fromkeys(WEIGHTS, server.url))
    wanted, got = here(answers, *rows), there(answers, *rows)
    assert wanted.keys() == got.keys()
    for name in wanted:
        np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)
    assert np.isnan(got["math_answer"]).sum() == 8
    assert "200000 characters" in there.last_errors["math_answer"]
    close_scorers(here)


def test_images_and_answers_do_not_mix(server):
    fields = {"reward": "answer_format", "prompts": ["a"]}
    both = server.score({**fields, "images": [GOOD], "answers": ["x"]})
    assert error(both) == (422, "invalid_request")
    assert error(server.score({**fields, "answers": []})) == (422, "no_images")
    assert error(server.score({**fields, "answers": [GOOD, GOOD]})) == (422, "counts_differ")
    pictures = server.score(body("answer_format", "a"))
    assert pictures.status_code == 500
    assert "scores answers" in pictures.json()["error"]["message"]
