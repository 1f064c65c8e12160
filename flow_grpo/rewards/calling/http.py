"""JSON requests to one or several servers that all do the same, some of which may be down."""

import os
import random
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import Attempts, FailurePolicy, describe

CONNECT_TIMEOUT = 5.0
CONNECT_ATTEMPTS = 3
PROBE_TIMEOUT = 5.0
DOWN_SHARE = 0.1  # of the deadline, for a request to servers that just used up a whole one
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BUSY_STATUSES = (429, 503)  # alive, and asks to come back later
TOO_SLOW = 408  # the way there was, not what was asked
DEFAULT_WAIT = 1.0  # seconds, where a busy server does not say how long
SHORTEST_WAIT = 0.1  # seconds, where it says 0


class Unavailable(Exception):
    """No server gave an answer within the attempts and the time there were."""


class Refused(Exception):
    """A server turned the request down, and would turn it down again."""


def parse_urls(text: str, setting: str) -> list[str]:
    """`text` is one URL or several with commas between; `setting` is named in the error."""
    urls = [url.strip().rstrip("/") for url in text.split(",") if url.strip()]
    for url in urls:
        if not _is_http(url):
            raise UserError(f"{setting}={url!r} must read like http://host:18085")
    if not urls:
        raise UserError(f"{setting} is empty; it must name a server, like http://host:18085")
    return urls


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False


def token_from(variable: str) -> str | None:
    """The token in an environment variable: configs are written to disk, tokens are not."""
    return os.environ.get(variable, "").strip() or None  # files of secrets end in a newline


class ServerGroup:
    """Sends each request to a server that answers.

    A request goes from server to server; after a round without an answer it waits, longer each
    time, until the policy's attempts or the deadline are used up. Once that has happened,
    requests first ask `probe` (a path that is cheap to get) and fail at once while no server
    answers: a run with a dead server ends soon, and one whose server came back goes on.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        policy: FailurePolicy,
        probe: str,
        token: str | None = None,
        connections: int = 16,
    ) -> None:
        self.urls = list(urls)
        self.policy = policy
        self._probe_path = probe
        self._down = ""  # why, if the last request found no server
        self._session = requests.Session()
        self._session.auth = _Bearer(token)
        # a proxy is for the way out, not for this machine's own servers
        self._session.trust_env = not all(urlsplit(u).hostname in LOOPBACK for u in self.urls)
        # Connecting is safe to repeat at once. What was sent is repeated by `post`, which knows
        # the deadline and the other servers.
        at_once = Retry(
            total=CONNECT_ATTEMPTS - 1,
            connect=CONNECT_ATTEMPTS - 1,
            read=0,
            other=0,
            status=0,
            redirect=0,
            backoff_factor=0.1,
        )
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=at_once, pool_maxsize=connections))

    def get(self, url: str, path: str, timeout: float) -> Any:
        """One attempt at one server."""
        return self._answer(self._session.get(url + path, timeout=timeout))

    def post(self, path: str, body: dict[str, Any], *, deadline: float, start: int = 0) -> Any:
        """The JSON answer to `body`; `deadline` is of time.monotonic(), `start` the server to
        ask first."""
        if time.monotonic() >= deadline:
            raise Unavailable(f"not asked: the {self.policy.timeout:g} s were over")
        if self._down and not self._is_up(deadline):
            raise Unavailable(f"{self._down}; still no answer")
        # While it is down, one quick round: a run whose reward is dead should end soon.
        attempts = Attempts(iter(()) if self._down else self.policy.delays(), deadline)
        share = DOWN_SHARE if self._down else 1.0
        order = [self.urls[(start + i) % len(self.urls)] for i in range(len(self.urls))]
        while True:
            busy, last = None, None
            for number, url in enumerate(order):
                # a server that hangs leaves the others their part of the time
                left = share * (deadline - time.monotonic()) / (len(order) - number)
                try:
                    answer = self._answer(self._post(url + path, body, max(0.1, left)))
                    self._down = ""
                    return answer
                except _Busy as error:
                    busy, last = error, f"{url}: {error}"
                except (requests.RequestException, _ServerError) as error:
                    last = f"{url}: {_reason(error)}"
                if time.monotonic() >= deadline:
                    break
            if not attempts.wait(last, busy.wait if busy else None):  # it is alive: no attempt
                late = f"{self.policy.timeout:g} s"
                effort = late if attempts.out_of_time else f"{self.policy.retries + 1} attempts"
                self._down = f"{last}, after {effort}"
                raise Unavailable(self._down)

    def _post(self, url: str, body: dict[str, Any], timeout: float) -> requests.Response:
        connect = min(CONNECT_TIMEOUT, timeout / CONNECT_ATTEMPTS)
        return self._session.post(url, json=body, timeout=(connect, timeout))

    def _answer(self, response: requests.Response) -> Any:
        if response.ok:
            try:
                return response.json()
            except ValueError as error:
                raise _ServerError("answered with something that is not JSON") from error
        said = _error(response)
        message = said.get("message", response.reason or "")
        message = f"answered {response.status_code} {message}".rstrip()
        if response.status_code in BUSY_STATUSES:
            raise _Busy(message, response.headers.get("Retry-After", ""))
        in_trouble = response.status_code >= 500 and said.get("code") != "scorer_broken"
        if in_trouble or response.status_code == TOO_SLOW:
            raise _ServerError(message)
        raise Refused(f"{response.url.split('?')[0]} {message}")

    def _is_up(self, deadline: float) -> bool:
        for url in self.urls:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                self.get(url, self._probe_path, min(PROBE_TIMEOUT, left / CONNECT_ATTEMPTS))
                return True
            except Refused:  # not every server has the path, but this one answers
                return True
            except (requests.RequestException, _ServerError):
                continue
        return False


class _Bearer(requests.auth.AuthBase):
    """As an object, so that a .netrc entry for the host does not take the token's place."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class _ServerError(Exception):
    """An answer that says the server is in trouble."""


class _Busy(_ServerError):
    def __init__(self, message: str, retry_after: str) -> None:
        super().__init__(message)
        # The header may also hold a date, which no server of ours sends.
        given = float(retry_after) if retry_after.isdecimal() else DEFAULT_WAIT
        self.wait = max(SHORTEST_WAIT, given) * random.uniform(1.0, 1.5)


def _error(response: requests.Response) -> dict[str, Any]:
    """What the server says is wrong, in the form of our server or of OpenAI's API."""
    try:
        error = response.json()["error"]
        return error if isinstance(error, dict) else {"message": error}
    except (ValueError, LookupError, TypeError):
        return {}


def _reason(error: Exception) -> str:
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {CONNECT_TIMEOUT:g} s"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.ConnectionError):
        return "cannot connect" if "Max retries" in str(error) else "the connection broke"
    return str(error) if isinstance(error, _ServerError) else describe(error)
