"""Local web server that keeps the report of active runs up to date (`report.py --watch`)."""

import hashlib
import logging
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from flow_grpo.errors import UserError
from flow_grpo.host_header import is_allowed_host
from flow_grpo.report import page

FORBIDDEN_MESSAGE = "only requests for this host are allowed"
logger = logging.getLogger("flow_grpo")
CLIENT_TIMEOUT = 10.0  # seconds without progress in reading or writing
MAX_CLIENTS = 64  # concurrent connections; a browser uses a few


class HostCheckMiddleware:
    """ASGI middleware that rejects requests with a foreign Host header (DNS rebinding)."""

    def __init__(self, app, served_at: str) -> None:
        self.app, self.served_at = app, served_at

    async def __call__(self, scope, receive, send) -> None:
        """Pass on requests with an allowed Host header; answer others with status 403."""
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "lifespan" or is_allowed_host(
            self.served_at, headers.get(b"host", b"").decode("latin-1")
        ):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": FORBIDDEN_MESSAGE.encode()})


class ReportWatcher:
    """The report data of runs, rebuilt on request if files have changed."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._lock = threading.Lock()
        self._version, self._data = "", {}
        self.latest()

    def latest(self) -> tuple[str, dict]:
        """Return a version and the current report data."""
        with self._lock:
            version = self._fingerprint()
            if version != self._version:
                try:
                    self._data = page.build_report_data(self.folders)
                    self._version = version
                except (UserError, OSError) as error:  # a run was removed, or is being written
                    if not self._data:
                        raise
                    logger.warning("still showing the previous data: %s", error)
            return self._version, self._data

    def _fingerprint(self) -> str:
        """Return a hash of names, sizes and times of the files that the page is made from."""
        marks = []
        for folder in self.folders:
            paths = [folder / "metrics.jsonl", folder / "config.json"]
            for path in [*paths, *sorted(folder.glob("samples/*/samples.jsonl"))]:
                try:
                    stat = path.stat()
                except OSError:
                    continue
                marks.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
        return hashlib.sha256("\n".join(marks).encode()).hexdigest()[:16]


class ReportServer(ThreadingHTTPServer):
    """HTTP server with at most MAX_CLIENTS threads; further connections are closed."""

    request_queue_size = MAX_CLIENTS  # connections that wait; with 5, the default, votes were lost

    def __init__(self, *args: Any) -> None:
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection, or close it if all threads are in use."""
        if self._slots.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except Exception:  # no thread was started that would release the slot
                self._slots.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, and make its thread available again."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


def listen(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ReportServer:
    """Return a server that listens on an address.

    Raises:
        UserError: If the address cannot be used, for example because the port is taken.
    """
    try:
        return ReportServer((host, port), handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot be opened at {host}:{port}: {reason}",
            field="--port",
            value=port,
            hint="choose another port",
        ) from error


def build_server(folders: list[Path], host: str, port: int) -> ReportServer:
    """Return a server of the page and its data; it serves no other file.

    Raises:
        UserError: If the port cannot be used.
    """
    watcher = ReportWatcher(folders)

    class Handler(BaseHTTPRequestHandler):
        """Serves the page at / and its data at /data.json; 204 if they are unchanged."""

        timeout = CLIENT_TIMEOUT

        def do_GET(self) -> None:
            try:
                url = urlsplit(self.path)
            except ValueError:  # unbalanced brackets
                return self._respond(400, "text/plain", "invalid URL")
            if not is_allowed_host(host, self.headers.get("Host", "")):
                return self._respond(403, "text/plain", FORBIDDEN_MESSAGE)
            if url.path not in ("/", "/data.json"):
                return self._respond(404, "text/plain", "not found: the report is at /")
            version, data = watcher.latest()
            if url.path == "/":
                return self._respond(200, "text/html", page.render_page(data, version))
            if parse_qs(url.query).get("have") == [version]:
                return self._respond(204, "application/json", "")
            content = page.to_compact_json({"version": version, **data})
            return self._respond(200, "application/json", content)

        def _respond(self, status: int, kind: str, text: str) -> None:
            """Send a complete response; a client that has disconnected is ignored."""
            content = text.encode(errors="replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if status != 204:
                self.send_header("Content-Length", str(len(content)))
            with suppress(OSError):  # the client has disconnected
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing: pages poll every two seconds."""

    return listen(host, port, Handler)
