"""Orders in which pairs are shown to voters (`--ask`)."""

from collections.abc import Sequence

from flow_grpo.votes.ballots import Ballot, Vote, stable_id
from flow_grpo.votes.book import Order


def random_order(ballot: Ballot, votes: Sequence[Vote]) -> str:
    """Return a sort key that shuffles the ballots in the same way for all voters and restarts."""
    return stable_id("order", ballot.id)


def disagreement_order(ballot: Ballot, votes: Sequence[Vote]) -> tuple[float, int, str]:
    """Return a sort key that puts the least certain ballots first.

    With w wins of the first image (a tie is half a win) in n votes, the mean of the Beta(1 + w,
    1 + n - w) posterior is p = (w + 1) / (n + 2). Certainty is (p - 1/2)^2: 0 for a ballot that
    nobody has judged or on which voters are split. Among equally certain ballots, those with more
    votes are first, so a known disagreement precedes a ballot without votes.
    """
    judged = [vote.choice for vote in votes if vote.choice != "skip"]
    wins = judged.count("first") + judged.count("tie") / 2
    mean = (wins + 1) / (len(judged) + 2)
    return (mean - 0.5) ** 2, -len(judged), random_order(ballot, votes)


def margin_order(ballot: Ballot, votes: Sequence[Vote]) -> tuple[float, str]:
    """Return a sort key that puts the pairs with the smallest difference in reward first.

    Pairs without a reward are last.
    """
    margin = float("inf") if ballot.margin is None else ballot.margin
    return margin, random_order(ballot, votes)


ORDERS: dict[str, Order] = {
    "random": random_order,
    "disagreement": disagreement_order,
    "margin": margin_order,
}
