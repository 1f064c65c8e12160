"""State of all ballots and votes: which ballots to show next, and which votes count.

The directory contains append-only logs (see store.py) and images:

    votes.jsonl    one line per vote or undo; `preferences=` reads it
    ballots.jsonl  {"ballot": ...}, {"group": ...}, {"withdrawn": key}, {"reopened": key}
    images/        PNG files named by their content
"""

import heapq
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flow_grpo.votes.ballots import CHECKPOINTS, Ballot, Group, Vote
from flow_grpo.votes.store import AppendLog, read_log

logger = logging.getLogger("flow_grpo")
VOTES_FILE, BALLOTS_FILE = "votes.jsonl", "ballots.jsonl"
RESERVED_SECONDS = 120.0  # during which a ballot shown to one voter comes last for others
SILENT_SECONDS = 60.0  # after which a run that has not polled its votes is considered dead
Order = Callable[[Ballot, list[Vote]], Any]


class VoteConflict(Exception):
    """A vote that contradicts an earlier one, or a group posted again with other content."""


@dataclass(frozen=True)
class Progress:
    """Number of ballots that a voter has answered, and that are left for this voter."""

    answered: int
    left: int


class VoteBook:
    """All ballots and votes of a directory; safe to use from several threads.

    Args:
        folder: Directory of the logs; the caller holds its lock.
        order: Sort key of ballots, given the votes on each; the smallest is shown first.
        read_only: Read the logs, which another process may be writing; nothing can be added.
    """

    def __init__(self, folder: Path, order: Order, *, read_only: bool = False) -> None:
        self.folder, self._order = folder, order
        self._lock = threading.RLock()
        self._ballots: dict[str, Ballot] = {}
        self._open: dict[str, Ballot] = {}  # ballots that need more votes
        self._votes: dict[str, Vote] = {}  # by id, also undone ones
        self._undone: set[str] = set()  # ids of votes
        self._on_ballot: dict[str, dict[str, Vote]] = defaultdict(dict)  # ballot, voter
        self._by_voter: dict[str, list[str]] = defaultdict(list)  # ids of votes that count, in time
        self._groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}  # key, by the id of the ballot
        self._withdrawn: set[str] = set()  # keys
        self._heard: dict[str, float] = {}  # key: when its run last asked, or this server started
        self._shown: dict[str, dict[str, float]] = defaultdict(dict)  # ballot, voter: time
        if not read_only:
            self._ballot_log = AppendLog(folder / BALLOTS_FILE)
            self._vote_log = AppendLog(folder / VOTES_FILE)
        for record in read_log(folder / BALLOTS_FILE):
            self._apply_ballot_record(record)
        for record in read_log(folder / VOTES_FILE):
            self._apply_vote_record(record)

    def close(self) -> None:
        """Close the files, after the current write."""
        with self._lock:
            self._ballot_log.close()
            self._vote_log.close()

    # ballots

    def add_ballot(self, ballot: Ballot) -> None:
        """Store a ballot durably; a known ballot is ignored."""
        with self._lock:
            if ballot.id not in self._ballots:
                record = {"ballot": ballot.to_json()}
                self._ballot_log.append(record)
                self._apply_ballot_record(record)

    def without_ballots(self, names: Iterable[str]) -> list[str]:
        """Return the ids that no stored ballot has, in order."""
        with self._lock:
            return [name for name in names if name not in self._ballots]

    def post_group(self, group: Group) -> None:
        """Store a run's group and its ballots durably; repeated requests change nothing.

        Raises:
            VoteConflict: If the key was posted with other content.
        """
        with self._lock:
            self._heard[group.key] = time.monotonic()
            known = self._groups.get(group.key)
            if known is None:
                record = {"group": group.to_json()}
            elif known.digest != group.digest:
                raise VoteConflict(f"the key {group.key!r} was posted with other content")
            elif group.key in self._withdrawn:
                record = {"reopened": group.key}
            else:
                return
            self._ballot_log.append(record)
            self._apply_ballot_record(record)

    def withdraw_group(self, key: str) -> None:
        """Stop showing a group's ballots, because its run no longer waits; votes are kept.

        Raises:
            KeyError: If the key is unknown.
        """
        with self._lock:
            if key not in self._groups:
                raise KeyError(key)
            if key not in self._withdrawn:
                record = {"withdrawn": key}
                self._ballot_log.append(record)
                self._apply_ballot_record(record)

    def group_result(self, key: str) -> tuple[list[tuple[int, int, int, int, int]], bool]:
        """Return (i, j, wins of i, wins of j, ties) of a group's pairs, and whether it is complete.

        Identical images are a tie without a vote. A skip completes a pair like any other vote.

        Raises:
            KeyError: If the key is unknown.
        """
        with self._lock:
            if key in self._groups:
                self._heard[key] = time.monotonic()
            rows, done = [], True
            for i, j, name in self._groups[key].pairs:
                ballot = self._ballots[name]
                if ballot.is_identical:
                    rows.append((i, j, 0, 0, 1))
                    continue
                choices = [vote.choice for vote in self._on_ballot[name].values()]
                done = done and len(choices) >= ballot.votes
                rows.append((i, j, *(choices.count(c) for c in ("first", "second", "tie"))))
            return rows, done

    # votes

    def cast(self, vote: Vote) -> bool:
        """Store a vote durably; return whether it counts.

        A vote that is sent again with the same id counts once, or not at all if it was undone.

        Raises:
            KeyError: If the ballot is unknown.
            VoteConflict: If the voter has answered this ballot, or another vote has this id.
        """
        with self._lock:
            ballot = self._ballots[vote.ballot]
            if known := self._votes.get(vote.id):
                if known != vote:
                    raise VoteConflict("the id is that of another vote")
                return vote.id not in self._undone
            if vote.voter in self._on_ballot[vote.ballot]:
                raise VoteConflict("this voter has answered this ballot")
            record = vote.to_json(ballot, _now())
            self._vote_log.append(record)
            self._apply_vote_record(record)
            return True

    def undo(self, voter: str, vote: str | None = None) -> Vote | None:
        """Undo a vote durably and return it.

        Args:
            voter: Name of the voter.
            vote: Id of the vote, which makes a repeated request harmless; None: the last vote.

        Returns:
            The vote, also if it was undone before; None if there is none.
        """
        with self._lock:
            last = self.last_vote(voter)
            known = last if vote is None else self._votes.get(vote)
            if known is None or known.voter != voter:
                return None
            if known.id not in self._undone:
                record = {"undo": known.id, "voter": voter, "time": _now()}
                self._vote_log.append(record)
                self._apply_vote_record(record)
            return known

    def last_vote(self, voter: str) -> Vote | None:
        """Return the voter's last vote that counts."""
        with self._lock:
            votes = self._by_voter.get(voter)
            return self._votes[votes[-1]] if votes else None

    def votes_by_ballot(self) -> list[tuple[Ballot, list[Vote]]]:
        """Return the votes that count on each ballot."""
        with self._lock:
            return [(b, list(self._on_ballot[name].values())) for name, b in self._ballots.items()]

    # what to show

    def next_ballots(self, voter: str, count: int) -> list[Ballot]:
        """Return the ballots to show to a voter next, and reserve them for a while.

        Ballots whose vote this voter has undone come first, then those that runs wait for, then the
        others in the order of the book. Ballots on other voters' screens come last, because their
        votes may suffice.
        """
        now = time.monotonic()
        recent = now - RESERVED_SECONDS
        with self._lock:
            undone = {self._votes[v].ballot for v in self._undone if self._votes[v].voter == voter}

            def rank(ballot: Ballot) -> tuple:
                """Return the sort key of a ballot for this voter."""
                votes = list(self._on_ballot[ballot.id].values())
                others = {who for who, at in self._shown[ballot.id].items() if at > recent}
                others -= {voter, *self._on_ballot[ballot.id]}
                is_reserved = len(votes) + len(others) >= ballot.votes
                is_own = ballot.source == CHECKPOINTS
                order = self._order(ballot, votes)
                return ballot.id not in undone, is_reserved, is_own, order, ballot.id

            found = heapq.nsmallest(count, self._left_for(voter), key=rank)
            for ballot in found:
                self._shown[ballot.id][voter] = now
            return found

    def progress(self, voter: str) -> Progress:
        """Return how many ballots a voter has answered and how many can be shown now."""
        with self._lock:
            answered = len(self._by_voter.get(voter, ()))
            return Progress(answered, sum(1 for _ in self._left_for(voter)))

    def num_ready(self) -> int:
        """Return the number of checkpoint ballots left for the voter who has answered most."""
        with self._lock:
            own = [b.id for b in self._open.values() if b.source == CHECKPOINTS]
            answered: dict[str, int] = defaultdict(int)
            for name in own:
                for voter in self._on_ballot[name]:
                    answered[voter] += 1
            return len(own) - max(answered.values(), default=0)

    def _left_for(self, voter: str) -> Iterator[Ballot]:
        """Yield the ballots that can be shown: of checkpoints, and of runs that still wait."""
        silent = time.monotonic() - SILENT_SECONDS
        for ballot in self._open.values():
            heard = self._heard.get(self._group_of.get(ballot.id, ""), math.inf)
            if voter not in self._on_ballot[ballot.id] and heard > silent:
                yield ballot

    # the logs

    def _apply_ballot_record(self, record: dict[str, Any]) -> None:
        """Update the state with a line of ballots.jsonl."""
        if "ballot" in record:
            self._add([Ballot.from_json(record["ballot"])])
        elif "group" in record:
            group = Group.from_json(record["group"])
            self._groups[group.key] = group
            self._group_of |= {ballot.id: group.key for ballot in group.ballots}
            self._heard.setdefault(group.key, time.monotonic())
            self._add(group.ballots)
        elif "withdrawn" in record:
            self._withdrawn.add(record["withdrawn"])
            for ballot in self._groups[record["withdrawn"]].ballots:
                self._open.pop(ballot.id, None)
        elif "reopened" in record:
            self._withdrawn.discard(record["reopened"])
            self._add(self._groups[record["reopened"]].ballots)

    def _add(self, ballots: Iterable[Ballot]) -> None:
        """Register ballots, and open those that need votes."""
        for ballot in ballots:
            self._ballots[ballot.id] = ballot
            self._reopen_if_needed(ballot)

    def _reopen_if_needed(self, ballot: Ballot) -> None:
        if not ballot.is_identical and len(self._on_ballot[ballot.id]) < ballot.votes:
            self._open[ballot.id] = ballot

    def _apply_vote_record(self, record: dict[str, Any]) -> None:
        """Update the state with a line of votes.jsonl; an undo may be repeated."""
        if "undo" in record:
            vote = self._votes.get(record["undo"])
            if vote is None or vote.id in self._undone:
                return
            self._undone.add(vote.id)
            self._on_ballot[vote.ballot].pop(vote.voter, None)
            self._by_voter[vote.voter].remove(vote.id)
            if vote.ballot in self._ballots and not self._is_withdrawn(vote.ballot):
                self._reopen_if_needed(self._ballots[vote.ballot])
            return
        vote = Vote.from_json(record)
        if vote.id in self._votes or vote.voter in self._on_ballot[vote.ballot]:
            return
        self._votes[vote.id] = vote
        self._on_ballot[vote.ballot][vote.voter] = vote
        self._by_voter[vote.voter].append(vote.id)
        ballot = self._ballots.get(vote.ballot)
        if ballot is None:
            logger.warning("%s: vote %s is on an unknown ballot", VOTES_FILE, vote.id)
        elif len(self._on_ballot[vote.ballot]) >= ballot.votes:
            self._open.pop(vote.ballot, None)

    def _is_withdrawn(self, ballot: str) -> bool:
        return self._group_of.get(ballot) in self._withdrawn


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
