"""The page on this machine, which follows runs that go on: `scripts/report.py --watch`."""

import hashlib
import logging
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from flow_grpo.errors import UserError
from flow_grpo.report import page

logger = logging.getLogger("flow_grpo")

LOCAL = ("127.0.0.1", "localhost", "::1")


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
        """Of what the page is made of, by names and sizes."""
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


def build_server(folders: list[Path], host: str, port: int) -> ThreadingHTTPServer:
    """Serves the page and its data, and no file."""
    watcher = Watcher(folders)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                asked = urlsplit(self.path)
                name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            except ValueError:  # brackets that do not close
                return self._answer(400, "text/plain", "this is no address")
            # else a page of somebody else's, under a name that leads here, could read the data
            if host in LOCAL and name not in LOCAL:
                return self._answer(403, "text/plain", f"this server answers {host} only")
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
            with suppress(ConnectionError):  # whoever asked has left
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Every two seconds would be too much."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot serve at {host}:{port}: {why}; choose another --port") from error
