"""ASGI middleware: metrics, host and token checks, and limits on request bodies."""

import hmac
import time
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flow_grpo.host_header import is_allowed_host
from reward_server.errors import RETRY_AFTER, ApiError, ServerBusy, error_response, truncated_repr
from reward_server.metrics import UNKNOWN, Metrics

SCORE_PATH = "/v1/score"
HEALTH_PATHS = ("/healthz", "/readyz")
SMALL_BODY_BYTES = 2**20  # of a rejected request that are read when the server is overloaded
DRAIN_FACTOR = 4  # maximum body sizes of a rejected request that are read
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected

Chunks = AsyncIterator[bytes | None]


class HealthOnlyApp:
    """Application for connections beyond the limit: health checks work, the rest is rejected."""

    def __init__(self, app: ASGIApp, max_connections: int) -> None:
        self._app = app
        self._max_connections = max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on health checks; answer other requests with 503."""
        if scope["path"] in HEALTH_PATHS:
            return await self._app(scope, receive, send)
        error = ServerBusy(
            "too_many_connections",
            f"{self._max_connections} connections are open, the limit of --max-connections; try "
            "again later",
            RETRY_AFTER,
        )
        error.headers["Connection"] = "close"
        await _reject(error, scope, _chunks(receive), send, SMALL_BODY_BYTES)


class RequestMetricsMiddleware:
    """Count requests to /v1/score by reward and status; the route sets scope["state"]["reward"]."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request, and count it if it is for /v1/score."""
        if scope["type"] != "http" or scope["path"] != SCORE_PATH:
            return await self._app(scope, receive, send)
        start, status = time.monotonic(), CLIENT_CLOSED_REQUEST
        state = scope.setdefault("state", {})

        async def send_and_record(message: Message) -> None:
            """Send a message and record the status of the response."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        finally:
            reward = state.get("reward", UNKNOWN)
            self._metrics.requests.labels(reward, str(status)).inc()
            self._metrics.request_seconds.labels(reward).observe(time.monotonic() - start)


class AccessMiddleware:
    """Reject requests for another host (see flow_grpo/host_header.py) or without the token.

    The token is required as "Authorization: Bearer <token>", except for health checks and the
    schema.

    Args:
        app: The application.
        served_at: Host name or address of the server.
        token: Token that clients must send, if any.
        max_body_bytes: Size limit of a request body.
    """

    def __init__(
        self, app: ASGIApp, *, served_at: str, token: str | None, max_body_bytes: int
    ) -> None:
        self._app = app
        self._served_at = served_at
        self._token = token.encode() if token else None
        self._drain_limit = DRAIN_FACTOR * max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on an allowed request; reject others."""
        error = self._check_access(scope) if scope["type"] == "http" else None
        if error is None:
            return await self._app(scope, receive, send)
        await _reject(error, scope, _chunks(receive), send, self._drain_limit)

    def _check_access(self, scope: Scope) -> ApiError | None:
        """Return the error for a foreign Host header or a missing token; None if allowed."""
        host = _header(scope, b"host").decode("latin-1")
        if not is_allowed_host(self._served_at, host):
            return ApiError(
                "forbidden_host",
                f"the Host header {truncated_repr(host)} does not name this machine; on a loopback "
                "address use localhost or 127.0.0.1, or start the server with --host and "
                "--token-env",
            )
        if self._token and _requires_token(scope["path"]) and not self._has_valid_token(scope):
            return ApiError(
                "unauthorized",
                "the token is missing or wrong; send it as Authorization: Bearer <token>",
                {"WWW-Authenticate": "Bearer"},
            )
        return None

    def _has_valid_token(self, scope: Scope) -> bool:
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"


class BodyLimitMiddleware:
    """Read the body of /v1/score up to a limit and pass it on in one piece."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_buffered_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_buffered_bytes = max(max_bytes, max_buffered_bytes)
        self._buffered_bytes = 0  # of all pending requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and pass the request on; reject a body that is too large."""
        if scope["type"] != "http" or scope["path"] != SCORE_PATH:
            return await self._app(scope, receive, send)
        length, chunks = _content_length(scope), _chunks(receive)
        if length > self._max_bytes:
            return await self._reject(self._too_large(f"{length} bytes"), scope, chunks, send)
        body, size = [], 0
        try:
            async for chunk in chunks:
                if chunk is None:
                    return None  # the client disconnected
                body.append(chunk)
                size += len(chunk)
                self._buffered_bytes += len(chunk)
                if problem := self._check_size(size):
                    body.clear()
                    self._buffered_bytes -= size
                    size = 0
                    return await self._reject(problem, scope, chunks, send)
            replay = _replay(b"".join(body), receive)
            body.clear()
            await self._app(scope, replay, send)
        finally:
            self._buffered_bytes -= size

    def _check_size(self, size: int) -> ApiError | None:
        """Return the error if a body, or all that are being read, exceed a limit; else None."""
        if size > self._max_bytes:
            return self._too_large("larger")
        if self._buffered_bytes > self._max_buffered_bytes:
            return ServerBusy(
                "queue_full",
                f"requests of {self._buffered_bytes} bytes are pending, more than the maximum of "
                f"{self._max_buffered_bytes}; try again later",
                RETRY_AFTER,
            )
        return None

    def _too_large(self, what: str) -> ApiError:
        """Return the error for a body that is too large; `what` is its size."""
        return ApiError(
            "body_too_large",
            f"the body is {what}, at most {self._max_bytes} bytes are allowed; send fewer images "
            "per request",
        )

    async def _reject(self, error: ApiError, scope: Scope, chunks: Chunks, send: Send) -> None:
        await _reject(error, scope, chunks, send, DRAIN_FACTOR * self._max_bytes)


async def _reject(
    error: ApiError, scope: Scope, chunks: Chunks, send: Send, drain_limit: int
) -> None:
    """Send an error response after reading the rest of the body, up to `drain_limit` bytes."""
    # Most clients read the response only after sending the whole body: closing the connection
    # earlier looks like a network error to them. With "100-continue" they have not started.
    waits = _header(scope, b"expect").lower() == b"100-continue"
    if waits or not await _drain(chunks, scope, drain_limit):
        error.headers["Connection"] = "close"
    await error_response(error)(scope, _receive_disconnect, send)


async def _drain(chunks: Chunks, scope: Scope, limit: int) -> bool:
    """Read and discard the rest of the body; return False if it exceeds `limit` bytes."""
    if _content_length(scope) > limit:
        return False
    size = 0
    async for chunk in chunks:
        size += len(chunk or b"")
        if size > limit:
            return False
    return True


async def _chunks(receive: Receive) -> Chunks:
    """Yield the body in chunks, and None if the client disconnects."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            yield None
            return
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _receive_disconnect() -> Message:
    return {"type": "http.disconnect"}


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body in one message, then what `receive` yields."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _requires_token(path: str) -> bool:
    return path.startswith("/v1/") or path == "/metrics"


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _content_length(scope: Scope) -> int:
    length = _header(scope, b"content-length")
    return int(length) if length.isdigit() else 0
