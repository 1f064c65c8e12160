import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.sde import NEARLY_ONE, sde_step

X = torch.linspace(-1, 1, 8).reshape(2, 1, 2, 2)
V = torch.linspace(0.5, -0.5, 8).reshape(2, 1, 2, 2)


def sigmas(steps: int = 10) -> list[float]:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.tolist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("flow", (-0.569104, -0.631564)),
        ("dance", (0.915672, 0.852263)),
        ("cps", (-0.070055, -0.057211)),
    ],
)
def test_log_probs_equal_the_published_fixture(kind, expected):
    s = sigmas()
    for i, value in enumerate(expected):
        out = sde_step(V, X, s[i], s[i + 1], kind=kind, sigma_max=s[1], next_sample=0.9 * X)
        assert out.log_prob.tolist() == pytest.approx([value, value], abs=1e-5)


@given(
    kind=st.sampled_from(["flow", "dance"]),
    step=st.integers(0, 8),
    noise=st.floats(0.05, 1.5),
    seed=st.integers(0, 2**31),
)
def test_log_prob_is_that_of_a_normal_distribution(kind, step, noise, seed):
    s = sigmas()
    g = torch.Generator().manual_seed(seed)
    x, v, x_next = (torch.randn(3, 2, 4, 4, generator=g, dtype=torch.float64) for _ in range(3))
    out = sde_step(
        v, x, s[step], s[step + 1], kind=kind, noise_level=noise, sigma_max=s[1], next_sample=x_next
    )
    normal = torch.distributions.Normal(out.mean, out.std.expand_as(out.mean))
    expected = normal.log_prob(x_next).flatten(1).mean(1)
    torch.testing.assert_close(out.log_prob, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_every_sde_type_converges_to_the_ode_without_noise(kind):
    """The noise and the drift that compensates it vanish together."""
    s = sigmas()
    tiny = sde_step(V, X, s[3], s[4], kind=kind, noise_level=1e-4, next_sample=X)
    ode = sde_step(V, X, s[3], s[4], kind="ode")
    torch.testing.assert_close(tiny.mean, ode.mean, atol=1e-6, rtol=0)
    assert ode.log_prob is None
    assert torch.equal(ode.next_sample, X + V * (torch.tensor(s[4]) - torch.tensor(s[3])))


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_marginals_are_preserved(kind):
    """For Gaussian data the exact velocity is known, and so is the variance at the next sigma.

    With x0 ~ N(0, 1) the marginal at sigma is N(0, (1 - sigma)^2 + sigma^2). cps keeps it exactly;
    the Euler steps of flow and dance keep it up to O(dt^2), while their noise alone adds 7 %.
    """
    sigma, sigma_next = 0.6, 0.55
    variance = (1 - sigma) ** 2 + sigma**2
    g = torch.Generator().manual_seed(0)
    x = math.sqrt(variance) * torch.randn(4, 500_000, generator=g, dtype=torch.float64)
    # E[noise - x0 | x] for jointly Gaussian variables
    v = x * (sigma - (1 - sigma)) / variance
    # cps takes x0 and the noise from the velocity, so use the true pair instead of the expectation
    if kind == "cps":
        x0, noise = (torch.randn(4, 500_000, generator=g, dtype=torch.float64) for _ in range(2))
        x, v = (1 - sigma) * x0 + sigma * noise, noise - x0
    out = sde_step(v, x, sigma, sigma_next, kind=kind, noise_level=0.7, generator=g)
    expected = (1 - sigma_next) ** 2 + sigma_next**2
    assert out.next_sample.var().item() == pytest.approx(expected, rel=1e-2)


def test_a_sampled_step_has_the_log_prob_of_the_same_step_passed_in():
    sampled = sde_step(V, X, 0.9, 0.8, generator=torch.Generator().manual_seed(1))
    evaluated = sde_step(V, X, 0.9, 0.8, next_sample=sampled.next_sample)
    assert torch.equal(sampled.log_prob, evaluated.log_prob)
    spread = (sampled.next_sample - sampled.mean) / sampled.std
    assert 0.2 < spread.std() < 3


@pytest.mark.parametrize("kind", ["flow", "dance", "cps", "ode"])
def test_a_batch_of_mixed_sigmas_equals_its_rows(kind):
    sigma, sigma_next = torch.tensor([0.9, 0.5]), torch.tensor([0.8, 0.3])
    both = sde_step(V, X, sigma, sigma_next, kind=kind, next_sample=0.9 * X)
    for i in range(2):
        one = sde_step(
            V[i : i + 1],
            X[i : i + 1],
            sigma[i].item(),
            sigma_next[i].item(),
            kind=kind,
            next_sample=0.9 * X[i : i + 1],
        )
        torch.testing.assert_close(both.mean[i : i + 1], one.mean)
        if kind != "ode":
            torch.testing.assert_close(both.log_prob[i : i + 1], one.log_prob)
            torch.testing.assert_close(both.std[i : i + 1], one.std)


@pytest.mark.parametrize(("sigma", "replaced"), [(0.5, False), (NEARLY_ONE, False), (0.9991, True)])
def test_sigma_max_replaces_sigma_near_one(sigma, replaced):
    steps = [sde_step(V, X.double(), sigma, 0.4, sigma_max=m, next_sample=X) for m in (0.45, None)]
    assert torch.equal(steps[0].std, steps[1].std) != replaced


def test_one_generator_per_sample_makes_noise_independent_of_the_batch():
    def step(rows, seeds):
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        return sde_step(V[rows], X[rows], 0.9, 0.8, generator=tuple(generators)).next_sample

    assert torch.equal(step([0, 1], [5, 6])[1:], step([1], [6]))


def test_sampled_noise_is_added_in_the_precision_of_the_sample():
    x, v = X.double(), V.double()
    out = sde_step(v, x, 0.9, 0.8, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(out.next_sample, out.mean + out.std * noise)


def test_half_precision_inputs_are_computed_in_float32():
    v, x = V.half(), X.half()
    out = sde_step(v, x, 0.9, 0.8, next_sample=x)
    exact = sde_step(v.float(), x.float(), 0.9, 0.8, next_sample=x.float())
    assert torch.equal(out.mean, exact.mean)
    assert torch.equal(out.log_prob, exact.log_prob)
    assert out.next_sample.dtype == torch.float32


def test_the_sample_determines_dtype_and_device():
    per_sample = (torch.tensor([s, s], dtype=torch.float64) for s in (0.9, 0.7))
    for sigma, sigma_next in [(0.9, 0.7), tuple(per_sample)]:
        in_doubles = sde_step(V.double(), X, sigma, sigma_next, kind="ode")
        assert in_doubles.next_sample.dtype == torch.float32
        double = sde_step(V, X.double(), sigma, sigma_next, kind="ode").next_sample
        assert double.dtype == torch.float64
    torch.testing.assert_close(
        sde_step(V, X.double(), 0.9, 0.7, kind="ode").next_sample,
        X.double() + V.double() * (0.7 - 0.9),
        rtol=1e-12,
        atol=1e-12,
    )
    elsewhere = sde_step(V.to("meta"), X.to("meta"), 0.9, 0.7, sigma_max=0.9)
    assert elsewhere.next_sample.is_meta
    assert elsewhere.rate.is_meta
    assert sde_step(
        *(V.to("meta"), X.to("meta"), torch.tensor([0.9] * 2), torch.tensor([0.7] * 2)), kind="cps"
    ).std.is_meta


def test_cps_at_noise_level_one_replaces_all_noise():
    """The mean is (1 - sigma') x0 and the std sigma'."""
    out = sde_step(V, X, 0.9, 0.8, kind="cps", noise_level=1, next_sample=X)
    torch.testing.assert_close(out.mean, (X - 0.9 * V) * 0.2)
    assert out.std.item() == pytest.approx(0.8)


def test_ode_ignores_the_noise_level():
    out = sde_step(V, X, 0.9, 0.8, kind="ode", noise_level=0)
    assert out.std.item() == out.rate.item() == 0


def test_std_includes_the_square_root_of_dt():
    out = sde_step(V, X, 0.9, 0.8, kind="dance", noise_level=0.5, next_sample=X)
    assert out.std.flatten().tolist() == pytest.approx([0.5 * math.sqrt(0.1)])
    assert out.rate.flatten().tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "sde"}, "'sde'.*flow, dance, cps, ode"),
        ({"noise_level": 0.0}, r"^noise_level=0\.0 .*0"),
        ({"kind": "cps", "noise_level": 1.2}, r"^noise_level=1\.2 .*1.*'cps'"),
        ({"kind": "flow"}, "kind='flow'.*sigma=1.*sigma_max"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        sde_step(V, X, 1.0, 0.9, **arguments)
