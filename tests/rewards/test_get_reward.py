"""Rewards of servers with OpenRLHF's protocol, `POST /get_reward`."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image
from user_errors import raises_user_error

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.weighted_reward import WeightedReward

PROMPTS, RESPONSES = ["What is 1+2?", "{response}?"], ["3", "{prompt} \u4e09"]
ROWS = [{"answer": "3"}, {}]
POLICY = FailurePolicy(retries=1, timeout=10.0)


class GetRewardServer:
    """A server thread; `answer` returns the status and the body for a request."""

    def __init__(self, answer: Callable[[dict], tuple[int, object]]) -> None:
        self.requests: list[dict] = []
        server_of = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/get_reward"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server_of.requests.append(body)
                status, content = answer(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *args) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/get_reward"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve(monkeypatch) -> Iterator[Callable[..., GetRewardServer]]:
    monkeypatch.setattr("flow_grpo.rewards.failure.FIRST_DELAY", 0.01)
    servers = []

    def start(answer: Callable[[dict], tuple[int, object]]) -> GetRewardServer:
        servers.append(GetRewardServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def build(*servers: GetRewardServer, **options) -> WeightedReward:
    urls = ",".join(server.url for server in servers)
    return build_reward({"rm": 1.0}, servers={"rm": urls}, options={"rm": options}, policy=POLICY)


def lengths(body: dict) -> tuple[int, object]:
    """Answer as OpenRLHF's server, and with a list as LMM-R1's does."""
    rewards = [float(len(query)) for query in body["query"]]
    logs = {"logged": rewards, "other": [1]}
    return 200, {"rewards": rewards, "scores": rewards, "acc_rewards": rewards, "extra_logs": logs}


def test_queries_prompts_and_labels_are_sent_and_rewards_returned(serve):
    server = serve(lengths)
    scores = build(server)(RESPONSES, PROMPTS, ROWS)
    [request] = server.requests
    assert request["prompts"] == PROMPTS
    assert request["labels"] == ["3", ""]
    assert request["query"] == [
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{response}<|im_end|>\n"
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    expected = [len(query) for query in request["query"]]
    for name in ("rm", "rm/acc_rewards", "rm/logged"):
        assert list(scores[name]) == expected
    assert not any("other" in name or "scores" in name for name in scores)


def test_another_template_and_several_servers(serve):
    servers = [serve(lengths), serve(lengths)]
    scores = build(*servers, template="Q: {prompt} A: {response}")(
        ["a" * i for i in range(40)], ["p"] * 40
    )
    assert list(scores["rm"]) == [len("Q: p A: ") + i for i in range(40)]
    assert sorted(len(s.requests) for s in servers) == [1, 2]
    assert {len(r["query"]) for s in servers for r in s.requests} == {16, 8}


@pytest.mark.parametrize(
    ("status", "content", "attempts", "shown"),
    [
        (500, {"error": "out of memory"}, 2, "out of memory"),
        (400, {"error": "labels are required"}, 1, "labels are required"),
        (200, {"rewards": [1.0]}, 1, "2 responses"),
        (200, {"scores": [1.0, 2.0]}, 1, "rewards"),
        (200, [1.0, 2.0], 1, ""),
        (200, {"rewards": [1e30, None]}, 1, "None"),
        (200, {"rewards": 1.0}, 1, ""),
    ],
)
def test_a_failed_request_gives_nan_with_a_reason(serve, status, content, attempts, shown):
    server = serve(lambda body: (status, content))
    reward = build(server)
    assert np.isnan(reward(RESPONSES, PROMPTS, ROWS)["rm"]).all()
    assert shown in reward.last_errors["rm"]
    assert len(server.requests) == attempts


def test_one_of_two_servers_may_fail(serve):
    broken, good = serve(lambda body: (500, {})), serve(lengths)
    for pair in ((broken, good), (good, broken)):
        assert not np.isnan(build(*pair)(RESPONSES, PROMPTS, ROWS)["rm"]).any()


def test_invalid_settings_are_rejected(serve, monkeypatch):
    monkeypatch.setattr("flow_grpo.rewards.workers.get_reward.STARTUP_TIMEOUT", 0.1)
    server = serve(lengths)
    for template in ("{prompt}", 3):
        with raises_user_error(field="reward_options.rm.template", value=template):
            build(server, template=template)
    with raises_user_error(field="reward_options.rm"):
        build(server, model="m")
    mixed = f"{server.url},http://127.0.0.1:9"
    with raises_user_error(field="reward_servers.rm", value="http://127.0.0.1:9"):
        build_reward({"rm": 1.0}, servers={"rm": mixed})
    gone = "http://127.0.0.1:9/get_reward"
    with raises_user_error(field="reward_servers.rm", value=gone):
        build_reward({"rm": 1.0}, servers={"rm": gone})
    reward = build(server)
    assert np.isnan(reward([Image.new("RGB", (8, 8))], ["p"], [{}])["rm"]).all()
    assert "text responses" in reward.last_errors["rm"]
