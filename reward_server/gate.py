"""What every request passes before its body is read: counted, let in, held to a size."""

import hmac
import time
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flow_grpo.hosts import is_allowed_host
from reward_server.errors import RETRY_AFTER, ApiError, Busy, error_response, shown
from reward_server.metrics import UNKNOWN, Metrics

SCORE_PATH = "/v1/score"
HEALTH_PATHS = ("/healthz", "/readyz")
SMALL = 2**20  # bytes of a body that are read although there is no time for it
DRAINED = 4  # times the largest body that is read to its end only to be refused
GONE = 499  # the client went away before its answer

Chunks = AsyncIterator[bytes | None]


class OnlyHealth:
    """For one connection too many: whether the server lives is told all the same."""

    def __init__(self, app: ASGIApp, max_connections: int) -> None:
        self._app = app
        self._max_connections = max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH_PATHS:
            return await self._app(scope, receive, send)
        error = Busy(
            "too_many_connections",
            f"{self._max_connections} clients are being served, which is all that "
            "--max-connections allows; try again later",
            RETRY_AFTER,
        )
        error.headers["Connection"] = "close"
        await _refuse(error, scope, _chunks(receive), send, SMALL)


class CountRequests:
    """Requests to /v1/score by reward and status. The route sets scope["state"]["reward"]."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != SCORE_PATH:
            return await self._app(scope, receive, send)
        start, status = time.monotonic(), GONE
        state = scope.setdefault("state", {})

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            reward = state.get("reward", UNKNOWN)
            self._metrics.requests.labels(reward, str(status)).inc()
            self._metrics.request_seconds.labels(reward).observe(time.monotonic() - start)


class CheckHost:
    """Rejects requests whose Host header names another machine (see flow_grpo/hosts.py)."""

    def __init__(self, app: ASGIApp, served_at: str, max_body_bytes: int) -> None:
        self._app = app
        self._served_at = served_at
        self._drain_limit = DRAINED * max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _header(scope, b"host").decode("latin-1") if scope["type"] == "http" else ""
        if scope["type"] != "http" or is_allowed_host(self._served_at, host):
            return await self._app(scope, receive, send)
        error = ApiError(
            "forbidden_host",
            f"the Host header {shown(host)} does not name this machine; a server on a loopback "
            "address answers localhost and 127.0.0.1 only, use --host and --token-env for others",
        )
        await _refuse(error, scope, _chunks(receive), send, self._drain_limit)


class RequireToken:
    """Authorization: Bearer <token> for all but the health checks and the schema."""

    def __init__(self, app: ASGIApp, token: str, max_body_bytes: int) -> None:
        self._app = app
        self._token = token.encode()
        self._drain_limit = DRAINED * max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_guarded(scope["path"]) or self._is_known(scope):
            return await self._app(scope, receive, send)
        error = ApiError(
            "unauthorized",
            "the token is missing or wrong; send it as Authorization: Bearer <token>",
            {"WWW-Authenticate": "Bearer"},
        )
        await _refuse(error, scope, _chunks(receive), send, self._drain_limit)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"


class LimitBody:
    """Reads the body of /v1/score up to the limit; the route gets it in one piece."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_held: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held = max(max_bytes, max_held)
        self._held = 0  # bytes of all bodies whose requests are not answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != SCORE_PATH:
            return await self._app(scope, receive, send)
        length, chunks = _content_length(scope), _chunks(receive)
        if length > self._max_bytes:
            return await self._refuse(self._too_large(f"{length} bytes"), scope, chunks, send)
        body, size = [], 0
        try:
            async for chunk in chunks:
                if chunk is None:
                    return None  # the client went away
                body.append(chunk)
                size += len(chunk)
                self._held += len(chunk)
                if problem := self._problem(size):
                    body.clear()
                    self._held -= size
                    size = 0
                    return await self._refuse(problem, scope, chunks, send)
            replay = _replay(b"".join(body), receive)
            body.clear()
            await self._app(scope, replay, send)
        finally:
            self._held -= size

    def _problem(self, size: int) -> ApiError | None:
        if size > self._max_bytes:
            return self._too_large("larger")
        if self._held > self._max_held:
            return Busy(
                "queue_full",
                f"requests of {self._held} bytes are waiting, which is more than the "
                f"{self._max_held} that there is memory for; try again later",
                RETRY_AFTER,
            )
        return None

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            "body_too_large",
            f"the body is {what}, at most {self._max_bytes} bytes are allowed; send fewer images "
            "in one request",
        )

    async def _refuse(self, error: ApiError, scope: Scope, chunks: Chunks, send: Send) -> None:
        await _refuse(error, scope, chunks, send, DRAINED * self._max_bytes)


async def _refuse(
    error: ApiError, scope: Scope, chunks: Chunks, send: Send, drain_limit: int
) -> None:
    # Most clients read no answer before they have sent all: closing earlier would look to them
    # like a broken connection. One that waits for "100 Continue" has not started yet.
    waits = _header(scope, b"expect").lower() == b"100-continue"
    whole = not waits and await _drain(chunks, scope, drain_limit)
    if not whole:
        error.headers["Connection"] = "close"
    await error_response(error)(scope, _nothing, send)


async def _drain(chunks: Chunks, scope: Scope, limit: int) -> bool:
    """Read and forget the rest of the body; False if that is more than `limit`."""
    if _content_length(scope) > limit:
        return False
    size = 0
    async for chunk in chunks:
        size += len(chunk or b"")
        if size > limit:
            return False
    return True


async def _chunks(receive: Receive) -> Chunks:
    """The body; None, at the end, if the client went away before."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            yield None
            return
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _is_guarded(path: str) -> bool:
    return path.startswith("/v1/") or path == "/metrics"


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _content_length(scope: Scope) -> int:
    length = _header(scope, b"content-length")
    return int(length) if length.isdigit() else 0
