"""The second-order ODE solver on flows with a known solution."""

import math
from itertools import pairwise

import pytest
import torch
from algorithm_fixtures import numbers

from flow_grpo.sde import dpm2_step, sde_step

STD = 0.4  # of Gaussian data


def marginal_std(sigma: float) -> float:
    return math.sqrt((1 - sigma) ** 2 * STD**2 + sigma**2)


def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """E[e - x0 | x] where x0 is Gaussian; the ODE's solution is then x(1) times the std."""
    return x * (sigma - (1 - sigma) * STD**2) / marginal_std(sigma) ** 2


def integrate(solver: str, sigmas: list[float], field=velocity, start: float = 1.0) -> float:
    x, before = numbers([start]), None
    for sigma, sigma_next in pairwise(sigmas):
        v = field(x, sigma)
        if solver == "dpm2":
            x, before = dpm2_step(v, x, sigma, sigma_next, before)
        else:
            x = sde_step(v, x, sigma, sigma_next, kind="ode").next_sample
    return x.item()


def equal_steps(first: float, last: float, steps: int) -> list[float]:
    return [first + (last - first) * i / steps for i in range(steps + 1)]


@pytest.mark.parametrize(("first", "last"), [(0.95, 0.05), (1.0, 0.05)])
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("dpm2", 2)])
def test_halving_the_step_divides_the_error_by_two_to_the_order(solver, order, first, last):
    exact = marginal_std(last) / marginal_std(first)
    errors = [abs(integrate(solver, equal_steps(first, last, n)) - exact) for n in (40, 80, 160)]
    for coarse, fine in pairwise(errors):
        assert coarse / fine == pytest.approx(2**order, rel=0.05)


def test_the_order_down_to_sigma_zero_is_two_up_to_a_logarithm():
    """Equal steps in sigma grow in log((1 - sigma)/sigma) there: the error is h^2 log(1/h)."""
    errors = [abs(integrate("dpm2", equal_steps(1.0, 0.0, n)) - STD) for n in (80, 160, 320, 640)]
    assert all(3.1 < coarse / fine < 4 for coarse, fine in pairwise(errors))


def test_ten_steps_are_more_accurate_than_euler():
    """The schedule of SD3 in ten steps."""
    sigmas = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049]
    exact = marginal_std(sigmas[-1])
    errors = {s: abs(integrate(s, sigmas) - exact) for s in ("euler", "dpm2")}
    assert errors["dpm2"] < errors["euler"] / 2


@pytest.mark.parametrize("sigmas", [(1.0, 0.7, 0.6, 0.0), (0.9, 0.2, 0.1), (1.0, 0.0)])
def test_a_straight_path_is_solved_exactly(sigmas):
    """v = (x - c)/sigma: a straight line to c. From x(1) = 3 to c = .5."""
    start = 0.5 + 2.5 * sigmas[0]
    found = integrate("dpm2", list(sigmas), lambda x, s: (x - 0.5) / s, start)
    assert found == pytest.approx(0.5 + 2.5 * sigmas[-1], abs=1e-12)


@pytest.mark.parametrize(
    ("before", "sigma", "sigma_next"),
    [(None, 1.0, 0.8), (None, 0.8, 0.5), (1.0, 0.8, 0.5), (0.5, 0.2, 0.0)],
)
def test_the_first_step_and_both_ends_are_euler_steps(before, sigma, sigma_next):
    """log((1 - sigma)/sigma) is infinite at 1 and 0."""
    x, v = numbers([0.3, -1.2]), numbers([0.7, 0.4])
    euler = sde_step(v, x, sigma, sigma_next, kind="ode").next_sample
    memory = None if before is None else (numbers([5.0, -5.0]), before)
    found, (x0, at) = dpm2_step(v, x, sigma, sigma_next, memory)
    torch.testing.assert_close(found, euler)
    torch.testing.assert_close(x0, x - sigma * v)
    assert at == sigma


def test_a_second_order_step_equals_a_hand_computed_one():
    """sigma 2/3, 1/2, 1/3: log((1 - s)/s) is -log 2, 0, log 2, so x0 is extrapolated by half a
    step: x = 1, v = 1: x0 = .5, previously .3: .5 + .2/2 = .6. Then x' = 2/3 * 1 + 1/3 * .6 =
    .866667; Euler gives 1 - 1/6 = .833333."""
    found, _ = dpm2_step(numbers([1.0]), numbers([1.0]), 1 / 2, 1 / 3, (numbers([0.3]), 2 / 3))
    assert found.item() == pytest.approx(0.866667, abs=1e-6)


def test_half_precision_is_computed_in_float32():
    x, v = torch.linspace(-1, 1, 6).half(), torch.linspace(0.7, -0.3, 6).half()
    (found, (x0, _)), (exact, (exact_x0, _)) = (
        dpm2_step(v.to(dtype), x.to(dtype), 0.6, 0.25, (torch.zeros(6), 0.8))
        for dtype in (torch.float16, torch.float32)
    )
    assert found.dtype == x0.dtype == torch.float32
    assert torch.equal(found, exact)
    assert torch.equal(x0, exact_x0)
