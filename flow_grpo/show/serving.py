"""The page on this machine, which follows runs that go on: `scripts/report.py --watch`."""

import hashlib
import logging
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from flow_grpo.errors import UserError
from flow_grpo.hosts import is_allowed_host
from flow_grpo.show import page

REFUSED = "this server answers requests for this machine only"
logger = logging.getLogger("flow_grpo")
STALLED = 10.0  # seconds in which a client must go on with what it asks, or take what it gets
MOST_CLIENTS = 64  # at a time; a browser has a few connections


class OnlyOurs:
    """Around an ASGI app, which sees no other request."""

    def __init__(self, app, served_at: str) -> None:
        self.app, self.served_at = app, served_at

    async def __call__(self, scope, receive, send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "lifespan" or is_allowed_host(
            self.served_at, headers.get(b"host", b"").decode("latin-1")
        ):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": REFUSED.encode()})


class Watcher:
    """The newest data of the runs, made when somebody asks and files have changed."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._lock = threading.Lock()
        self._version, self._data = "", {}
        self.newest()

    def newest(self) -> tuple[str, dict]:
        with self._lock:
            version = self._fingerprint()
            if version != self._version:
                try:
                    self._data = page.build(self.folders)
                    self._version = version
                except (UserError, OSError) as error:  # a run that was removed, or is written now
                    if not self._data:
                        raise
                    logger.warning("still showing what was there before: %s", error)
            return self._version, self._data

    def _fingerprint(self) -> str:
        """A mark of what the page is made from, by names and sizes."""
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


class Server(ThreadingHTTPServer):
    """With a bound on its threads: those who come when all are taken are turned away."""

    def __init__(self, *args: Any) -> None:
        self._room = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except Exception:  # no thread could be started, which would give it back
                self._room.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


def build_server(folders: list[Path], host: str, port: int) -> Server:
    """Serves the page and its data, and no file."""
    watcher = Watcher(folders)

    class Handler(BaseHTTPRequestHandler):
        timeout = STALLED

        def do_GET(self) -> None:
            try:
                asked = urlsplit(self.path)
            except ValueError:  # brackets that do not close
                return self._answer(400, "text/plain", "this is no address")
            if not is_allowed_host(host, self.headers.get("Host", "")):
                return self._answer(403, "text/plain", REFUSED)
            if asked.path not in ("/", "/data.json"):
                return self._answer(404, "text/plain", "there is only one page here: /")
            version, data = watcher.newest()
            if asked.path == "/":
                return self._answer(200, "text/html", page.render(data, version))
            if parse_qs(asked.query).get("have") == [version]:
                return self._answer(204, "application/json", "")
            content = page.as_json({"version": version, **data})
            return self._answer(200, "application/json", content)

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode(errors="replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if status != 204:
                self.send_header("Content-Length", str(len(content)))
            with suppress(OSError):  # whoever asked has left, or takes no more
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Every two seconds would be too much."""

    try:
        return Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot serve at {host}:{port}: {why}; choose another --port") from error
