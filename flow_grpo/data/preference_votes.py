"""Parse the lines of votes.jsonl, and compute the result of the votes on each ballot.

A ballot shows two images of a prompt. A line is a vote, or the undoing of an earlier one:

    {"id": "7f", "ballot": "a1", "prompt": "a cat", "voter": "ann", "choice": "first",
     "chosen": "images/a.png", "rejected": "images/b.png"}
    {"undo": "7f", "voter": "ann"}

`choice` is "first", "second", "tie" or "skip"; the last two have no `chosen` and `rejected`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flow_grpo.data.prompts import Prompt
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource

ID, BALLOT, VOTER, CHOICE, UNDO = "id", "ballot", "voter", "choice", "undo"  # columns
DECIDED, TIE, SKIP = ("first", "second"), "tie", "skip"
TIES, SKIPPED, UNDONE = "ties", "skipped", "undone"  # why votes are left out


@dataclass(frozen=True)
class Vote:
    """A vote on a ballot; without images if it is a tie or was skipped."""

    id: str
    ballot: str
    voter: str
    choice: str
    prompt: Prompt
    chosen: ImageSource | None
    rejected: ImageSource | None
    where: str


@dataclass(frozen=True)
class Undo:
    """The undoing of a vote by its voter."""

    vote: str
    voter: str
    where: str


@dataclass(frozen=True)
class BallotResult:
    """Fraction of the votes on a ballot that prefer its first image; a tie is half a vote."""

    prompt: Prompt
    first: ImageSource
    second: ImageSource
    share: float


def parse_undo(row: Mapping[str, Any], where: str) -> Undo:
    """Read the line that undoes a vote."""
    return Undo(_text(row, UNDO, where), _text(row, VOTER, where), where)


def parse_vote(
    row: Mapping[str, Any],
    prompt: Prompt,
    chosen: ImageSource | None,
    rejected: ImageSource | None,
    where: str,
) -> Vote:
    """Read a vote, whose prompt and images have been resolved."""
    identity, ballot, voter, choice = (
        _text(row, name, where) for name in (ID, BALLOT, VOTER, CHOICE)
    )
    if choice not in (*DECIDED, TIE, SKIP):
        raise UserError(
            f'must have first, second, tie or skip in "{CHOICE}", got {choice!r:.80}',
            field=where,
        )
    if choice in DECIDED and (chosen is None or rejected is None):
        raise UserError('needs the images "chosen" and "rejected"', field=where)
    return Vote(identity, ballot, voter, choice, prompt, chosen, rejected, where)


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(f'needs text in "{name}", got {value!r:.80}', field=where)
    return value


def count_votes(lines: Iterable[Vote | Undo]) -> tuple[list[BallotResult], Counter[str]]:
    """Return the result of each ballot with a decided vote, and the number of votes left out.

    A vote that was sent twice counts once. If a voter voted twice on the same ballot, the later one
    counts.

    Raises:
        UserError: If votes with the same id or on the same ballot differ, or a line undoes a vote
            that is unknown or of another voter.
    """
    votes: dict[str, Vote] = {}
    undone = set()
    for line in lines:
        if isinstance(line, Vote):
            first = votes.setdefault(line.id, line)
            if replace(first, where=line.where) != line:
                raise UserError(f"has the id of {first.where} with other content", field=line.where)
        elif line.vote not in votes or votes[line.vote].voter != line.voter:
            raise UserError(
                f'undoes "{line.vote:.80}", which is not an earlier vote of {line.voter:.80}',
                field=line.where,
            )
        else:
            undone.add(line.vote)
    left_out = Counter({UNDONE: len(undone)} if undone else {})
    latest = {(v.ballot, v.voter): v for v in votes.values() if v.id not in undone}
    ballots: dict[str, list[Vote]] = defaultdict(list)
    for vote in latest.values():
        if vote.choice == SKIP:
            left_out[SKIPPED] += 1
        else:
            ballots[vote.ballot].append(vote)
    results = []
    for ballot in ballots.values():
        decided = [vote for vote in ballot if vote.choice in DECIDED]
        if decided:
            results.append(_ballot_result(decided, len(ballot) - len(decided)))
        else:
            left_out[TIES] += 1
    return results, left_out


def _ballot_result(decided: list[Vote], ties: int) -> BallotResult:
    """Return the result of a ballot's votes, of which at least one is decided."""
    shown = decided[0]
    for vote in decided:
        images = {vote.chosen, vote.rejected}
        if images != {shown.chosen, shown.rejected} or vote.prompt != shown.prompt:
            raise UserError(
                f'has a different prompt or different images for the ballot "{vote.ballot:.80}" '
                f"than {shown.where}",
                field=vote.where,
            )
    wins = sum(vote.chosen == shown.chosen for vote in decided)
    share = (wins + ties / 2) / (len(decided) + ties)
    return BallotResult(shown.prompt, shown.chosen, shown.rejected, share)
