"""HTTP server of the voting page and of the groups that runs post.

    GET    /                page, /page.css, /page.js, /images/NAME.png, /healthz
    GET    /api/next        ?voter=NAME: next ballots, progress, the voter's last vote
    POST   /api/vote        {"id", "ballot", "voter", "choice": "first" | "second" | "tie" | "skip"}
    POST   /api/undo        {"voter", "vote": id or null for the last one}
    POST   /api/groups      {"run", "key", "prompts", "images", "sources", "votes_per_pair",
                            "pairs_per_image"}: images in base64; idempotent by key
    GET    /api/groups/KEY  {"pairs": [[i, j, wins of i, wins of j, ties], ...], "done": bool}
    DELETE /api/groups/KEY  the run no longer waits

A response is sent after its content is on disk. Errors are {"error": {"code", "message"}}. With a
token, everything but the static page needs "Authorization: Bearer TOKEN"; no cookies are used.
Requests that another web page could send without the browser asking for permission are rejected:
bodies must be declared as JSON, and on a loopback address the Host header is checked.
"""

import hmac
import json
import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from flow_grpo.errors import UserError, first_line
from flow_grpo.host_header import is_allowed_host
from flow_grpo.report.server import CLIENT_TIMEOUT, FORBIDDEN_MESSAGE, ReportServer, listen
from flow_grpo.untrusted_files import parse_json
from flow_grpo.votes.ballots import Ballot
from flow_grpo.votes.book import VoteBook, VoteConflict
from flow_grpo.votes.image_files import ImageFiles
from flow_grpo.votes.requests import (
    Rejected,
    check_id,
    check_voter,
    parse_group,
    parse_undo,
    parse_vote,
)

logger = logging.getLogger("flow_grpo")
MAX_BODY_BYTES = 2**16
MAX_GROUP_BYTES = 256 * 2**20
MAX_DRAINED_BYTES = 2**24  # of a rejected request
MAX_GROUPS_AT_ONCE = 2  # requests with images that are read at the same time
BALLOTS_AHEAD = 3  # sent to the page, which loads their images early
PAGE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
GenerationStatus = Callable[[], tuple[int, str]]  # pairs to generate, reason of a stop


class VoteService:
    """Handles the requests of pages and runs, independently of HTTP.

    Args:
        book: Ballots and votes.
        images: Their images.
        token: Token that clients must send, if any.
        generation_status: Returns the number of pairs to be generated, and why generation stopped,
            or "".
        waits_for_runs: Whether ballots come from runs only, so that there may always be more.
    """

    def __init__(
        self,
        book: VoteBook,
        images: ImageFiles,
        *,
        token: str | None = None,
        generation_status: GenerationStatus = lambda: (0, ""),
        waits_for_runs: bool = True,
    ) -> None:
        self.book, self.images, self.token = book, images, token
        self._generation_status = generation_status
        self._waits_for_runs = waits_for_runs
        self._group_slots = threading.BoundedSemaphore(MAX_GROUPS_AT_ONCE)

    def next(self, voter: str) -> dict[str, Any]:
        """Return the next ballots of a voter, without the names of the candidates."""
        ballots = self.book.next_ballots(voter, BALLOTS_AHEAD)
        progress, last = self.book.progress(voter), self.book.last_vote(voter)
        remaining, problem = self._generation_status()
        state = "vote" if ballots else "wait" if remaining or self._waits_for_runs else "done"
        if problem and not ballots:
            state = "failed"
        return {
            "ballots": [_shown(ballot, voter) for ballot in ballots],
            "progress": {"answered": progress.answered, "left": progress.left + remaining},
            "state": state,
            "last": last and last.id,
        }

    def vote(self, body: Any) -> dict[str, Any]:
        """Store a vote; repeated requests have no effect."""
        try:
            return {"counted": self.book.cast(parse_vote(body))}
        except KeyError as error:
            raise Rejected(404, "unknown_ballot", "there is no such ballot") from error
        except VoteConflict as error:
            raise Rejected(409, "conflict", str(error)) from error

    def undo(self, body: Any) -> dict[str, Any]:
        """Undo a vote; return its id, or null if there is none."""
        vote = self.book.undo(*parse_undo(body))
        return {"undone": vote and vote.id}

    def post_group(self, read_body: Callable[[int], Any]) -> dict[str, Any]:
        """Store a run's group; return its pairs."""
        with self._group_slots:
            group = parse_group(read_body(MAX_GROUP_BYTES), self.images)
        try:
            self.book.post_group(group)
        except VoteConflict as error:
            raise Rejected(409, "conflict", str(error)) from error
        return {"key": group.key, "pairs": [[i, j] for i, j, _ in group.pairs]}

    def group(self, key: str) -> dict[str, Any]:
        """Return the votes on a group so far."""
        pairs, done = self.book.group_result(key)
        return {"pairs": pairs, "done": done}

    def withdraw_group(self, key: str) -> dict[str, Any]:
        """Stop showing the pairs of a group."""
        self.book.withdraw_group(key)
        return {"withdrawn": key}


def _shown(ballot: Ballot, voter: str) -> dict[str, Any]:
    """Return what a voter sees of a ballot, left image first."""
    names = ("first", "second")
    order = ballot.shown_order(voter)
    return {
        "id": ballot.id,
        "prompt": ballot.prompt,
        "images": [{"choice": names[i], "url": ballot.images[i]} for i in order],
        "sources": list(ballot.sources),
    }


def build_server(service: VoteService, host: str, port: int) -> ReportServer:
    """Return a server of the page and the API, listening on `host`."""
    page_files = {
        path: (files("flow_grpo.votes").joinpath(name).read_bytes(), kind)
        for path, (name, kind) in PAGE_FILES.items()
    }

    class Handler(BaseHTTPRequestHandler):
        """Answers one request per connection."""

        timeout = CLIENT_TIMEOUT
        server_version, sys_version = "flow-grpo", ""
        body_read = False

        def do_GET(self) -> None:
            self._handle(self._get)

        def do_POST(self) -> None:
            self._handle(self._post)

        def do_DELETE(self) -> None:
            self._handle(self._delete)

        def _handle(self, method: Callable[[str, dict], tuple[bytes, str]]) -> None:
            """Check access, call a method with path and query, and send its answer."""
            try:
                content, kind = self._checked(method)
                self._respond(200, content, kind)
            except Rejected as error:
                self._drain()
                self._respond_error(error)
            except OSError as error:
                if isinstance(error, ConnectionError | TimeoutError):
                    return
                logger.error("cannot store: %s", first_line(error))
                self._respond_error(Rejected(503, "storage_failed", "the disk is full or failed"))
            except Exception:
                logger.exception("the request failed")
                self._respond_error(Rejected(500, "internal_error", "see the log of the server"))

        def _checked(self, method: Callable) -> tuple[bytes, str]:
            """Return the answer to an allowed request."""
            try:
                url = urlsplit(self.path)
                query = parse_qs(url.query, keep_blank_values=True, max_num_fields=8)
            except ValueError as error:
                raise Rejected(400, "invalid_url", "invalid URL") from error
            if not is_allowed_host(host, self.headers.get("Host", "")):
                raise Rejected(403, "forbidden_host", FORBIDDEN_MESSAGE)
            if url.path == "/healthz":
                return _json({"status": "ok"})
            if self.command == "GET" and url.path in page_files:
                return page_files[url.path]
            if service.token and not self._has_token(service.token):
                raise Rejected(401, "unauthorized", "the token is missing or wrong")
            return method(unquote(url.path), query)

        def _has_token(self, token: str) -> bool:
            scheme, _, given = self.headers.get("Authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode())
            return same and scheme.lower() == "bearer"

        def _get(self, path: str, query: dict[str, list[str]]) -> tuple[bytes, str]:
            """Return an image, the next ballots or the votes on a group."""
            if path == "/api/next":
                return _json(service.next(check_voter(query.get("voter", [""])[-1])))
            folder, _, name = path.rpartition("/")
            if folder == "/images":
                content = service.images.read(name)
                if content is not None:
                    return content, "image/png"
            elif folder == "/api/groups":
                return self._of_group(service.group, name)
            raise Rejected(404, "not_found", "not found: the page is at /")

        def _post(self, path: str, _: dict[str, list[str]]) -> tuple[bytes, str]:
            """Store a vote, an undo or a group."""
            if path == "/api/vote":
                return _json(service.vote(self._read_body(MAX_BODY_BYTES)))
            if path == "/api/undo":
                return _json(service.undo(self._read_body(MAX_BODY_BYTES)))
            if path == "/api/groups":
                return _json(service.post_group(self._read_body))
            raise Rejected(404, "not_found", "not found")

        def _delete(self, path: str, _: dict[str, list[str]]) -> tuple[bytes, str]:
            """Withdraw a group."""
            folder, _, name = path.rpartition("/")
            if folder != "/api/groups":
                raise Rejected(404, "not_found", "not found")
            return self._of_group(service.withdraw_group, name)

        def _of_group(self, method: Callable[[str], Any], key: str) -> tuple[bytes, str]:
            try:
                return _json(method(check_id(key, "key")))
            except KeyError as error:
                raise Rejected(404, "unknown_group", f"no group has the key {key!r}") from error

        def _read_body(self, most: int) -> Any:
            """Return the JSON of the request body."""
            kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind != "application/json":  # what a form of another web page cannot send
                raise Rejected(415, "unsupported_type", "send Content-Type: application/json")
            length = self._content_length()
            if length is None:
                raise Rejected(411, "length_required", "send Content-Length")
            if length > most:
                raise Rejected(413, "body_too_large", f"at most {most} bytes are allowed")
            self.body_read = True
            body = self.rfile.read(length)
            if len(body) < length:
                raise Rejected(400, "incomplete_body", "the body ended early")
            try:
                return parse_json(body, "the body")
            except UserError as error:
                raise Rejected(400, "malformed_json", str(error)) from error

        def _content_length(self) -> int | None:
            """Return the Content-Length; None if it is missing or invalid."""
            length = self.headers.get("Content-Length", "")
            return int(length) if re.fullmatch("[0-9]{1,18}", length) else None

        def _drain(self) -> None:
            """Read the rest of a short body: otherwise closing the connection loses the answer."""
            if self.body_read:
                return
            left = min(self._content_length() or 0, MAX_DRAINED_BYTES)
            with suppress(OSError):
                while left > 0 and (chunk := self.rfile.read(min(left, 2**16))):
                    left -= len(chunk)

        def _respond_error(self, error: Rejected) -> None:
            body = {"error": {"code": error.code, "message": str(error)}}
            self._respond(error.status, *_json(body))

        def _respond(self, status: int, content: bytes, kind: str) -> None:
            """Send a complete response; a client that has disconnected is ignored."""
            self.send_response(status)
            is_image = kind == "image/png"  # named by its content
            for name, value in {
                **SECURITY_HEADERS,
                "Content-Type": kind,
                "Content-Length": str(len(content)),
                "Cache-Control": "private, max-age=86400, immutable" if is_image else "no-store",
            }.items():
                self.send_header(name, value)
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            with suppress(OSError):  # the client has disconnected
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing: pages poll."""

    return listen(host, port, Handler)


def _json(content: Any) -> tuple[bytes, str]:
    """Return JSON in ASCII and its type."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii"), "application/json"
