"""Requests are batched, wait in a bounded queue, and do not affect each other."""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image
from server_process import Server, body, encoded, wait_until

from reward_server.batching import Batcher, ScoringError
from reward_server.metrics import Metrics


class BusyScorer:
    """A scorer that is busy with one request, and requests queued behind it."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self._threads = ThreadPoolExecutor(8)
        self._file = folder / "go"
        self.first = self.send(f"wait {self._file}")
        wait_until((folder / "go.started").exists)

    def send(self, *prompts: str, **fields: Any) -> "Future[requests.Response]":
        return self._threads.submit(self.server.score, body("obey", *prompts, **fields))

    def wait_for(self, images: int) -> None:
        wait_until(lambda: self.server.metric("queue_images", reward="obey") == images)

    def release(self) -> None:
        self._file.touch()
        assert self.first.result().status_code == 200


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    limits = ("--max-batch", "4", "--max-queue", "12", "--max-queue-pixels", "1000")
    return start("obey", *limits)


@pytest.fixture
def busy(server: Server, tmp_path: Path) -> BusyScorer:
    return BusyScorer(server, tmp_path)


def test_requests_sent_together_are_one_call(start: Callable[..., Server]) -> None:
    server = start("obey", "--max-wait-ms", "60000", "--max-batch", "8")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: server.score(body("obey", "x")).json(), range(8)))
    assert [answer["extras"]["images_in_call"] for answer in answers] == [[8.0]] * 8


def test_queued_requests_are_one_call() -> None:
    sizes, busy, go = [], threading.Event(), threading.Event()

    def scorer(images: list, prompts: list, metadata: list) -> list[float]:
        sizes.append(len(images))
        busy.set()
        assert go.wait(60)
        return [float(len(prompt)) for prompt in prompts]

    batcher = Batcher("busy", scorer, max_batch=4, max_wait=0.0, metrics=Metrics())
    image = Image.new("RGB", (1, 1))
    first = batcher.submit([image], ["first"], [{}])
    assert busy.wait(10)
    small = batcher.submit([image], ["a"], [{}])
    large = batcher.submit([image] * 3, ["bb", "ccc", "dddd"], [{}] * 3)
    go.set()
    scores = [part.result(timeout=10).values for parts in (first, small, large) for part in parts]
    assert scores == [[5.0], [1.0], [2.0, 3.0, 4.0]]
    assert sizes == [1, 4]
    batcher.close()


@pytest.mark.parametrize(("max_wait", "sent"), [(0.01, 1), (3600.0, 2)])
def test_a_call_waits_for_more_images_until_max_wait(max_wait: float, sent: int) -> None:
    sizes = []

    def scorer(images: list, prompts: list, metadata: list) -> list[float]:
        sizes.append(len(images))
        return [1.0] * len(images)

    batcher = Batcher("two", scorer, max_batch=2, max_wait=max_wait, metrics=Metrics())
    image = Image.new("RGB", (1, 1))
    futures = [future for _ in range(sent) for future in batcher.submit([image], [""], [{}])]
    assert [future.result(timeout=60).values for future in futures] == [[1.0]] * sent
    batcher.close()
    assert sizes == [sent]


def test_a_request_larger_than_a_batch_is_split(server: Server) -> None:
    answer = server.score(body("obey", *("x" * n for n in range(10)))).json()
    assert answer["scores"] == [float(n) for n in range(10)]
    assert answer["extras"]["images_in_call"] == [4.0] * 8 + [2.0] * 2


@pytest.mark.parametrize("poison", ["raise it is torn", "exit"])
def test_only_the_request_at_fault_fails(busy: BusyScorer, poison: str) -> None:
    good, bad, other = busy.send("a"), busy.send("bb", poison), busy.send("ccc")
    busy.wait_for(5)
    busy.release()
    assert good.result().json()["scores"] == [1.0]
    assert other.result().json()["scores"] == [3.0]
    assert bad.result().status_code == 500
    error = bad.result().json()["error"]
    assert error["code"] == ("scorer_failed" if poison == "exit" else "scorer_broken")
    assert "'obey'" in error["message"]
    assert ("ValueError: it is torn" if "torn" in poison else "SystemExit") in error["message"]
    assert busy.server.score(body("obey", "x")).status_code == 200


def test_a_full_queue_rejects_requests_at_once(busy: BusyScorer) -> None:
    waiting = [busy.send(*["abc"] * 4), busy.send(*["abc"] * 6)]
    busy.wait_for(11)
    response = busy.server.score(body("obey", "a", "b"))  # before the queue moves
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) >= 1
    error = response.json()["error"]
    assert error["code"] == "queue_full"
    assert "11 images are queued, 2 more" in error["message"]
    last = busy.send("abc")  # one more fits
    busy.wait_for(12)
    busy.release()
    assert [s for w in (*waiting, last) for s in w.result().json()["scores"]] == [3.0] * 11
    assert busy.server.score(body("obey", "a", "b")).status_code == 200


def test_the_queue_is_limited_by_pixels_too(busy: BusyScorer) -> None:
    """The first request has 64 pixels; the limit is 1000."""
    large = encoded(Image.new("RGB", (20, 30)))
    too_large = busy.server.score(body("obey", "a", "b", image=large))
    assert too_large.status_code == 413
    assert too_large.json()["error"]["code"] == "too_many_pixels"
    both = {busy.send("abc", image=large) for _ in range(2)}
    # the one that is decoded first fits
    [away], [waiting] = wait(both, timeout=60, return_when=FIRST_COMPLETED)
    response = away.result()
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "queue_full"
    assert int(response.headers["Retry-After"]) >= 1
    busy.release()
    assert waiting.result().json()["scores"] == [3.0]
    assert busy.server.score(body("obey", "a", image=large)).status_code == 200


def test_no_request_is_larger_than_the_queue(server: Server) -> None:
    assert server.get("/v1/rewards").json()["limits"]["max_images"] == 12
    response = server.score(body("obey", *["a"] * 13))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_many_images"


def test_jobs_of_disconnected_clients_are_dropped(busy: BusyScorer) -> None:
    server = busy.server
    before = server.metric("batch_images_sum", reward="obey")
    gone = server.metric("requests_total", reward="obey", status="499")
    with pytest.raises(requests.ReadTimeout):
        requests.post(f"{server.url}/v1/score", json=body("obey", "a", "b"), timeout=0.5)
    busy.wait_for(1)
    assert server.metric("requests_total", reward="obey", status="499") == gone + 1
    busy.release()
    assert server.score(body("obey", "x")).status_code == 200
    assert server.metric("batch_images_sum", reward="obey") == before + 1


def test_a_scorer_may_have_concurrent_calls() -> None:
    both = threading.Barrier(2, timeout=10)

    class Scorer:
        concurrent_calls = 2

        def __call__(self, images: list, prompts: list, metadata: list) -> list[float]:
            both.wait()
            return [1.0] * len(images)

    batcher = Batcher("pair", Scorer(), max_batch=1, max_wait=0.0, metrics=Metrics())
    image = Image.new("RGB", (1, 1))
    futures = batcher.submit([image] * 2, ["", ""], [{}, {}])
    assert [future.result(timeout=10).values for future in futures] == [[1.0], [1.0]]
    batcher.close()


def two_requests(batcher: Batcher) -> "list[Future]":
    """Return two jobs, which are one call if `max_batch` is two."""
    image = Image.new("RGB", (1, 1))
    return [future for _ in range(2) for future in batcher.submit([image], [""], [{}])]


def codes(futures: "list[Future]") -> list[str]:
    return [future.exception(timeout=10).code for future in futures]


def test_jobs_behind_a_hanging_request_fail_with_it() -> None:
    sizes, alone, go = [], threading.Event(), threading.Event()

    def scorer(images: list, prompts: list, metadata: list) -> list[float]:
        sizes.append(len(images))
        if len(images) > 1:
            raise ValueError("one at a time")
        alone.set()
        go.wait()
        return [1.0]

    settings = {"max_batch": 2, "max_wait": 60.0, "metrics": Metrics(), "timeout": 0.0}
    batcher = Batcher("alone", scorer, **settings)
    futures = two_requests(batcher)
    assert alone.wait(10)
    batcher.fail_overdue()
    assert codes(futures) == ["scorer_timeout"] * 2
    go.set()
    batcher.close()
    assert sizes == [2, 1]  # the other job has failed already


def test_requests_of_a_timed_out_call_are_not_scored_separately() -> None:
    sizes = []

    def scorer(images: list, prompts: list, metadata: list) -> list[float]:
        sizes.append(len(images))
        raise ScoringError("no answer within 300 s", "scorer_timeout")

    batcher = Batcher("slow", scorer, max_batch=2, max_wait=60.0, metrics=Metrics())
    assert codes(two_requests(batcher)) == ["scorer_timeout"] * 2
    batcher.close()
    assert sizes == [2]
