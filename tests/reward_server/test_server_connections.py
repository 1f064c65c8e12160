"""Clients that send too much, too slowly or nothing at all do not keep others from being served.

None of them shows a token.
"""

import asyncio
import json
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import uvicorn
from server_process import TIMEOUT, Server, body, wait_until
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from reward_server import connection
from reward_server.connection import BODY_PROGRESS_BYTES, MAX_HEADER_BYTES, LimitedHttpProtocol

JPEG = "jpeg_compressibility"
START = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def answer(client: socket.socket) -> tuple[int, str]:
    """Return status and error code once the server has closed the connection."""
    data = b""
    while part := client.recv(65536):
        data += part
    head, _, content = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)["error"]["code"]


def is_closed(client: socket.socket) -> bool:
    readable, _, _ = select.select([client], [], [], 0)
    try:
        return bool(readable) and client.recv(1) == b""
    except ConnectionError:
        return True


def still_serves(server: Server) -> None:
    assert requests.get(f"{server.url}/healthz", timeout=TIMEOUT).status_code == 200
    headers = {"Authorization": "Bearer abc"}
    assert server.score(body(JPEG, "a"), headers=headers).status_code == 200


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start(JPEG, "--token-env", "SECRET", "--client-timeout", "3", SECRET="abc")


@pytest.fixture(scope="module")
def patient(start: Callable[..., Server]) -> Server:
    """Return a server whose timeouts never expire."""
    limit = ("--max-connections", "16", "--client-timeout", "3600")
    return start(JPEG, "--token-env", "SECRET", *limit, SECRET="abc")


@pytest.mark.parametrize(
    "header",
    [b"GET /%s", b"GET /healthz HTTP/1.1\r\nX-One: %s", b"GET /healthz HTTP/1.1\r\n%s"],
    ids=["a long path", "one long header", "many headers"],
)
def test_endless_headers_are_rejected(patient: Server, header: bytes) -> None:
    filling = b"a:b\r\n" * MAX_HEADER_BYTES if header.endswith(b"\n%s") else b"a" * 2**20
    with patient.connect() as client:
        # Only as much as the server reads: unread bytes would reset the connection.
        client.sendall((header % filling)[: MAX_HEADER_BYTES + 1])
        assert answer(client) == (431, "headers_too_large")
    still_serves(patient)


def test_many_megabytes_of_headers_do_not_stop_the_health_checks(patient: Server) -> None:
    """Without the limit, four such connections made /healthz take 13 s."""
    clients = [patient.connect() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        sent = list(threads.map(send_until_closed, clients))
    assert max(sent) < 16 * 2**20  # socket buffers of both sides
    still_serves(patient)


def send_until_closed(client: socket.socket) -> int:
    sent, part = len(START), b"x" * 2**16
    with client:
        try:
            client.sendall(START + b"X-Long: ")
            while sent < 64 * 2**20:
                client.sendall(part)
                sent += len(part)
        except ConnectionError:
            pass
    return sent


HALVES = {
    "nothing": b"",
    "half a line": b"GET /hea",
    "half the headers": START,
    "no body": START + b"Content-Length: 100\r\n\r\n",
    "half a body": START + b'Content-Length: 100\r\n\r\n{"rew',
    "half a chunk": START + b"Transfer-Encoding: chunked\r\n\r\nff\r\nabc",
    "half a body for nobody": START.replace(b"/v1/score", b"/nothing")
    + b"Content-Length: 100\r\n\r\nabc",
    "half a second request": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + START,
}


@pytest.mark.parametrize("half", HALVES)
def test_a_stalled_request_times_out(server: Server, half: str) -> None:
    with server.connect() as client:
        client.sendall(HALVES[half])
        if "second" in half:
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            client.sendall(b"X: y\r\n")  # before that it is an idle connection
        if "nobody" in half:
            assert client.recv(65536).startswith(b"HTTP/1.1 404")
            while client.recv(65536):
                pass
        else:
            assert answer(client) == (408, "client_too_slow")
    still_serves(server)


@pytest.mark.parametrize("start_", [b"GET /", START + b"Content-Length: 100000\r\n\r\n"])
def test_a_client_that_trickles_bytes_times_out(server: Server, start_: bytes) -> None:
    with server.connect() as client:
        client.sendall(start_)

        def closed_after_another_byte() -> bool:
            time.sleep(0.05)
            try:
                client.sendall(b"a")
            except ConnectionError:
                return True
            return bool(select.select([client], [], [], 0)[0])

        wait_until(closed_after_another_byte, TIMEOUT)
    still_serves(server)


def test_a_large_body_may_take_its_time(start: Callable[..., Server]) -> None:
    server = start(JPEG, "--client-timeout", "4")
    part, parts = b" " * BODY_PROGRESS_BYTES, 12
    with server.connect() as client:
        client.sendall(START + b"Content-Length: %d\r\n\r\n" % (parts * BODY_PROGRESS_BYTES))
        for _ in range(parts):
            time.sleep(0.4)  # 4.8 s in total
            client.sendall(part)
        assert client.recv(65536).startswith(b"HTTP/1.1 400")  # spaces are not JSON


def test_stalled_connections_are_closed_for_new_ones(patient: Server) -> None:
    """Without eviction, 500 of them stayed open."""
    halves = list(HALVES.values())
    clients = [patient.connect() for _ in range(40)]
    for number, client in enumerate(clients):
        client.sendall(halves[number % len(halves)])
    assert requests.get(f"{patient.url}/healthz", timeout=TIMEOUT).status_code == 200
    headers = {"Authorization": "Bearer abc"}
    score = body(JPEG, "a")
    wait_until(lambda: patient.score(score, headers=headers).status_code == 200)
    wait_until(lambda: sum(map(is_closed, clients)) >= 40 - 16)
    still_serves(patient)
    for client in clients:
        client.close()


def test_health_checks_work_beyond_the_connection_limit(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start("obey", "--max-connections", "1")
    go = tmp_path / "go"
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(server.score, body("obey", f"wait {go}"))
        wait_until((tmp_path / "go.started").exists)
        rejected = server.score(body("obey", "a"))
        assert rejected.status_code == 503
        assert rejected.json()["error"]["code"] == "too_many_connections"
        assert int(rejected.headers["Retry-After"]) >= 1
        for path in ("/healthz", "/readyz"):
            assert requests.get(server.url + path, timeout=TIMEOUT).status_code == 200
        go.touch()
        assert first.result().status_code == 200
    assert server.score(body("obey", "abc")).json()["scores"] == [3.0]


@pytest.mark.parametrize(
    "half",
    [b"GET / HTTP/1.1\r\n", START + b"Content-Length: 4\r\n\r\n"],
    ids=["half the headers", "no body"],
)
def test_a_request_that_makes_progress_is_not_evicted(
    monkeypatch: pytest.MonkeyPatch, half: bytes
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 3600.0)  # independent of the machine's speed
    monkeypatch.setattr(connection, "SPARE_CONNECTIONS", 2)
    rest = b"1234" if half.startswith(START) else b"\r\n"
    asyncio.run(served_beside_newcomers(half, rest))


async def served_beside_newcomers(half: bytes, rest: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await PlainTextResponse("ok")(scope, receive, send)

    config, state = uvicorn.Config(app), ServerState()

    def connected() -> LimitedHttpProtocol:
        return LimitedHttpProtocol(config, state, {}, max_connections=1, timeout=3600)

    async def status(reader: asyncio.StreamReader) -> int:
        return int((await reader.readline()).split()[1])

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(half)
    silent = [await asyncio.open_connection(*address) for _ in range(8)]
    for _ in range(3):
        newcomer, sender = await asyncio.open_connection(*address)
        sender.write(b"GET /v1/rewards HTTP/1.1\r\n\r\n")
        assert await status(newcomer) == 503
        assert len(state.connections) <= 1 + 2  # idle ones were closed
        sender.close()
    writer.write(rest)
    assert await status(reader) == 200
    for _, open_writer in [(reader, writer), *silent]:
        open_writer.close()
    server.close()
