"""`POST /get_reward`, OpenRLHF's protocol, with our client and with OpenRLHF's requests."""

import pytest
from server_process import error

from flow_grpo.rewards import build_reward
from reward_server.openrlhf import extract_response

CHAT = "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server(start):
    return start("math_answer,answer_format")


def post(server, reward: str = "math_answer", **fields):
    body = {"query": [f"{CHAT}<answer>3</answer><|im_end|>"], "prompts": [CHAT], "labels": ["3"]}
    parameters = {"reward": reward} if reward else {}
    return server.session.post(
        f"{server.url}/get_reward", json=body | fields, params=parameters, timeout=60
    )


def test_a_request_of_openrlhf_is_answered(server):
    found = post(server).json()
    assert found == {"rewards": [1.0], "scores": [1.0], "extra_logs": {"unread": [0.0]}}
    assert post(server, labels=["4"]).json()["rewards"] == [0.0]
    assert post(server, "answer_format", labels=None).json()["rewards"] == [0.0]


def test_our_client_gets_the_scores_of_the_reward_in_process(start):
    server = start("math_answer,obey")  # one of them scores responses
    responses, prompts = ["<answer>3</answer>", "<answer>4</answer>"], ["What is 1+2?"] * 2
    rows = [{"answer": "3"}] * 2
    remote = build_reward({"rm": 1.0}, servers={"rm": f"{server.url}/get_reward"})
    alone = build_reward({"math_answer": 1.0})(responses, prompts, rows)["math_answer"]
    assert list(remote(responses, prompts, rows)["rm"]) == list(alone) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "fields", "code"),
    [
        ("", {}, (404, "unknown_reward")),  # two rewards score responses
        ("nothing", {}, (404, "unknown_reward")),
        ("math_answer", {"labels": []}, (422, "counts_differ")),
        ("math_answer", {"labels": [None]}, (500, "scorer_broken")),
        ("math_answer", {"query": 3}, (422, "invalid_request")),
        ("math_answer", {"query": [], "prompts": [], "labels": []}, (422, "no_images")),
    ],
)
def test_an_invalid_request_is_rejected(server, reward, fields, code):
    assert error(post(server, reward, **fields)) == code


@pytest.mark.parametrize(
    ("query", "prompt", "expected"),
    [
        (f"{CHAT}<answer>3</answer><|im_end|>\n", "What is 1+2?", "<answer>3</answer>"),
        ("What is 1+2? 3</s>", "What is 1+2?", "3"),
        ("<start_of_turn>model\n3<end_of_turn><eos>", "1+2", "3"),
        ("3", "1+2", "3"),
        ("1+2", "", "1+2"),
    ],
)
def test_the_response_is_found_in_the_query(query, prompt, expected):
    assert extract_response(query, prompt) == expected
