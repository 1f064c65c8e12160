"""The KL of methods that noise final latents again, in its three forms: against numbers worked out
by hand, and against the steps of trajectory methods."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_fixtures import METHODS, STEPS, at_noise_level, method, numbers, pixels, rollout
from user_errors import raises_user_error

from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import get_config
from flow_grpo.diffusion.models.base import Schedule
from flow_grpo.diffusion.rollout import Dynamics, take_step
from flow_grpo.diffusion.session import build_algorithm
from flow_grpo.losses import kl_to_reference, mean_square

FORWARD = [name for name in METHODS if issubclass(ALGORITHMS[name], ForwardProcessAlgorithm)]
SETUP = {"num_steps": STEPS, "group_size": 2}
STEP_FORMS = ["flow_grpo", "gaussian"]
SCHEDULE = Schedule((1.0, 0.8, 0.5, 0.0), (1000.0, 800.0, 500.0))
# at each of the three steps
VELOCITY, REFERENCE = pixels(*[[1.3, 0.6]] * 3), pixels(*[[1.0, 0.5]] * 3)
LEVELS = replace(at_noise_level(0.5, VELOCITY, reference=REFERENCE), steps=np.arange(3))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("flow_grpo", [0.0008, 0.00284765625, 0.031640625]),
        ("gaussian", [0.004, 0.0094921875, 0.06328125]),
        ("velocity", [0.05, 0.05, 0.05]),
    ],
)
def test_the_three_forms_by_hand(kind, expected):
    """a = .5, v - v_ref = (.3, .1), whose mean square is .05. The means differ by k (v - v_ref),
    k = (1 + s^2 (1 - sigma)/(2 sigma)) dt.
    1 -> .8: s^2 = .25/(1 - .8) = 1.25, k = 1 * -.2; .05 k^2 = .002; over 2 s^2 = 2.5: .0008, over
    2 s^2 .2 = .5: .004.
    .8 -> .5: s^2 = .25 * .8/.2 = 1, k = 1.125 * -.3; .05 k^2 = .0056953125; over 2, over .6.
    .5 -> 0: s^2 = .25 * .5/.5 = .25, k = 1.125 * -.5; .05 k^2 = .0158203125; over .5, over .25."""
    algorithm = method("awm", kl_type=kind)
    kl = algorithm.kl(Dynamics(SCHEDULE, "flow", 0.5), VELOCITY, LEVELS)
    assert kl.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("flow_grpo", [0.004, 0.0095712890625]), ("gaussian", [0.02, 0.031904296875])],
)
def test_the_dance_rule_by_hand(kind, expected):
    """Noise a = .5 at all steps; k = (1 + a^2/2 (1 - sigma)/sigma) dt.
    1 -> .8: k = 1 * -.2; .05 k^2 = .002; over 2 a^2 = .5, over .5 * .2 = .1.
    .8 -> .5: k = (1 + .125 * .25) * -.3 = -.309375; .05 k^2 = .00478564453125; over .5, .15."""
    kl = method("awm", kl_type=kind).kl(Dynamics(SCHEDULE, "dance", 0.5), VELOCITY, LEVELS)
    assert kl[:2].tolist() == pytest.approx(expected, rel=1e-12)


# the hand-computed values above cover the other two combinations
@pytest.mark.parametrize(("kind", "rule"), [("flow_grpo", "flow"), ("gaussian", "dance")])
@pytest.mark.parametrize("name", FORWARD)
def test_it_equals_the_kl_of_trajectory_algorithms_at_these_steps(name, kind, rule):
    algorithm = method(name, SETUP, times=STEPS, kl_beta=0.3, kl_type=kind)
    policy, batch = rollout(algorithm, kind=rule)
    [(batch, prepared)] = algorithm.iter_prepared(policy, [batch])
    seen = set()
    for j in range(STEPS):
        at = prepared[j]
        with torch.no_grad():
            loss = algorithm.loss(policy, batch, prepared, j)
            velocity = policy.velocity(at.x_t, at.timesteps, batch.trajectory.conditioning)
        for row, i in enumerate(at.steps.tolist()):
            own, other = (
                take_step(
                    policy.dynamics,
                    i,
                    at.x_t[row : row + 1],
                    v[row : row + 1],
                    stochastic=True,
                    next_latents=at.x_t[row : row + 1],
                )
                for v in (velocity, at.reference)
            )
            expected = kl_to_reference(
                kind,
                mean=own.mean,
                reference_mean=other.mean,
                std=own.std,
                rate=own.rate,
                velocity=velocity,
                reference_velocity=at.reference,
            )
            assert expected.item() > 0
            torch.testing.assert_close(loss.columns["kl"][row], expected[0], rtol=1e-6, atol=0)
            seen.add(i)
        norm = velocity.flatten(1).square().mean(1).sqrt().float()
        torch.testing.assert_close(loss.columns["velocity_norm"], norm)
        kl = loss.columns["kl"]
        torch.testing.assert_close(loss.per_sample, loss.columns["policy_loss"] + 0.3 * kl)
    assert seen == set(range(STEPS))  # the first, at sigma 1, and the last, to sigma 0, too


@pytest.mark.parametrize("name", FORWARD)
def test_the_default_is_exactly_the_velocity_difference(name):
    assert method(name).settings.kl_type == "velocity"
    assert method(name, kl_beta=0.0).needs_reference == (name in ("dpo", "dgpo", "ipo", "kto"))
    generator = torch.Generator().manual_seed(0)
    velocity, reference = torch.randn(2, 3, 4, 8, 8, generator=generator)
    at = at_noise_level(0.5, velocity, reference=reference)
    kl = method(name).kl(Dynamics(SCHEDULE, "flow", 0.5), velocity, at)
    assert torch.equal(kl, mean_square(velocity - reference))


@pytest.mark.parametrize("kind", STEP_FORMS)
def test_small_differences_are_not_lost_to_rounding(kind):
    """In float32 a step of 1 and one of 1 + 1e-5 times .0089 differ in their last bits only."""
    sigmas = (1.0, 0.6, 0.0089, 0.0)
    dynamics = Dynamics(Schedule(sigmas, (1000.0, 600.0, 8.9)), "flow", 0.7)
    reference = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    velocity = reference + 1e-5
    at = replace(at_noise_level(0.5, velocity, reference=reference), steps=np.array([0, 1, 2]))
    found = method("awm", kl_type=kind).kl(dynamics, velocity, at)
    exact = replace(at, reference=reference.double())
    expected = method("awm", kl_type=kind).kl(dynamics, velocity.double(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", STEP_FORMS)
@pytest.mark.parametrize("name", FORWARD)
def test_cps_has_no_variance_at_the_last_step(name, kind):
    config = get_config()
    config.algorithm, config.sample.sde_type = name, "cps"
    config[name].kl_type, config[name].kl_beta = kind, 0.1
    check_config(config)
    with raises_user_error("sample.sde_type='cps'", field=f"{name}.kl_type", value=kind):
        build_algorithm(config)
    config.sample.sde_type = "dance"
    build_algorithm(config)
    method(name, {"sde_type": "cps"}, kl_type="velocity", kl_beta=0.1).check()
    if "reference" not in ALGORITHMS[name].needed_velocities:
        method(name, {"sde_type": "cps"}, kl_type=kind, kl_beta=0.0).check()


def test_the_kl_pulls_towards_the_reference():
    """The exact KL of .8 -> .5 is k^2/(2 scale^2) times half the sum of two squares, of which
    k^2 = .11390625 and scale^2 = .3: its gradient is .18984375 (.3, .1)."""
    velocity = VELOCITY.clone().requires_grad_()
    dynamics = Dynamics(SCHEDULE, "flow", 0.5)
    method("awm", kl_type="gaussian").kl(dynamics, velocity, LEVELS)[1].backward()
    expected = numbers(0.3, 0.1) * 0.18984375
    torch.testing.assert_close(velocity.grad[1].flatten(), expected)
