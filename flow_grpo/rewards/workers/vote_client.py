"""Post groups of images to a vote server (`flow-grpo vote`) and wait until people have voted.

Votes take minutes to hours, so an outage of the server is not a failure: requests are retried until
the deadline of the group, with increasing delays of up to a few seconds. A group is identified by
its key. It may be posted again at any time, because the server keeps its votes.
"""

import logging
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import requests

from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import DEFAULT_POLICY
from flow_grpo.rewards.workers.http import (
    RequestRejected,
    ServerError,
    ServerGroup,
    describe_failure,
)

log = logging.getLogger(__name__)

GROUPS_PATH = "/api/groups"
UNKNOWN_GROUP = "unknown_group"  # the server's error code
CHECK_KEY = "check"  # of no group
CHECK_TIMEOUT = 10.0  # seconds
REQUEST_TIMEOUT = 120.0  # seconds; large images take a while to upload and to store
WITHDRAW_TIMEOUT = 3.0  # seconds
FIRST_POLL, FIRST_RETRY = 0.2, 0.5  # seconds until the votes are asked for, or a failed request
MAX_DELAY, DELAY_GROWTH = 5.0, 1.5  # limit of these seconds, and their growth
LOG_SECONDS = 60.0  # between two lines about missing votes, and about an outage
CONNECTIONS = 64
START_HINT = "start it with flow-grpo vote --out DIR"


class NoLongerWaiting(Exception):
    """The deadline of the votes has passed, or the run ends."""


@dataclass(frozen=True)
class PairVotes:
    """Votes on two images of a group, given by their indices."""

    first: int
    second: int
    first_wins: int
    second_wins: int
    ties: int

    @property
    def count(self) -> int:
        return self.first_wins + self.second_wins + self.ties


class VoteClient:
    """Client of one vote server; safe to use from several threads.

    Args:
        url: Address of the server.
        token: Bearer token.
        field: Config field of the address, for messages.
    """

    def __init__(self, url: str, token: str | None, field: str) -> None:
        self.url, self._field = url, field
        self._servers = ServerGroup(
            [url], policy=DEFAULT_POLICY, probe="/healthz", token=token, connections=CONNECTIONS
        )
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._missing: dict[str, tuple[int, int]] = {}  # by path: missing, wanted answers
        self._next_log = {"votes": 0.0, "outage": 0.0}  # of time.monotonic()
        self._is_down = False

    def check(self) -> None:
        """Raise `UserError` unless a vote server responds and accepts the token."""
        try:
            self._servers.get(self.url, f"{GROUPS_PATH}/{CHECK_KEY}", CHECK_TIMEOUT)
        except RequestRejected as error:
            if error.code == UNKNOWN_GROUP:
                return
            if error.status in (401, 403):
                raise UserError(
                    f"cannot be used: {error}",
                    field=self._field,
                    hint="set REWARD_SERVER_TOKEN to its token",
                ) from error
        except (requests.RequestException, ServerError) as error:
            raise UserError(
                f"does not respond ({describe_failure(error)[:100]})",
                field=self._field,
                value=self.url,
                hint=START_HINT,
            ) from error
        raise UserError("is not a vote server", field=self._field, value=self.url, hint=START_HINT)

    def collect(self, group: dict[str, Any], wanted: int, deadline: float) -> list[PairVotes]:
        """Post a group, wait for its votes and return them; withdraw it if some are missing.

        Args:
            group: Body of the request, with its key.
            wanted: Votes wanted for each pair.
            deadline: Time on the clock of `time.monotonic()`.

        Returns:
            The votes so far on each pair; [] if the server never received the group.

        Raises:
            RequestRejected: The server rejects the group.
            ValueError: The server sent something else than votes.
        """
        path, count = f"{GROUPS_PATH}/{group['key']}", len(group["images"])
        votes, is_done = [], False
        with self._changed:
            self._missing[path] = (0, 0)
        try:
            self._request("POST", GROUPS_PATH, deadline, group)
            for pause in _growing_delays(FIRST_POLL):
                try:
                    reply = self._request("GET", path, deadline)
                except RequestRejected as error:
                    if error.code != UNKNOWN_GROUP:
                        raise
                    self._request("POST", GROUPS_PATH, deadline, group)  # its directory is new
                    continue
                votes, is_done = _parse_votes(reply, count)
                self._note_missing(path, votes, 0 if is_done else wanted)
                left = deadline - time.monotonic()
                if is_done or left <= 0:
                    break
                self._sleep(min(pause, left))
        except NoLongerWaiting:
            pass
        finally:
            if not is_done:
                self._withdraw(path)
            with self._changed:
                del self._missing[path]
                self._changed.notify_all()
        return votes

    def close(self) -> None:
        """Stop waiting, and withdraw all groups whose votes are incomplete."""
        self._closed.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._missing, 2 * WITHDRAW_TIMEOUT)

    def _withdraw(self, path: str) -> None:
        """Tell the server, if it responds, that nobody waits for the votes on a group."""
        try:
            self._servers.send("DELETE", self.url, path, WITHDRAW_TIMEOUT)
        except (requests.RequestException, ServerError, RequestRejected) as error:
            log.info("could not withdraw a group of images: %s", describe_failure(error))

    def _request(self, method: str, path: str, deadline: float, body: Any = None) -> Any:
        """Return the JSON of a response, retrying until the deadline.

        Raises:
            NoLongerWaiting: There was no response in time, or the run ends.
            RequestRejected: The server rejected the request.
        """
        for delay in _growing_delays(FIRST_RETRY):
            timeout = min(REQUEST_TIMEOUT, max(1.0, deadline - time.monotonic()))
            try:
                reply = self._servers.send(method, self.url, path, timeout, body)
                break
            except RequestRejected as error:
                if error.code:
                    raise
                problem = str(error)  # not from the vote server, but from a proxy in front of it
            except (requests.RequestException, ServerError) as error:
                problem = describe_failure(error)
            self._note_outage(problem, delay)
            if time.monotonic() + delay >= deadline:
                raise NoLongerWaiting
            self._sleep(delay)
        self._note_outage(None)
        return reply

    def _sleep(self, seconds: float) -> None:
        """Sleep; raise `NoLongerWaiting` as soon as the run ends."""
        if self._closed.wait(seconds):
            raise NoLongerWaiting

    def _note_missing(self, path: str, votes: list[PairVotes], wanted: int) -> None:
        """Log periodically how many votes are missing, over all waiting groups."""
        missing = sum(max(0, wanted - pair.count) for pair in votes)
        with self._changed:
            self._missing[path] = (missing, wanted * len(votes))
            total, all_wanted = map(sum, zip(*self._missing.values(), strict=True))
            if not total or not self._is_log_due("votes"):
                return
        log.info("%-21s %d of %d missing; vote at %s", "votes", total, all_wanted, self.url)

    def _note_outage(self, problem: str | None, delay: float = 0.0) -> None:
        """Log periodically that the server does not respond, and once that it responds again."""
        with self._changed:
            was_down, self._is_down = self._is_down, problem is not None
            if problem is None:
                self._next_log["outage"] = 0.0
            is_due = was_down if problem is None else self._is_log_due("outage")
        if is_due and problem is None:
            log.info("vote server %s responds again", self.url)
        elif is_due:
            log.warning("vote server %s: %s; retrying in %.1f s", self.url, problem, delay)

    def _is_log_due(self, subject: str) -> bool:
        now = time.monotonic()
        if now < self._next_log[subject]:
            return False
        self._next_log[subject] = now + LOG_SECONDS
        return True


def _growing_delays(first: float) -> Iterator[float]:
    """Yield seconds to wait, without end; with jitter, so that groups and ranks take turns."""
    delay = first
    while True:
        yield delay * random.uniform(0.75, 1.25)
        delay = min(MAX_DELAY, DELAY_GROWTH * delay)


def _parse_votes(reply: Any, count: int) -> tuple[list[PairVotes], bool]:
    """Return the votes on `count` images in a server's reply, and whether all are there.

    Raises:
        ValueError: The reply is malformed.
    """
    try:
        votes = [PairVotes(*pair) for pair in reply["pairs"]]
        done = reply["done"]
    except (TypeError, LookupError) as error:
        raise ValueError("the vote server sent no votes") from error
    for pair in votes:
        numbers = (pair.first, pair.second, pair.first_wins, pair.second_wins, pair.ties)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"the vote server sent invalid votes {numbers!r:.100}")
        if pair.first == pair.second or max(pair.first, pair.second) >= count:
            raise ValueError(f"the vote server sent votes on images {pair.first}, {pair.second}")
    if not isinstance(done, bool):
        raise ValueError("the vote server sent no votes")
    return votes, done
