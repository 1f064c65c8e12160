import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.data.seeding import Stream, numpy_rng, torch_generator
from flow_grpo.windows import moving_window, stochastic_steps


def test_without_a_window_all_steps_but_the_last_add_noise():
    assert stochastic_steps(10) == range(9)


@pytest.mark.parametrize(("fraction", "count"), [(1, 9), (0.99, 9), (0.5, 5), (0.1, 1)])
def test_a_fraction_selects_the_first_steps(fraction, count):
    assert stochastic_steps(10, timestep_fraction=fraction) == range(count)


def test_a_fraction_is_robust_to_rounding():
    """0.29 * 100 is 28.999999999999996."""
    assert stochastic_steps(100, timestep_fraction=0.29) == range(29)


def test_the_first_of_two_steps_adds_noise():
    assert stochastic_steps(2) == range(1)


@given(st.integers(2, 40), st.data())
def test_a_window_lies_in_its_range(num_steps, data):
    first = data.draw(st.integers(0, num_steps - 2))
    last = data.draw(st.integers(first + 1, num_steps - 1))
    size = data.draw(st.integers(1, last - first))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    steps = stochastic_steps(num_steps, window_size=size, window_range=(first, last), rng=rng)
    assert len(steps) == size
    assert first <= steps[0]
    assert steps[-1] < last


def test_every_start_is_sampled():
    starts = {
        stochastic_steps(
            10, window_size=2, window_range=(1, 5), rng=numpy_rng(7, Stream.WINDOW, epoch)
        ).start
        for epoch in range(60)
    }
    assert starts == {1, 2, 3}


def test_without_a_range_a_window_excludes_only_the_last_step():
    rng = np.random.default_rng(0)
    assert {stochastic_steps(5, window_size=2, rng=rng).start for _ in range(60)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_steps": 1}, r"^num_steps=1 "),
        ({"window_size": 4, "window_range": (0, 3)}, r"^sde_window_size=4 .*\(0, 3\)"),
        ({"window_size": 3, "window_range": (1, 3)}, r"^sde_window_size=3 .*\(1, 3\)"),
        ({"window_size": 2, "window_range": (0, 10)}, r"^sde_window_range=\(0, 10\) .*\(0, 9\)"),
        ({"timestep_fraction": 0.01}, r"^timestep_fraction=0.01 .*10"),
        ({"timestep_fraction": 1.5}, r"^timestep_fraction=1.5 .*1"),
        ({"timestep_fraction": 0.0}, r"^timestep_fraction=0.0 .*0"),
        ({"window_size": -1}, r"^sde_window_size=-1 "),
        ({"window_size": 1, "window_range": (3, 3)}, r"^sde_window_range=\(3, 3\) "),
        ({"window_size": 1, "window_range": (-1, 3)}, r"^sde_window_range=\(-1, 3\) "),
        ({"window_size": 1, "rng": None}, r"^rng=None "),
    ],
)
def test_an_impossible_window_is_rejected(kwargs, message):
    kwargs = {"num_steps": 10, "rng": np.random.default_rng(0), **kwargs}
    with pytest.raises(ValueError, match=message):
        stochastic_steps(kwargs.pop("num_steps"), **kwargs)


def test_a_moving_window_wraps_around():
    """There are six starts: 0, 4, 8 - 6, 12 - 12."""
    starts = [
        moving_window(10, size=4, shift=4, every=2, epoch=epoch).start for epoch in (0, 1, 2, 4, 6)
    ]
    assert starts == [0, 0, 4, 2, 0]


def test_the_largest_moving_window_stays_in_place_and_a_larger_one_is_rejected():
    assert [moving_window(4, size=3, shift=1, every=1, epoch=e) for e in (0, 5)] == [range(3)] * 2
    with pytest.raises(ValueError, match=r"^mix\.window_size=4 .*sample\.num_steps=4"):
        moving_window(4, size=4, shift=1, every=1, epoch=0)


def test_random_streams_are_independent():
    """The same numbers in another stream or another position of the key give another seed."""
    keys = [(s, a, b) for s in (Stream.SAMPLE, Stream.GROUP) for a in (0, 1) for b in (0, 1)]
    draws = {torch_generator(3, *key).initial_seed() for key in keys}
    assert len(draws) == len(keys)
    assert torch_generator(3, Stream.EVAL, 5).initial_seed() == (
        torch_generator(3, Stream.EVAL, 5).initial_seed()
    )
