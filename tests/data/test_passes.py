"""Sampling without replacement: every row once per pass, for any number of rows per call."""

import json

import pytest

from flow_grpo.data.passes import PassState, restore_pass_states, take_rows


def epochs(size: int, counts: list[list[int]], seed: int = 3) -> list[list[int]]:
    """Return the rows of each epoch, given the row counts of its calls.

    The state is serialized between epochs, as in a run that is resumed after each.
    """
    state, drawn = PassState(size), []
    for parts in counts:
        rows: list[int] = []
        for count in parts:
            taken, state = take_rows(state, count, rows, seed=seed, number=0)
            rows += taken
        drawn.append(rows)
        saved = json.loads(json.dumps([state.to_json()]))
        [state], same = restore_pass_states([size], saved)
        assert same
    return drawn


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (12, [[4]] * 9),  # divides
        (20, [[16]] * 15),  # an epoch may end one pass and begin the next
        (7, [[7]] * 5),
        (9, [[8]] * 27),
        (10, [[4, 3], [4], [4, 4, 2], [4, 1]] * 5),  # several calls per epoch
        (5, [[2, 3], [1], [5], [4]] * 7),
        (1, [[1]] * 3),
    ],
)
def test_a_pass_has_every_row_once(size, counts):
    drawn = epochs(size, counts)
    assert [len(rows) for rows in drawn] == [sum(parts) for parts in counts]
    assert all(len(set(rows)) == len(rows) for rows in drawn)  # an epoch has distinct rows
    rows = [row for each in drawn for row in each]
    passes = [rows[i : i + size] for i in range(0, len(rows), size)]
    assert len(passes) > 2
    for each in passes:
        assert len(set(each)) == len(each)
    assert all(sorted(each) == list(range(size)) for each in passes[:-1])


def test_passes_have_different_orders():
    first, second, third = epochs(50, [[50]] * 3)
    assert len({tuple(rows) for rows in (first, second, third, range(50))}) == 4
    assert epochs(50, [[50]], seed=4) != [first]
    other, _ = take_rows(PassState(50), 50, [], seed=3, number=1)  # of another data set
    assert other != first


def test_the_size_of_an_epoch_does_not_change_the_order_of_a_pass():
    [whole], halves = epochs(30, [[30]]), epochs(30, [[15], [10, 5]])
    assert [*halves[0], *halves[1]] == whole


def test_the_state_is_as_small_as_an_epoch():
    state = PassState(10_000)
    for _ in range(30):
        _, state = take_rows(state, 700, [], seed=1, number=0)
        assert len(state.skipped) < 700
    assert state.taken == 21_000


def test_new_passes_begin_when_the_data_changed():
    saved = [PassState(5, 3).to_json(), PassState(8, 9, (1, 2)).to_json()]
    assert restore_pass_states([5, 8], saved) == ([PassState(5, 3), PassState(8, 9, (1, 2))], True)
    for sizes, before in (([5, 9], saved), ([5], saved), ([5, 8], [])):
        assert restore_pass_states(sizes, before) == ([PassState(size) for size in sizes], False)


def test_taking_more_rows_than_are_unused_is_an_error():
    with pytest.raises(ValueError, match="3 of 5 rows"):
        take_rows(PassState(5), 3, [0, 1, 2], seed=1, number=0)
