"""Requests to servers that fail in various ways, and the threads that make them."""

import base64
import io
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from openai_server import MODEL, Delay, Hang, HangUp, OpenAiServer, RawResponse, error
from PIL import Image
from user_errors import raises_user_error

from flow_grpo.rewards import failure
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.workers import SerialThread, http, map_in_threads, run_in_thread
from flow_grpo.rewards.workers.http import (
    RequestRejected,
    ServerGroup,
    ServersUnavailable,
    parse_urls,
    read_token,
)

PATH = "/v1/chat/completions"
NOWHERE = "http://127.0.0.1:9"  # the discard port, which is closed


def body(question: str = "what is this?") -> dict:
    png = io.BytesIO()
    Image.new("RGB", (8, 8)).save(png, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    message = {"role": "user", "content": parts}
    return {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 8}


def group(*urls: str, retries: int = 3, timeout: float = 10.0, **kwargs) -> ServerGroup:
    policy = FailurePolicy(retries=retries, timeout=timeout)
    return ServerGroup(urls, policy=policy, **{"probe": "/v1/models", **kwargs})


def ask(servers: ServerGroup, *, start: int = 0) -> str:
    deadline = http.time.monotonic() + servers.policy.timeout
    completion = servers.post(PATH, body(), deadline=deadline, start=start)
    return completion["choices"][0]["message"]["content"]


class SkippedPauses(list):
    """A clock on which pauses between attempts take no real time, and the list of them."""

    def sleep(self, seconds: float) -> None:
        assert len(self) < 1000, "no deadline ends the retries"
        self.append(seconds)

    def monotonic(self) -> float:
        return time.monotonic() + sum(self)


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> SkippedPauses:
    clock = SkippedPauses()
    monkeypatch.setattr(failure, "time", clock)
    monkeypatch.setattr(http, "time", clock)
    return clock


@pytest.mark.parametrize(
    "reply",
    [
        error(500, "out of memory"),
        RawResponse(200, b"<html>"),
        RawResponse(502, b"bad gateway"),
        error(504, "no answer within 300 s"),
        error(408, "the body did not come"),
        HangUp(),
    ],
    ids=["500", "not JSON", "502", "504", "408", "hangs up"],
)
def test_temporary_failures_are_retried(reply):
    with OpenAiServer(lambda q: "here", script=[reply] * 3) as server:
        assert ask(group(server.url, retries=3)) == "here"
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (error(500, "out of memory"), "500 out of memory"),
        (RawResponse(200, b"<html>"), "JSON"),
        (HangUp(), "connection"),
    ],
)
def test_permanent_failures_end_with_the_attempts(reply, reason):
    with OpenAiServer(always=reply) as server:
        with pytest.raises(ServersUnavailable, match=f"{server.url}: .*{reason}.* 3 attempts"):
            ask(group(server.url, retries=2))
        assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_rejected_request_is_not_retried(status):
    with OpenAiServer(always=error(status, "no such model")) as server:
        with pytest.raises(RequestRejected, match=rf"{PATH} .*{status} no such model"):
            ask(group(server.url))
        assert len(server.requests) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_retried_when_it_says_without_using_up_attempts(status, pauses):
    busy = [error(status, "queue full", Retry_After=wait) for wait in ("7", "9")]
    with OpenAiServer(lambda q: "here", script=busy) as server:
        assert ask(group(server.url, retries=0, timeout=60.0)) == "here"
    assert [7 <= pauses[0] <= 10.5, 9 <= pauses[1] <= 13.5] == [True, True]  # with jitter


@pytest.mark.parametrize("wait", ["0", "²", "soon", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_busy_server_is_not_flooded_with_requests(wait):
    with OpenAiServer(always=error(429, "queue full", Retry_After=wait)) as server:
        with pytest.raises(ServersUnavailable, match="429 queue full"):
            ask(group(server.url, timeout=1.0))
        assert 1 <= len(server.requests) <= 10


def test_a_busy_server_is_not_waited_for_beyond_the_deadline(pauses):
    with OpenAiServer(always=error(429, "queue full", Retry_After="3600")) as server:
        with pytest.raises(ServersUnavailable, match="queue full"):
            ask(group(server.url, timeout=20.0))
        assert len(server.requests) == 1
    assert pauses == []


def test_another_server_takes_over_at_once():
    broken = error(500, "out of memory")
    with OpenAiServer(always=broken) as one, OpenAiServer(lambda q: "two") as two:
        for url in (NOWHERE, one.url):
            assert ask(group(url, two.url, retries=0)) == "two"
        assert ask(group(two.url, one.url, retries=0)) == "two"
        assert len(one.requests) == 1


def test_start_selects_the_first_server():
    with OpenAiServer(lambda q: "one") as one, OpenAiServer(lambda q: "two") as two:
        servers = group(one.url, two.url)
        assert [ask(servers, start=n) for n in range(4)] == ["one", "two", "one", "two"]


def test_a_hanging_server_leaves_time_for_another_one():
    with OpenAiServer(always=Hang()) as dead, OpenAiServer(lambda q: "here") as alive:
        assert ask(group(dead.url, alive.url, timeout=3.0, retries=0)) == "here"
        assert len(dead.requests) == 1


def test_the_deadline_ends_a_hanging_request():
    with OpenAiServer(always=Hang()) as server:
        with pytest.raises(ServersUnavailable, match=r"0\.9 s"):
            ask(group(server.url, timeout=0.9, retries=100))
        assert len(server.requests) == 1  # a single server may use all the time


def test_a_slow_response_is_accepted():
    with OpenAiServer(lambda q: "here", always=Delay(0.5)) as server:
        assert ask(group(server.url, timeout=6.0, retries=0)) == "here"


def test_no_request_is_sent_after_the_deadline():
    with OpenAiServer() as server:
        with pytest.raises(ServersUnavailable, match="10 s"):
            group(server.url).post(PATH, body(), deadline=http.time.monotonic())
        assert server.requests == []


def test_a_server_that_is_down_costs_little_until_it_is_back():
    with OpenAiServer(lambda q: "first") as server:
        url = server.url
        servers = group(url, retries=2)
        assert ask(servers) == "first"
    with pytest.raises(ServersUnavailable, match=r"connect.* 3 attempts"):
        ask(servers)
    with pytest.raises(ServersUnavailable, match=f"{url}: .* 3 attempts.*; still"):
        ask(servers)
    with OpenAiServer(lambda q: "back", port=int(url.rpartition(":")[2])) as server:
        assert [ask(servers), ask(servers)] == ["back", "back"]
        assert server.probes == 1


def test_probing_ends_with_the_deadline():
    with OpenAiServer(always=error(500, "broken"), hide_models=True) as server:
        servers = group(server.url, timeout=0.6, retries=0)
        with pytest.raises(ServersUnavailable, match="broken"):
            ask(servers)
        with pytest.raises(ServersUnavailable, match=r"broken.*; still"):
            ask(servers)


def test_a_server_without_the_probe_path_counts_as_up():
    with OpenAiServer(lambda q: "here", script=[error(500, "broken")]) as server:
        servers = group(server.url, retries=0, probe="/health")
        with pytest.raises(ServersUnavailable, match="500 broken"):
            ask(servers)
        assert ask(servers) == "here"


def test_the_token_is_sent(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret\n")
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with OpenAiServer() as server:
        ask(group(server.url, token=read_token("SOME_TOKEN")))
        ask(group(server.url, token=read_token("NO_TOKEN")))
    assert [question.authorization for question in server.requests] == ["Bearer secret", None]


def test_urls_are_separated_by_commas():
    assert parse_urls(" http://a:1/ ,https://b/v1,", "x") == ["http://a:1", "https://b/v1"]


@pytest.mark.parametrize(
    "text", ["localhost:8000", "ftp://a", "http://", "http://a:port", "http://[::1", "", " , "]
)
def test_an_invalid_url_is_rejected(text):
    with raises_user_error("http://host:18085", field="reward_servers.x", value=text.rstrip("/")):
        parse_urls(text, "reward_servers.x")


def test_map_in_threads_keeps_the_order_and_limits_the_threads():
    running, peak, lock = 0, 0, threading.Lock()

    def double(number: int) -> int:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.002 * (number % 5))
        with lock:
            running -= 1
        return 2 * number

    assert map_in_threads(double, range(50), 4) == [2 * n for n in range(50)]
    assert peak == 4
    assert map_in_threads(double, [], 4) == []


def test_an_error_in_a_thread_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        map_in_threads(lambda n: 1 / n, [2, 1, 0], 2)
    assert isinstance(run_in_thread(lambda: 1 / 0).exception(), ZeroDivisionError)


def test_a_serial_thread_runs_calls_in_order():
    thread, order = SerialThread(), []
    calls = [
        thread.submit(lambda n=n: (time.sleep(0.01 * (3 - n)), order.append(n))) for n in range(3)
    ]
    broken = thread.submit(lambda: 1 / 0)
    after = thread.submit(threading.get_ident)
    assert [call.result() and n for n, call in enumerate(calls)] == [0, 1, 2]
    assert order == [0, 1, 2]
    assert isinstance(broken.exception(), ZeroDivisionError)
    assert after.result() != threading.get_ident()


def test_a_hanging_call_does_not_keep_the_program_from_exiting():
    program = """
        import time
        from flow_grpo.rewards.workers import SerialThread, run_in_thread
        run_in_thread(lambda: time.sleep(1000))
        SerialThread().submit(lambda: time.sleep(1000))
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout == "done\n"
