"""JSON requests to one or several equivalent servers, some of which may be down."""

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
from flow_grpo.rewards.failure import FailurePolicy, RetryTimer, describe_error

CONNECT_TIMEOUT = 5.0  # seconds
CONNECT_ATTEMPTS = 3
PROBE_TIMEOUT = 5.0  # seconds
DOWN_TIMEOUT_FRACTION = 0.1  # of the deadline, for requests after one that exceeded it
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BUSY_STATUSES = (429, 503)  # the server is alive and asks to retry later
REQUEST_TIMEOUT = 408  # caused by a slow connection, not by the request
DEFAULT_WAIT = 1.0  # seconds, if a busy server sends no Retry-After
MIN_WAIT = 0.1  # seconds, if it sends 0


class ServersUnavailable(Exception):
    """No server responded within the attempts and the deadline."""


class RequestRejected(Exception):
    """A server rejected the request and would reject it again.

    Attributes:
        status: HTTP status.
        code: The server's code for the error, if it sent one.
    """

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ServerError(Exception):
    """A response that reports a failure of the server."""


def parse_urls(text: str, field: str) -> list[str]:
    """Split a comma-separated list of URLs; errors name `field`."""
    urls = [url.strip().rstrip("/") for url in text.split(",") if url.strip()]
    invalid = [url for url in urls or [text] if not _is_http(url)]
    if invalid:
        raise UserError("must be a URL such as http://host:18085", field=field, value=invalid[0])
    return urls


def _is_http(url: str) -> bool:
    """Return whether a text is a valid http or https URL."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, an incomplete IPv6 address
        return False


def read_token(variable: str) -> str | None:
    """Read a token from an environment variable, since configs are written to disk."""
    return os.environ.get(variable, "").strip() or None  # secret files end in a newline


class ServerGroup:
    """Sends each request to a server that responds.

    A request is sent to one server after the other, with a growing pause after each round, until
    the policy's attempts or the deadline are used up. After that, requests first get the cheap path
    `probe` and fail at once while no server responds to it: a run with a dead server stops soon,
    and continues if the server comes back.
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
        self._down_reason = ""  # why the last request found no server, if so
        self._session = requests.Session()
        self._session.auth = _BearerAuth(token)
        # proxies from the environment must not be used for servers on this machine
        self._session.trust_env = not all(urlsplit(u).hostname in LOOPBACK for u in self.urls)
        # Only failed connections are retried here: `post` retries requests that were sent, because
        # it knows the deadline and the other servers.
        connect_retries = Retry(
            total=CONNECT_ATTEMPTS - 1,
            connect=CONNECT_ATTEMPTS - 1,
            read=0,
            other=0,
            status=0,
            redirect=0,
            backoff_factor=0.1,
        )
        adapter = HTTPAdapter(max_retries=connect_retries, pool_maxsize=connections)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, adapter)

    def get(self, url: str, path: str, timeout: float) -> Any:
        """Return the JSON response of one server, after a single attempt."""
        return self.send("GET", url, path, timeout)

    def send(
        self,
        method: str,
        url: str,
        path: str,
        timeout: float | tuple[float, float],
        body: Any = None,
    ) -> Any:
        """Return the JSON response of one server, after a single attempt.

        Args:
            method: "GET", "POST" or "DELETE".
            url: The server.
            path: Path on the server.
            timeout: Seconds to wait for a connection and then for the response; two numbers if
                they differ.
            body: JSON to send; None for none.

        Raises:
            requests.RequestException: There was no response.
            ServerError: The server failed, or sent no JSON.
            RequestRejected: The server rejected the request.
        """
        response = self._session.request(method, url + path, json=body, timeout=timeout)
        return self._parse_response(response)

    def post(self, path: str, body: dict[str, Any], *, deadline: float, start: int = 0) -> Any:
        """Return the JSON response to `body`.

        Args:
            path: Path on the servers.
            body: JSON body.
            deadline: Time on the clock of `time.monotonic()`.
            start: Index of the server to try first.

        Raises:
            ServersUnavailable: No server responded in time.
            RequestRejected: A server rejected the request.
        """
        if time.monotonic() >= deadline:
            raise ServersUnavailable(f"not sent: the {self.policy.timeout:g} s were over")
        if self._down_reason and not self._any_server_up(deadline):
            raise ServersUnavailable(f"{self._down_reason}; still no response")
        # While the servers are down, one quick round: a run with a dead reward should stop soon.
        attempts = RetryTimer(iter(()) if self._down_reason else self.policy.delays(), deadline)
        fraction = DOWN_TIMEOUT_FRACTION if self._down_reason else 1.0
        order = [self.urls[(start + i) % len(self.urls)] for i in range(len(self.urls))]
        while True:
            busy, last = None, None
            for number, url in enumerate(order):
                # split the remaining time, so that a hanging server leaves some for the others
                left = max(0.1, fraction * (deadline - time.monotonic()) / (len(order) - number))
                limits = (min(CONNECT_TIMEOUT, left / CONNECT_ATTEMPTS), left)
                try:
                    parsed = self.send("POST", url, path, limits, body)
                    self._down_reason = ""
                    return parsed
                except _ServerBusy as error:
                    busy, last = error, f"{url}: {error}"
                except (requests.RequestException, ServerError) as error:
                    last = f"{url}: {describe_failure(error)}"
                if time.monotonic() >= deadline:
                    break
            if not attempts.wait(last, busy.wait if busy else None):  # busy uses up no attempt
                effort = f"{self.policy.retries + 1} attempts"
                if attempts.out_of_time:
                    effort = f"{self.policy.timeout:g} s"
                self._down_reason = f"{last}, after {effort}"
                raise ServersUnavailable(self._down_reason)

    def _parse_response(self, response: requests.Response) -> Any:
        """Return the JSON of a response, or raise the error for its status.

        Raises:
            _ServerBusy: The server asks to retry later.
            ServerError: The server failed; another one may succeed.
            RequestRejected: The request itself is at fault.
        """
        if response.ok:
            try:
                return response.json()
            except ValueError as error:
                raise ServerError("the response is not JSON") from error
        details = _error_body(response)
        message = details.get("message", response.reason or "")
        message = f"answered {response.status_code} {message}".rstrip()
        if response.status_code in BUSY_STATUSES:
            raise _ServerBusy(message, response.headers.get("Retry-After", ""))
        server_failed = response.status_code >= 500 and details.get("code") != "scorer_broken"
        if server_failed or response.status_code == REQUEST_TIMEOUT:
            raise ServerError(message)
        code = details.get("code")
        raise RequestRejected(
            f"{response.url.split('?')[0]} {message}",
            response.status_code,
            code if isinstance(code, str) else "",
        )

    def _any_server_up(self, deadline: float) -> bool:
        """Return whether any server responds to the probe before the deadline."""
        for url in self.urls:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                self.get(url, self._probe_path, min(PROBE_TIMEOUT, left / CONNECT_ATTEMPTS))
                return True
            except RequestRejected:  # not every server has the path, but this one responds
                return True
            except (requests.RequestException, ServerError):
                continue
        return False


class _BearerAuth(requests.auth.AuthBase):
    """Sends the token; set as `auth` so that a .netrc entry for the host does not replace it."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class _ServerBusy(ServerError):
    """A response that asks to retry later, after `wait` seconds."""

    def __init__(self, message: str, retry_after: str) -> None:
        super().__init__(message)
        # Retry-After may also be a date, but reward servers send seconds
        seconds = float(retry_after) if retry_after.isdecimal() else DEFAULT_WAIT
        self.wait = max(MIN_WAIT, seconds) * random.uniform(1.0, 1.5)


def _error_body(response: requests.Response) -> dict[str, Any]:
    """Return the error object of a response, in the format of our server or of OpenAI's API."""
    try:
        error = response.json()["error"]
        return error if isinstance(error, dict) else {"message": error}
    except (ValueError, LookupError, TypeError):
        return {}


def describe_failure(error: Exception) -> str:
    """Return why a request failed, in a few words."""
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {CONNECT_TIMEOUT:g} s"
    if isinstance(error, requests.Timeout):
        return "no response in time"
    if isinstance(error, requests.ConnectionError):
        return "cannot connect" if "Max retries" in str(error) else "the connection was lost"
    return str(error) if isinstance(error, ServerError) else describe_error(error)
