"""A client's connection: the size of its headers, and the time it may take, are bounded.

Before any of our routes sees a request, so also without a token.
"""

import asyncio
import math
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from reward_server.errors import ApiError, error_response
from reward_server.gate import OnlyHealth

MAX_HEADER_BYTES = 32 * 2**10
PART = 4 * 2**10  # of headers, that are parsed before they are counted
PROGRESS = 64 * 2**10  # bytes of a body that have to come within the time-out
STALLED = 2.0  # seconds without progress after which a client makes room for another
SPARE = 64  # connections above the limit that live long enough to be told so

# What a connection does, the first to go first when there are too many: it is kept open for a
# next request, sends headers, sends a body, or waits for our answer.
IDLE, HEADERS, BODY, ANSWER = range(4)


class Connection(HttpToolsProtocol):
    """`timeout`: seconds for the headers, for each `PROGRESS` of a body, and for an answer to be
    read."""

    def __init__(self, *args: Any, max_connections: int, timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._timeout = timeout
        self._header_bytes = 0
        self._in_body = False
        self._body_bytes = 0  # since the last progress
        self._phase = HEADERS
        self._since = time.monotonic()
        self._unread_since = math.inf
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        while len(self.connections) > self._max_connections:
            if not self._make_room():
                self.app = OnlyHealth(self.app, self._max_connections)
                self._refused = True
                break

    def data_received(self, data: bytes) -> None:
        # Small parts, because headers that are not wanted are not worth parsing.
        while data and not self._in_body and not self.transport.is_closing():
            part, data = data[:PART], data[PART:]
            self._header_bytes += len(part)
            super().data_received(part)
            if not self._in_body and self._header_bytes > MAX_HEADER_BYTES:
                self.refuse(
                    ApiError(
                        "headers_too_large",
                        f"the headers are larger than {MAX_HEADER_BYTES} bytes; send fewer",
                    )
                )
        if data and not self.transport.is_closing():
            self._body_bytes += len(data)
            super().data_received(data)
        self.phase()

    def on_headers_complete(self) -> None:
        self._header_bytes, self._in_body = 0, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = math.inf
        super().resume_writing()

    def phase(self) -> int:
        """What it does now."""
        phase = self._phase_now()
        if phase != self._phase or self._body_bytes >= PROGRESS:
            self._phase, self._since, self._body_bytes = phase, time.monotonic(), 0
        return phase

    def close_if_slow(self) -> None:
        phase, now = self.phase(), time.monotonic()
        closing = self.transport.is_closing()  # once the last answer is read
        if closing:
            self._unread_since = min(self._unread_since, now)
        if now - self._unread_since > self._timeout:
            self.transport.abort()
        elif not closing and phase in (HEADERS, BODY) and now - self._since > self._timeout:
            what = "headers" if phase == HEADERS else f"next {PROGRESS} bytes of the body"
            message = f"the {what} did not come within {self._timeout:g} s"
            self.refuse(ApiError("client_too_slow", message))

    def refuse(self, error: ApiError) -> None:
        """Answer and close, outside of any route."""
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + response.body)
        self.transport.close()

    def _phase_now(self) -> int:
        if self._in_body:
            return ANSWER if self.flow.read_paused else BODY  # paused: it is our turn
        if self.cycle is None or self.cycle.response_complete:
            # uvicorn stops the timer with the first byte of the next request
            return HEADERS if self.timeout_keep_alive_task is None else IDLE
        return ANSWER

    def _make_room(self) -> bool:
        """Close the connection that has waited for its client for the longest time."""
        flood = len(self.connections) > self._max_connections + SPARE
        others = [c for c in self.connections if c is not self and c._may_go(flood)]
        if not others:
            return False
        victim = min(others, key=lambda c: (c.phase(), c._since))
        victim.transport.abort()
        self.connections.discard(victim)  # at once: more may come before it is told
        return True

    def _may_go(self, flood: bool) -> bool:
        phase = self.phase()
        if phase in (IDLE, ANSWER):
            return phase == IDLE
        return (flood and self._refused) or time.monotonic() - self._since > STALLED
