"""Which ballots are asked, what counts, and that a restart changes neither."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flow_grpo.votes import book as book_module
from flow_grpo.votes.ask import ORDERS
from flow_grpo.votes.ballots import Ballot, Group, Vote, ring_pairs
from flow_grpo.votes.book import Progress, VoteBook, VoteConflict
from flow_grpo.votes.store import read_log


def ballot(name: str, **fields) -> Ballot:
    images = (f"images/{name}0.png", f"images/{name}1.png")
    return Ballot(name, f"prompt {name}", images, **{"source": "checkpoints", **fields})


def book(folder, *ballots: Ballot, ask: str = "random") -> VoteBook:
    made = VoteBook(folder, ORDERS[ask])
    for each in ballots:
        made.add_ballot(each)
    return made


def vote(votes: VoteBook, name: str, on: str, voter: str = "ann", choice: str = "first") -> bool:
    return votes.cast(Vote(name, on, voter, choice))


def asked(votes: VoteBook, voter: str) -> list[str]:
    return [each.id for each in votes.next_ballots(voter, 9)]


def test_a_repeated_vote_counts_once_and_a_second_one_is_rejected(tmp_path):
    votes = book(tmp_path, ballot("a"), ballot("b"))
    assert vote(votes, "1", "a")
    assert vote(votes, "1", "a")  # the answer was lost, the page repeats it
    with pytest.raises(VoteConflict):
        vote(votes, "2", "a", choice="second")
    with pytest.raises(VoteConflict):
        vote(votes, "1", "b")
    with pytest.raises(KeyError):
        vote(votes, "3", "none")
    assert len(read_log(tmp_path / "votes.jsonl")) == 1
    assert votes.progress("ann") == Progress(answered=1, left=1)


def test_undo_asks_the_ballot_again_and_repeating_it_undoes_nothing_more(tmp_path):
    votes = book(tmp_path, *map(ballot, "abc"))
    for name in "abc":
        vote(votes, f"{name}1", name)
    assert asked(votes, "ann") == []
    assert votes.undo("ann", "b1").ballot == "b"
    assert votes.undo("ann", "b1").ballot == "b"
    assert votes.undo("bob", "a1") is None  # not his
    assert asked(votes, "ann") == ["b"]
    assert not vote(votes, "b1", "b")  # a late repetition of the undone vote
    assert votes.undo("ann").ballot == "c"
    assert vote(votes, "b2", "b", choice="tie")
    again = VoteBook(tmp_path, ORDERS["random"])
    for each in (votes, again):
        assert each.progress("ann") == Progress(answered=2, left=1)
        assert each.last_vote("ann").id == "b2"
        assert asked(each, "ann") == ["c"]
    assert votes.undo("nobody") is None


def test_voters_share_the_ballots_and_each_sees_one_once(tmp_path):
    votes = book(tmp_path, *(ballot(name, votes=2) for name in "ab"), ballot("c"))
    first = votes.next_ballots("ann", 1)[0]
    vote(votes, "1", first.id)
    shown = votes.next_ballots("bob", 3)
    assert len(shown) == (2 if first.id == "c" else 3)
    for i, each in enumerate(shown):
        vote(votes, f"bob{i}", each.id, "bob", "skip")
    # a ballot that wants two votes is still open for others, not for bob
    assert asked(votes, "bob") == []
    assert all(each in "ab" for each in asked(votes, "ann"))
    vote(votes, "late", "c" if first.id != "c" else "a", "carl")  # was on his screen: kept


def test_a_ballot_on_another_screen_is_offered_last(tmp_path):
    votes = book(tmp_path, *map(ballot, "abc"))
    shown = [each.id for each in votes.next_ballots("ann", 2)]
    [left] = {*"abc"} - {*shown}
    assert asked(votes, "bob") == [left, *shown]


def test_lines_of_votes_name_the_chosen_image(tmp_path):
    votes = book(tmp_path, ballot("a", votes=3, sources=("images/s.png",)))
    for voter, choice in {"ann": "second", "bob": "tie", "carl": "first"}.items():
        vote(votes, voter, "a", voter, choice)
    second, tie, first = read_log(tmp_path / "votes.jsonl")
    assert (second["chosen"], second["rejected"]) == ("images/a1.png", "images/a0.png")
    assert (first["chosen"], first["rejected"]) == ("images/a0.png", "images/a1.png")
    assert "chosen" not in tie
    assert first["source_image"] == ["images/s.png"]
    assert all({r["left"], r["right"]} == {"images/a0.png", "images/a1.png"} for r in (tie, first))


def test_the_side_of_an_image_is_random_and_repeatable():
    ballots = [ballot(str(i)) for i in range(200)]
    orders = [each.shown_order("ann") for each in ballots]
    assert orders == [each.shown_order("ann") for each in ballots]
    assert 60 < orders.count((0, 1)) < 140
    assert orders != [each.shown_order("bob") for each in ballots]


def group(key: str = "key", digest: str = "1") -> Group:
    ballots = tuple(ballot(f"{key}{i}", source="run") for i in range(2))
    same = replace(ballot(f"{key}2", source="run"), images=("images/x.png",) * 2)
    pairs = ((0, 1, f"{key}0"), (0, 2, f"{key}1"), (1, 2, f"{key}2"))
    return Group(key, "run", digest, pairs, (*ballots, same))


def test_a_group_is_asked_before_other_ballots_until_it_is_withdrawn(tmp_path):
    votes = book(tmp_path, ballot("a"))
    votes.post_group(group())
    votes.post_group(group())  # repeated
    with pytest.raises(VoteConflict):
        votes.post_group(group(digest="2"))
    assert [each[:3] for each in asked(votes, "ann")] == ["key", "key", "a"]
    vote(votes, "1", "key0", choice="second")
    assert votes.group_result("key") == ([(0, 1, 0, 1, 0), (0, 2, 0, 0, 0), (1, 2, 0, 0, 1)], False)
    votes.withdraw_group("key")
    votes.withdraw_group("key")
    assert asked(votes, "ann") == ["a"]
    vote(votes, "2", "key1", choice="skip")  # it was on the screen
    again = VoteBook(tmp_path, ORDERS["random"])
    for each in (votes, again):
        rows, done = each.group_result("key")
        assert done
        assert rows == [(0, 1, 0, 1, 0), (0, 2, 0, 0, 0), (1, 2, 0, 0, 1)]
    again.undo("ann", "2")
    assert asked(again, "ann") == ["a"]  # still withdrawn
    again.post_group(group())  # the run was resumed before the time-out
    assert asked(again, "ann") == ["key1", "a"]
    with pytest.raises(KeyError):
        votes.group_result("unknown")


def test_disagreement_asks_split_ballots_first_and_agreed_ones_last(tmp_path):
    votes = book(tmp_path, *(ballot(name, votes=5) for name in "abcd"), ask="disagreement")
    given = {"ax": "first", "ay": "first", "bx": "first", "by": "second", "cx": "first"}
    for (name, voter), choice in given.items():
        vote(votes, name + voter, name, voter, choice)
    assert asked(votes, "ann") == ["b", "d", "c", "a"]


def test_margin_asks_pairs_with_close_rewards_first(tmp_path):
    margins = {"a": 0.5, "b": 0.1, "c": None, "d": 0.0}
    ballots = [ballot(name, margin=margin) for name, margin in margins.items()]
    assert asked(book(tmp_path, *ballots, ask="margin"), "ann") == ["d", "b", "a", "c"]


def test_the_random_order_is_the_same_after_a_restart(tmp_path):
    votes = book(tmp_path, *map(ballot, "abcdefgh"))
    order = asked(votes, "ann")
    assert order != sorted(order)
    assert asked(VoteBook(tmp_path, ORDERS["random"]), "bob") == order


@pytest.mark.parametrize(("count", "per_image"), [*itertools.product(range(1, 9), repeat=2)])
def test_each_image_of_a_ring_has_as_many_pairs(count, per_image):
    pairs = ring_pairs(count, per_image)
    assert all(i < j for i, j in pairs)
    assert len({*pairs}) == len(pairs)
    degrees = {sum(i in pair for pair in pairs) for i in range(count)}
    wanted = min(per_image, count - 1)
    assert degrees == {wanted + (wanted * count) % 2}


def test_a_run_that_is_silent_is_not_asked_for_until_it_asks_again(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0)
    monkeypatch.setattr(book_module, "time", clock)
    votes = book(tmp_path, ballot("a"))
    votes.post_group(group())
    clock.now += book_module.SILENT_SECONDS - 1
    assert asked(votes, "ann") == ["key0", "key1", "a"]
    votes.group_result("key")
    clock.now += book_module.SILENT_SECONDS - 1
    assert votes.progress("ann").left == 3
    clock.now += 1
    assert asked(votes, "ann") == ["a"]
    assert vote(votes, "late", "key0")  # was on a screen
    again = VoteBook(tmp_path, ORDERS["random"])  # the run may still live
    assert asked(again, "bob") == ["key1", "a"]
    votes.post_group(group())
    assert asked(votes, "bob") == ["key1", "a"]


def test_what_is_drawn_ahead_counts_for_the_fastest_voter(tmp_path):
    votes = book(tmp_path, *(ballot(name, votes=2) for name in "abc"))
    assert votes.num_ready() == 3
    vote(votes, "1", "a", "ann")
    vote(votes, "2", "b", "ann")
    vote(votes, "3", "c", "bob")
    assert votes.num_ready() == 1
