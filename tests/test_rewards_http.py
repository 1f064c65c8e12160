"""Requests to servers that fail in every way, and the threads that make them."""

import base64
import io
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from openai_server import MODEL, Hang, HangUp, OpenAiServer, Respond, Slowly, error
from PIL import Image

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling import SerialThread, in_background, map_in_threads
from flow_grpo.rewards.calling.http import Refused, ServerGroup, Unavailable, parse_urls, token_from
from flow_grpo.rewards.failure import FailurePolicy

PATH = "/v1/chat/completions"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens


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
    deadline = time.monotonic() + servers.policy.timeout
    answer = servers.post(PATH, body(), deadline=deadline, start=start)
    return answer["choices"][0]["message"]["content"]


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch):
    monkeypatch.setattr("flow_grpo.rewards.failure.FIRST_DELAY", 0.01)


@pytest.mark.parametrize(
    "trouble",
    [
        error(500, "out of memory"),
        Respond(200, b"<html>"),
        Respond(502, b"bad gateway"),
        error(504, "no answer within 300 s"),
        error(408, "the body did not come"),
        HangUp(),
    ],
    ids=["500", "not JSON", "502", "504", "408", "hangs up"],
)
def test_trouble_that_passes_is_waited_out(trouble):
    with OpenAiServer(lambda q: "here", script=[trouble] * 3) as server:
        assert ask(group(server.url, retries=3)) == "here"
        assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (error(500, "out of memory"), "answered 500 out of memory, after 3 attempts"),
        (Respond(200, b"<html>"), "not JSON, after 3 attempts"),
        (HangUp(), "the connection broke, after 3 attempts"),
    ],
)
def test_trouble_that_stays_ends_with_the_attempts(trouble, message):
    with OpenAiServer(always=trouble) as server:
        with pytest.raises(Unavailable, match=message):
            ask(group(server.url, retries=2))
        assert len(server.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_what_is_refused_is_not_asked_again(status):
    with OpenAiServer(always=error(status, "no such model")) as server:
        with pytest.raises(Refused, match=rf"{PATH} answered {status} no such model"):
            ask(group(server.url))
        assert len(server.asked) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_waited_for_as_it_says_without_using_up_attempts(status):
    busy = error(status, "queue full", Retry_After="1")
    with OpenAiServer(lambda q: "here", script=[busy] * 2) as server:
        start = time.monotonic()
        assert ask(group(server.url, retries=0)) == "here"
        assert 2.0 <= time.monotonic() - start < 8.0


@pytest.mark.parametrize("wait", ["0", "²", "soon", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_busy_server_is_not_stormed(wait):
    with OpenAiServer(always=error(429, "queue full", Retry_After=wait)) as server:
        with pytest.raises(Unavailable, match="answered 429 queue full"):
            ask(group(server.url, timeout=0.5))
        assert 1 <= len(server.asked) <= 6


def test_a_busy_server_is_not_waited_for_beyond_the_deadline():
    with OpenAiServer(always=error(429, "queue full", Retry_After="3600")) as server:
        start = time.monotonic()
        with pytest.raises(Unavailable, match="queue full"):
            ask(group(server.url, timeout=20.0))
        assert time.monotonic() - start < 10.0


def test_another_server_takes_over_at_once():
    broken = error(500, "out of memory")
    with OpenAiServer(always=broken) as one, OpenAiServer(lambda q: "two") as two:
        for url in (NOWHERE, one.url):
            assert ask(group(url, two.url, retries=0)) == "two"
        assert ask(group(two.url, one.url, retries=0)) == "two"
        assert len(one.asked) == 1


def test_start_says_which_server_is_asked_first():
    with OpenAiServer(lambda q: "one") as one, OpenAiServer(lambda q: "two") as two:
        servers = group(one.url, two.url)
        assert [ask(servers, start=n) for n in range(4)] == ["one", "two", "one", "two"]


def test_a_server_that_hangs_leaves_time_for_another_one():
    with OpenAiServer(always=Hang()) as dead, OpenAiServer(lambda q: "here") as alive:
        start = time.monotonic()
        assert ask(group(dead.url, alive.url, timeout=3.0, retries=0)) == "here"
        assert time.monotonic() - start >= 1.0


def test_the_deadline_ends_what_hangs():
    with OpenAiServer(always=Hang()) as server:
        start = time.monotonic()
        with pytest.raises(Unavailable, match=r"no answer in time, after 0\.9 s"):
            ask(group(server.url, timeout=0.9, retries=100))
        assert time.monotonic() - start < 10.0
        assert len(server.asked) == 1  # one server may take all the time there is


def test_a_slow_answer_is_waited_for():
    with OpenAiServer(lambda q: "here", always=Slowly(0.5)) as server:
        assert ask(group(server.url, timeout=6.0, retries=0)) == "here"


def test_after_the_deadline_nobody_is_asked():
    with OpenAiServer() as server:
        with pytest.raises(Unavailable, match="not asked: the 10 s were over"):
            group(server.url).post(PATH, body(), deadline=time.monotonic())
        assert server.asked == []


def test_a_server_that_is_down_costs_little_until_it_is_back():
    with OpenAiServer(lambda q: "first") as server:
        url = server.url
        servers = group(url, retries=2)
        assert ask(servers) == "first"
    with pytest.raises(Unavailable, match="cannot connect, after 3 attempts"):
        ask(servers)
    with pytest.raises(Unavailable, match=f"{url}: .*; still no answer"):
        ask(servers)
    with OpenAiServer(lambda q: "back", port=int(url.rpartition(":")[2])) as server:
        assert [ask(servers), ask(servers)] == ["back", "back"]
        assert server.probes == 1


def test_asking_whether_a_server_is_back_ends_with_the_deadline():
    with OpenAiServer(always=error(500, "broken"), mute=True) as server:
        servers = group(server.url, timeout=0.6, retries=0)
        with pytest.raises(Unavailable, match="broken"):
            ask(servers)
        start = time.monotonic()
        with pytest.raises(Unavailable, match="still no answer"):
            ask(servers)
        assert time.monotonic() - start < 10.0


def test_a_server_without_the_probe_path_counts_as_back():
    with OpenAiServer(lambda q: "here", script=[error(500, "broken")]) as server:
        servers = group(server.url, retries=0, probe="/health")
        with pytest.raises(Unavailable, match="answered 500 broken"):
            ask(servers)
        assert ask(servers) == "here"


def test_the_token_goes_along(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret\n")
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with OpenAiServer() as server:
        ask(group(server.url, token=token_from("SOME_TOKEN")))
        ask(group(server.url, token=token_from("NO_TOKEN")))
    assert [question.authorization for question in server.asked] == ["Bearer secret", None]


def test_urls_are_read_with_commas_between():
    assert parse_urls(" http://a:1/ ,https://b/v1,", "x") == ["http://a:1", "https://b/v1"]


@pytest.mark.parametrize(
    "text", ["localhost:8000", "ftp://a", "http://", "http://a:port", "http://[::1", "", " , "]
)
def test_what_is_no_url_is_named(text):
    with pytest.raises(UserError, match=r"reward_servers.x.* http://host:18085"):
        parse_urls(text, "reward_servers.x")


def test_threads_keep_the_order_and_their_number():
    at_once, most, lock = 0, 0, threading.Lock()

    def double(number: int) -> int:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.002 * (number % 5))
        with lock:
            at_once -= 1
        return 2 * number

    assert map_in_threads(double, range(50), 4) == [2 * n for n in range(50)]
    assert most == 4
    assert map_in_threads(double, [], 4) == []


def test_an_error_in_a_thread_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        map_in_threads(lambda n: 1 / n, [2, 1, 0], 2)
    assert isinstance(in_background(lambda: 1 / 0).exception(), ZeroDivisionError)


def test_a_serial_thread_runs_one_call_after_the_other():
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


def test_a_call_that_hangs_does_not_keep_the_program_from_ending():
    program = """
        import time
        from flow_grpo.rewards.calling import SerialThread, in_background
        in_background(lambda: time.sleep(1000))
        SerialThread().submit(lambda: time.sleep(1000))
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout == "done\n"
