"""HTTP connections with limits on header size, time and number, against slow and idle clients.

The limits apply before authentication, to every connection. When there are too many, the server
closes the one that has waited longest for its client: idle ones first, then those that stall while
sending headers or a body. Connections that wait for a response are never closed.
"""

import asyncio
import math
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from reward_server.errors import ApiError, error_response
from reward_server.middleware import HealthOnlyApp

MAX_HEADER_BYTES = 32 * 2**10
HEADER_CHUNK_BYTES = 4 * 2**10  # parsed between two checks of the header size
BODY_PROGRESS_BYTES = 64 * 2**10  # of a body that have to arrive within the timeout
STALL_SECONDS = 2.0  # without progress, after which a connection may be closed for another
SPARE_CONNECTIONS = 64  # beyond the limit, that live long enough to get an error response

# Phases of a connection in the order of eviction: kept alive, sending headers, sending a body,
# waiting for a response.
IDLE, HEADERS, BODY, RESPONSE = range(4)


class LimitedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol with limits.

    Args:
        max_connections: Open connections of the server.
        timeout: Seconds for a client to send its headers, to send each `BODY_PROGRESS_BYTES` of a
            body, and to read a response.
    """

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
        self._rejected = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Accept the connection; if there are too many, evict one or answer only health checks."""
        super().connection_made(transport)
        while len(self.connections) > self._max_connections:
            if not self._evict_connection():
                self.app = HealthOnlyApp(self.app, self._max_connections)
                self._rejected = True
                break

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; reject headers that are too large."""
        # In chunks, so that parsing stops soon after the limit.
        while data and not self._in_body and not self.transport.is_closing():
            part, data = data[:HEADER_CHUNK_BYTES], data[HEADER_CHUNK_BYTES:]
            self._header_bytes += len(part)
            super().data_received(part)
            if not self._in_body and self._header_bytes > MAX_HEADER_BYTES:
                message = f"the headers are larger than {MAX_HEADER_BYTES} bytes; send fewer"
                self.reject(ApiError("headers_too_large", message))
        if data and not self.transport.is_closing():
            self._body_bytes += len(data)
            super().data_received(data)
        self.update_phase()

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

    def update_phase(self) -> int:
        """Return the current phase and restart its timer on progress."""
        phase = self._compute_phase()
        if phase != self._phase or self._body_bytes >= BODY_PROGRESS_BYTES:
            self._phase, self._since, self._body_bytes = phase, time.monotonic(), 0
        return phase

    def close_if_slow(self) -> None:
        """Close the connection if its client has exceeded the timeout; called regularly."""
        phase, now = self.update_phase(), time.monotonic()
        closing = self.transport.is_closing()  # waits until the client has read the response
        if closing:
            self._unread_since = min(self._unread_since, now)
        if now - self._unread_since > self._timeout:
            self.transport.abort()
        elif not closing and phase in (HEADERS, BODY) and now - self._since > self._timeout:
            body = f"next {BODY_PROGRESS_BYTES} bytes of the body"
            what = "headers" if phase == HEADERS else body
            message = f"the {what} did not arrive within {self._timeout:g} s"
            self.reject(ApiError("client_too_slow", message))

    def reject(self, error: ApiError) -> None:
        """Send an error response and close the connection, without the application."""
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + response.body)
        self.transport.close()

    def _compute_phase(self) -> int:
        """Return HEADERS, BODY, RESPONSE or IDLE: what the connection waits for."""
        if self._in_body:
            return RESPONSE if self.flow.read_paused else BODY  # paused: the server is behind
        if self.cycle is None or self.cycle.response_complete:
            # uvicorn cancels the timer at the first byte of the next request
            return HEADERS if self.timeout_keep_alive_task is None else IDLE
        return RESPONSE

    def _evict_connection(self) -> bool:
        """Close the connection that has waited longest for its client, if there is one."""
        flood = len(self.connections) > self._max_connections + SPARE_CONNECTIONS
        others = [c for c in self.connections if c is not self and c._is_evictable(flood)]
        if not others:
            return False
        victim = min(others, key=lambda c: (c.update_phase(), c._since))
        victim.transport.abort()
        self.connections.discard(victim)  # now: more may arrive before `connection_lost`
        return True

    def _is_evictable(self, flood: bool) -> bool:
        """Return whether the connection is idle or its client stalls.

        With `flood`, those that answer only health checks can be evicted earlier.
        """
        phase = self.update_phase()
        if phase in (IDLE, RESPONSE):
            return phase == IDLE
        return (flood and self._rejected) or time.monotonic() - self._since > STALL_SECONDS
