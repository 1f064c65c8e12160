"""Win rates of candidates and agreement of voters."""

import pytest

from flow_grpo.votes.ballots import Ballot, Vote
from flow_grpo.votes.summary import Agreement, agreement, format_summary, wilson_interval, win_rates


def voted(name: str, *choices: str, candidates=("base", "trained")):
    ballot = Ballot(name, "p", (f"{name}0", f"{name}1"), "checkpoints", candidates)
    return ballot, [Vote(f"{name}{i}", name, f"v{i}", each) for i, each in enumerate(choices)]


BALLOTS = [
    voted("a", "second", "second"),
    voted("b", "second", "tie"),
    voted("c", "first", "second", "skip"),
    voted("d", "tie"),
    voted("e", "skip"),
    voted("f"),
]


def test_win_rates_average_the_votes_on_a_pair_before_the_pairs():
    base, trained = win_rates(BALLOTS)
    assert (base.candidate, base.wins, base.ties, base.losses, base.pairs) == ("base", 1, 2, 4, 4)
    assert base.rate == pytest.approx((0 + 0.25 + 0.5 + 0.5) / 4)
    assert (trained.wins, trained.ties, trained.losses) == (4, 2, 1)
    assert trained.rate == pytest.approx(1 - base.rate)
    assert trained.interval == pytest.approx([1 - bound for bound in base.interval[::-1]])
    assert win_rates([voted("a", "first", candidates=("one", "one"))]) == []


def test_wilson_intervals_equal_published_values():
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3
    for wins, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson_interval(wins / count, count) == pytest.approx((low, high), abs=5e-5)


def test_agreement_compares_votes_of_different_voters_on_one_pair():
    assert agreement(BALLOTS) == Agreement(same=1, compared=3)


def test_a_summary_shows_counts_and_rates():
    same = Ballot("g", "p", ("x", "x"), "checkpoints", ("base", "trained"))
    text = format_summary([*BALLOTS, (same, [])])
    for shown in ("5 of 6 pairs", "9 votes", "2 ties", "2 skipped", "v0 5, v1 3, v2 1"):
        assert shown in text
    assert "68.8%" in text
    assert "1 of 3" in text
    assert format_summary([])
