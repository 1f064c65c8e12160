"""Win rates of candidates and agreement of voters."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flow_grpo.errors import UserError
from flow_grpo.report.console import format_table
from flow_grpo.votes.ask import random_order
from flow_grpo.votes.ballots import Ballot, Vote
from flow_grpo.votes.book import VOTES_FILE, VoteBook

Z = 1.959963984540054  # 97.5th percentile of the normal distribution
CREDIT = {"first": 1.0, "tie": 0.5, "second": 0.0}  # of the first image


@dataclass(frozen=True)
class WinRate:
    """How often a candidate's image was preferred to the other candidate's."""

    candidate: str
    wins: int  # votes
    ties: int
    losses: int
    rate: float  # mean over pairs of the mean over votes; a tie is half a win
    interval: tuple[float, float]  # 95 %
    pairs: int


@dataclass(frozen=True)
class Agreement:
    """How often two votes on the same pair of images had the same verdict, over all voters."""

    same: int
    compared: int  # pairs of votes on the same images


def win_rates(ballots: Iterable[tuple[Ballot, list[Vote]]]) -> list[WinRate]:
    """Return both win rates for each pair of candidates; skipped ballots do not count."""
    judged: dict[tuple[str, str], list[list[str]]] = defaultdict(list)
    for ballot, votes in ballots:
        choices = [vote.choice for vote in votes if vote.choice in CREDIT]
        first, second = ballot.candidates
        if choices and first != second:
            judged[first, second].append(choices)
    rates = []
    for names, pairs in judged.items():
        counts = Counter(itertools.chain.from_iterable(pairs))
        mean = sum(sum(map(CREDIT.get, each)) / len(each) for each in pairs) / len(pairs)
        for name, won, lost, rate in (
            (names[0], "first", "second", mean),
            (names[1], "second", "first", 1 - mean),
        ):
            interval = wilson_interval(rate, len(pairs))
            row = (counts[won], counts["tie"], counts[lost], rate, interval, len(pairs))
            rates.append(WinRate(name, *row))
    return rates


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval (Wilson 1927) of a rate over independent pairs.

    Pairs rather than votes are counted, as votes on one pair are not independent. For pairs with
    ties or several votes, whose variance is smaller than that of a coin, it is conservative.
    """
    center = (rate + Z * Z / (2 * count)) / (1 + Z * Z / count)
    spread = rate * (1 - rate) / count + Z * Z / (4 * count * count)
    half = Z / (1 + Z * Z / count) * math.sqrt(spread)
    return max(0.0, center - half), min(1.0, center + half)


def agreement(ballots: Iterable[tuple[Ballot, list[Vote]]]) -> Agreement:
    """Compare all pairs of votes on the same ballot, without skips."""
    same = compared = 0
    for _, votes in ballots:
        choices = [vote.choice for vote in votes if vote.choice in CREDIT]
        for a, b in itertools.combinations(choices, 2):
            same, compared = same + (a == b), compared + 1
    return Agreement(same, compared)


def format_summary(ballots: list[tuple[Ballot, list[Vote]]]) -> str:
    """Return a text with counts, a table of win rates, and the agreement of voters."""
    votes = [vote for _, each in ballots for vote in each]
    choices = Counter(vote.choice for vote in votes)
    voters = Counter(vote.voter for vote in votes)
    answered = sum(bool(each) for _, each in ballots)
    asked = sum(not ballot.is_identical for ballot, _ in ballots)
    lines = [
        f"{answered} of {asked} pairs answered: {len(votes)} votes, of them {choices['tie']} ties "
        f"and {choices['skip']} skipped"
    ]
    if voters:
        lines.append("voters: " + ", ".join(f"{name} {n}" for name, n in voters.most_common()))
    if identical := len(ballots) - asked:
        lines.append(f"{identical} pairs of identical images were not asked")
    if rates := win_rates(ballots):
        header = ["candidate", "wins", "ties", "losses", "pairs", "win rate", "95 % interval"]
        rows = [
            [
                r.candidate,
                *map(str, (r.wins, r.ties, r.losses, r.pairs)),
                f"{r.rate:.1%}",
                f"{r.interval[0]:.1%} to {r.interval[1]:.1%}",
            ]
            for r in rates
        ]
        lines += ["", format_table([header, *rows])]
    compared = agreement(ballots)
    if compared.compared:
        share = compared.same / compared.compared
        lines += [
            "",
            f"voters agree in {compared.same} of {compared.compared} comparisons of two votes on "
            f"one pair ({share:.1%})",
        ]
    return "\n".join(lines)


def read_votes(folder: Path) -> list[tuple[Ballot, list[Vote]]]:
    """Return the ballots of a directory with their votes; a server may be writing it."""
    if not (folder / VOTES_FILE).is_file():
        raise UserError("has no votes", field="--summary", value=str(folder))
    return VoteBook(folder, random_order, read_only=True).votes_by_ballot()
