"""Scorers that hang or cannot start are reported, do not affect others, and do not block exit."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image
from server_process import Server, body, error, wait_until

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.failure import FailurePolicy

JPEG = "jpeg_compressibility"


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start(f"{JPEG},obey", "--score-timeout", "3", "--max-batch", "2")


@pytest.fixture
def hanging(server: Server, tmp_path: Path) -> Iterator[Path]:
    """Return the file that a hanging call of `obey` waits for."""
    file = tmp_path / "go"
    response = server.score(body("obey", f"wait {file}"))
    assert error(response) == (504, "scorer_timeout")
    assert "no result within 3 s" in response.json()["error"]["message"]
    yield file
    file.touch()
    server.wait_until_ready()


def test_a_hanging_reward_is_reported_and_others_work(server: Server, hanging: Path) -> None:
    ready, rejected = server.get("/readyz"), server.score(body("obey", "a"))
    assert error(ready) == (503, "reward_down")
    assert int(ready.headers["Retry-After"]) >= 1
    assert error(rejected) == (500, "scorer_down")  # at once; clients retry
    for response in (ready, rejected):
        assert "'obey'" in response.json()["error"]["message"]
        assert "--isolate" in response.json()["error"]["message"]
    states = server.get("/v1/rewards").json()["rewards"]
    assert states == [{"name": JPEG, "ready": True}, {"name": "obey", "ready": False}]
    assert server.get("/healthz").status_code == 200
    assert server.score(body(JPEG, "a", "b")).json()["errors"] == [None, None]


def test_a_reward_works_again_when_the_hanging_call_returns(server: Server, hanging: Path) -> None:
    hanging.touch()
    server.wait_until_ready()
    assert server.score(body("obey", "abc")).json()["scores"] == [3.0]
    assert all(reward["ready"] for reward in server.get("/v1/rewards").json()["rewards"])


def test_requests_behind_a_hanging_call_fail(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "go"
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(server.score, body("obey", f"wait {file}"))
        wait_until((tmp_path / "go.started").exists)
        second = threads.submit(server.score, body("obey", "a", "b"))
        assert error(first.result()) == (504, "scorer_timeout")
        # a moment later it would have been rejected on arrival
        assert error(second.result()) in [(504, "scorer_timeout"), (500, "scorer_down")]
    file.touch()
    server.wait_until_ready()


def test_training_waits_for_a_reward_that_is_down(server: Server, hanging: Path) -> None:
    custom = {"obey": "obedient:obey"}
    policy = FailurePolicy(retries=8, timeout=60)
    reward = build_reward({"obey": 1.0}, servers={"obey": server.url}, custom=custom, policy=policy)
    before = server.metric("requests_total", reward="obey", status="500")
    scores = reward.submit([Image.new("RGB", (8, 8))] * 2, ["abc", "de"])
    # rejected at least once, and retried
    wait_until(lambda: server.metric("requests_total", reward="obey", status="500") > before)
    hanging.touch()
    np.testing.assert_array_equal(scores.result()["obey"], [3.0, 2.0])


def test_workers_that_cannot_start_are_reported_until_they_can(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """The workers of this reward die before they are ready while a file exists."""
    short = tmp_path / "memory_is_short"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "worker = 'flow_grpo.rewards.workers.worker' in sys.orig_argv\n"
        f"if worker and os.path.exists({str(short)!r}):\n"
        "    os._exit(9)\n"
    )
    server = start(f"{JPEG},ocr", "--workers", "1", PYTHONPATH=str(tmp_path))
    short.touch()
    server.kill_children()
    content = body("ocr", 'a sign that says "A"')
    for rejected in (server.score(content), server.score(content)):
        assert error(rejected) == (500, "scorer_down")  # clients retry
        assert "3 worker processes" in rejected.json()["error"]["message"]
    assert error(server.get("/readyz")) == (503, "reward_down")
    states = server.get("/v1/rewards").json()["rewards"]
    assert states == [{"name": JPEG, "ready": True}, {"name": "ocr", "ready": False}]
    assert server.score(body(JPEG, "a")).status_code == 200
    short.unlink()
    server.wait_until_ready()
    assert server.score(content).json()["scores"] == [0.0]


def send_without_response(server: Server, content: dict[str, Any]) -> None:
    """Start a request that never gets a response."""

    def send() -> None:
        with pytest.raises(requests.RequestException):
            server.score(content)

    threading.Thread(target=send, daemon=True).start()


def test_one_signal_stops_the_server_although_a_scorer_hangs(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start("obey", "--grace", "1")
    send_without_response(server, body("obey", f"wait {tmp_path / 'never'}"))
    wait_until((tmp_path / "never.started").exists)
    server.signal()
    code, stderr = server.end()
    assert code == 1  # not 0: requests were pending
    assert "1 s after the signal (--grace)" in stderr
    assert "Traceback" not in stderr


def test_one_signal_stops_the_server_although_threads_and_close_hang(
    start: Callable[..., Server],
) -> None:
    server = start("mine", "--custom", "mine=obedient:Clinging", "--grace", "1")
    server.signal()
    code, stderr = server.end()
    assert code == 1
    assert "1 s after the signal (--grace)" in stderr
