"""--isolate: a reward that crashes or hangs is restarted, and others keep working."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image
from server_process import Server, body, error, is_running, wait_until

from flow_grpo.rewards import build_reward
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.scorers.jpeg import jpeg_compressibility
from flow_grpo.rewards.workers import pool
from reward_server.batching import ScoringError
from reward_server.isolated import IsolatedScorer

JPEG = "jpeg_compressibility"


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start(f"{JPEG},obey", "--isolate", "--score-timeout", "3", "--max-batch", "4")


def test_scores_and_errors_are_those_of_one_process(server: Server) -> None:
    assert len(server.children()) == 2
    answer = server.score(body("obey", "nan", "four", "none")).json()
    assert answer["scores"] == [None, 4.0, None]
    assert answer["errors"] == ["it returned nan", None, "it returned None"]
    assert answer["extras"] == {"images_in_call": [3.0] * 3}
    red = Image.new("RGB", (8, 8), "red")
    assert server.score(body(JPEG, "a")).json()["scores"] == jpeg_compressibility([red], [""], [{}])
    broken = server.score(body("obey", "raise it is torn"))
    assert error(broken) == (500, "scorer_broken")
    assert "ValueError: it is torn" in broken.json()["error"]["message"]
    twice = server.score(body("obey", "twice"))
    assert error(twice) == (500, "scorer_broken")
    assert "shape (2,) for 1 images" in twice.json()["error"]["message"]
    assert len(server.children()) == 2


@pytest.mark.parametrize("order", ["crash", "segfault", "exit"])
def test_a_crash_costs_one_request(server: Server, order: str) -> None:
    before = server.children()
    response = server.score(body("obey", order))
    assert error(response) == (500, "scorer_failed")  # clients retry
    assert "restarting it" in response.json()["error"]["message"]
    assert server.score(body(JPEG, "a")).status_code == 200
    assert server.score(body("obey", "abc")).json()["scores"] == [3.0]
    assert server.get("/readyz").status_code == 200
    assert len(set(server.children()) & set(before)) == 1


@pytest.mark.parametrize("order", ["wait", "spin"])
def test_a_hanging_reward_is_restarted(server: Server, tmp_path: Path, order: str) -> None:
    response = server.score(body("obey", f"{order} {tmp_path / 'never'}"))
    assert error(response) == (504, "scorer_timeout")
    assert server.score(body("obey", "abc")).json()["scores"] == [3.0]
    assert server.get("/readyz").status_code == 200


def test_others_in_the_same_call_get_their_scores(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start("obey", "--isolate", "--score-timeout", "60", "--max-batch", "4")
    go = tmp_path / "go"
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(server.score, body("obey", f"wait {go}"))
        wait_until((tmp_path / "go.started").exists)
        others = [threads.submit(server.score, body("obey", p)) for p in ("a", "crash", "bb")]
        wait_until(lambda: server.metric("queue_images", reward="obey") == 4)
        go.touch()
        assert first.result().status_code == 200
        assert others[0].result().json()["scores"] == [1.0]
        assert others[2].result().json()["scores"] == [2.0]
        assert error(others[1].result()) == (500, "scorer_failed")


def test_the_client_gets_its_scores_despite_a_crash(start: Callable[..., Server]) -> None:
    server = start("obey", "--isolate")
    custom = {"obey": "obedient:obey"}
    policy = FailurePolicy(retries=5, timeout=60)
    reward = build_reward({"obey": 1.0}, servers={"obey": server.url}, custom=custom, policy=policy)
    server.kill_children()
    scores = reward([Image.new("RGB", (8, 8))] * 2, ["abc", "de"])["obey"]
    np.testing.assert_array_equal(scores, [3.0, 2.0])


@pytest.mark.parametrize("died", ["over a request", "idle"])
def test_a_reward_that_cannot_be_restarted_is_reported_until_it_can(
    start: Callable[..., Server], tmp_path: Path, died: str
) -> None:
    full = tmp_path / "full"
    options = f'{{"mine": {{"unless": "{full}"}}}}'
    custom = ("--custom", "mine=obedient:Fragile", "--options", options)
    server = start(f"{JPEG},mine", "--isolate", *custom)
    full.touch()
    if died == "idle":
        server.kill_children()
        assert error(server.score(body("mine", "a"))) == (500, "scorer_down")
    else:
        assert error(server.score(body("mine", "crash"))) == (500, "scorer_failed")
    wait_until(lambda: server.get("/readyz").status_code == 503)
    ready, rejected = server.get("/readyz"), server.score(body("mine", "a"))
    assert error(ready) == (503, "reward_down")
    assert error(rejected) == (500, "scorer_down")
    for response in (ready, rejected):
        message = response.json()["error"]["message"]
        assert "'mine' is down: it cannot be started again" in message
        assert "OSError: no space left on the card" in message
    assert server.get("/v1/rewards").json()["rewards"][1] == {"name": "mine", "ready": False}
    assert server.score(body(JPEG, "a")).status_code == 200
    full.unlink()
    server.wait_until_ready()
    assert server.score(body("mine", "abc")).json()["scores"] == [3.0]


def test_a_failed_restart_is_logged(
    stub_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "MIN_RESTART_DELAY", 1000.0)  # no second attempt
    monkeypatch.setattr(logging.getLogger("flow_grpo"), "propagate", True)
    monkeypatch.setenv("PYTHONPATH", str(stub_folder))
    full = tmp_path / "full"
    fragile = {"custom": {"mine": "obedient:Fragile"}, "options": {"mine": {"unless": str(full)}}}
    scorer = IsolatedScorer("mine", timeout=30, **fragile)
    try:
        full.touch()
        with pytest.raises(ScoringError, match="restarting it"):
            scorer([Image.new("RGB", (8, 8))], ["crash"], [{}])
        wait_until(lambda: "no space left on the card" in caplog.text)
    finally:
        scorer.close()


def test_a_reward_that_cannot_be_built_is_one_line(start: Callable[..., Server]) -> None:
    server = start("mine", "--isolate", "--custom", "mine=obedient:nowhere", wait=False)
    code, stderr = server.end()
    assert code == 2
    [line] = stderr.splitlines()
    assert line.startswith("error: reward 'mine': cannot import 'obedient:nowhere'")


@pytest.mark.parametrize("order", ["wait", "spin"])
def test_one_signal_stops_the_server_and_its_processes(
    start: Callable[..., Server], tmp_path: Path, order: str
) -> None:
    server = start("obey", "--isolate", "--grace", "1")
    children = server.children()
    with ThreadPoolExecutor(1) as threads:
        request = threads.submit(server.score, body("obey", f"{order} {tmp_path / 'never'}"))
        wait_until((tmp_path / "never.started").exists)
        server.signal()
        code, stderr = server.end()
        assert request.exception() or request.result().status_code >= 500
    assert code == 1
    assert "1 s after the signal (--grace)" in stderr
    wait_until(lambda: not any(map(is_running, children)))


def test_a_killed_server_leaves_no_process(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start("obey", "--isolate")
    children = server.children()
    with ThreadPoolExecutor(1) as threads:
        request = threads.submit(server.score, body("obey", f"spin {tmp_path / 'never'}"))
        wait_until((tmp_path / "never.started").exists)
        server.process.kill()
        assert isinstance(request.exception(), requests.ConnectionError)
    wait_until(lambda: not any(map(is_running, children)))
