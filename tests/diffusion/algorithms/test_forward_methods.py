"""nft, awm and ram, and what all methods share that noise final latents again, against numbers
worked out by hand from their formulas. Velocities have two pixels, so that a mean is half a sum."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_fixtures import (
    METHODS,
    STEPS,
    at_noise_level,
    method,
    numbers,
    objective,
    pixels,
    rollout,
)

from flow_grpo.diffusion.algorithms import ALGORITHMS
from flow_grpo.diffusion.algorithms.awm import matching_log_prob
from flow_grpo.diffusion.algorithms.forward_process import (
    ForwardProcessAlgorithm,
    old_policy_decay,
    sample_stratified_steps,
)

FORWARD = [
    name
    for name in METHODS  # leap trains states of the rollout: test_leap.py
    if issubclass(ALGORITHMS[name], ForwardProcessAlgorithm) and name != "leap"
]
GROUPS = ["dgpo", "dpo", "ipo"]  # share noise


TARGET, VELOCITY, OLD = pixels([1.0, 0.0]), pixels([0.4, 0.2]), pixels([0.2, 0.4])


def test_nft_by_hand():
    """t = .5, beta 1, A = 2.5 of 5: r = .75. X(w) - x0 = t (u - w).
    v+ = v: (.3, -.1), squares .05, size .2, l = .25.
    v- = 2 v_old - v = (0, .6): (.5, -.3), squares .17, size .4, l = .425.
    Loss 5 (.75 * .25 + .25 * .425) = 1.46875.
    Gradient with the sizes fixed, of v+ (.3, -.1) (-.5)/.2 = (-.75, .25), of v- (.5, -.3) .5/.4 =
    (.625, -.375): 5 (.75 (-.75, .25) + .25 (.625, -.375)) = (-2.03125, .46875)."""
    at = at_noise_level(0.5, TARGET, old=OLD)
    loss, gradient, columns = objective(method("nft"), VELOCITY, at, 2.5)
    assert columns["old_distance"].tolist() == pytest.approx([0.04])
    assert loss == pytest.approx([1.46875])
    assert gradient[0] == pytest.approx([-2.03125, 0.46875])
    # beside a sample without errors, whose size is its own
    at = at_noise_level(0.5, torch.cat([TARGET, TARGET]), old=torch.cat([OLD, TARGET]))
    both, _, _ = objective(method("nft"), torch.cat([VELOCITY, TARGET]), at, 2.5, 2.5)
    assert both == pytest.approx([1.46875, 0])


def test_nft_of_a_small_beta_by_hand():
    """beta .1 and A = -10, clamped to -5: r = 0. v- = 1.1 v_old - .1 v = (.18, .42): (.41, -.21),
    squares .1061, size .31. Loss 5/.1 * .1061/.31 = 17.112903.
    Gradient 5/.1 * (.41, -.21) .5 * .1/.31 = (3.306452, -1.693548).
    A = 10: r = 1, v+ = .1 v + .9 v_old = (.22, .38): (.39, -.19), squares .0941, size .29.
    Loss 5/.1 * .0941/.29 = 16.224138."""
    algorithm, at = method("nft", beta=0.1), at_noise_level(0.5, TARGET, old=OLD)
    loss, gradient, _ = objective(algorithm, VELOCITY, at, -10.0)
    assert loss == pytest.approx([17.112903], abs=1e-6)
    assert gradient[0] == pytest.approx([3.306452, -1.693548], abs=1e-6)
    assert objective(algorithm, VELOCITY, at, 10.0)[0] == pytest.approx([16.224138], abs=1e-6)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_nft_has_no_gradient_for_zero_advantage_at_the_old_policy(beta):
    """r = 1/2 and v = v_old: both terms cancel, and only there."""
    at = at_noise_level(0.5, TARGET, old=VELOCITY)
    algorithm = method("nft", beta=beta)
    assert objective(algorithm, VELOCITY, at, 0.0)[1][0] == pytest.approx([0, 0], abs=1e-14)
    assert max(map(abs, objective(algorithm, VELOCITY, at, 1.0)[1][0])) > 0.1
    elsewhere = objective(algorithm, VELOCITY, at_noise_level(0.5, TARGET, old=OLD), 0.0)[1][0]
    assert max(map(abs, elsewhere)) > 0.01


def test_nft_is_finite_where_the_error_is_zero():
    """The size is then 1e-5. A = 5: only v+ = u has a weight, and its error is 0."""
    loss, gradient, _ = objective(method("nft"), TARGET, at_noise_level(0.5, TARGET, old=OLD), 5.0)
    assert loss == [0.0]
    assert gradient == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("p", "t", "error", "expected"),
    [
        (1.0, 0.5, 0.25, -0.125),  # -.5 * .25
        (0.5, 0.5, 0.25, -0.49999),  # -(.5/.5) (.5 - 1e-5)
        (0.25, 0.5, 0.0625, -0.9936754),  # -(.5/.25) (.5 - 1e-2.5), 1e-2.5 = .0031623
        (0.25, 1.0, 16.0, -7.9873509),  # -(1/.25) (2 - .0031623)
        (0.25, 0.5, 0.0, 0.0),
    ],
)
def test_awms_log_probability_by_hand(p, t, error, expected):
    found = matching_log_prob(numbers(error), numbers(t), p)
    assert found.item() == pytest.approx(expected, abs=1e-7)


def test_for_power_one_it_is_the_matching_error_times_t():
    error, t = torch.linspace(0, 4, 9, dtype=torch.float64), torch.linspace(0.01, 1, 9).double()
    assert (matching_log_prob(error, t, 1.0) + t * error).abs().max() < 1e-9


def test_awms_gradient_for_power_one_is_that_of_t_times_the_error():
    """-A/5 (-t e): v - u = (-.6, .2), e = .2, its gradient (-.6, .2), t = .5. A = 2 and -5:
    .4 * .5 (-.6, .2) = (-.12, .04) and -1 * .5 (-.6, .2) = (.3, -.1). The value is -A/5, ratio 1:
    -.4 and 1."""
    both = [x.expand(2, -1, -1, -1) for x in (VELOCITY, TARGET, OLD)]
    algorithm = method("awm", power=1.0, old_beta=0.0)
    loss, gradient, _ = objective(
        algorithm, both[0], at_noise_level(0.5, both[1], old=both[2]), 2.0, -5.0
    )
    assert loss == pytest.approx([-0.4, 1.0])
    assert gradient[0] == pytest.approx([-0.12, 0.04])
    assert gradient[1] == pytest.approx([0.3, -0.1])


def test_awm_by_hand():
    """p = .25, t = .5, v - u = (.25, -.25): e = .0625 with gradient (.25, -.25). The slope of the
    log-probability in e is -t e^-.75 = -.5 * 8 = -4. A = -2.5: -A/5 = .5 times -4 (.25, -.25) is
    (-.5, .5). v - v_old = (.5, 0): squares .125, gradient (.5, 0), twice that with old_beta 2.
    Loss .5 + 2 * .125 = .75, gradient (.5, .5)."""
    velocity = pixels([0.75, 0.25])
    at = at_noise_level(0.5, pixels([0.5, 0.5]), old=pixels([0.25, 0.25]))
    loss, gradient, columns = objective(method("awm", old_beta=2.0), velocity, at, -2.5)
    assert loss == pytest.approx([0.75])
    assert gradient[0] == pytest.approx([0.5, 0.5], abs=1e-7)
    assert columns["matching_error"].tolist() == pytest.approx([0.0625])
    assert columns["old_distance"].tolist() == pytest.approx([0.125])


def test_awm_clamps_advantages():
    """-clip(A, +-5)/5: one success in 1,152 samples has A = 32, clamped to 5."""
    at = at_noise_level(0.5, TARGET, old=VELOCITY)
    for credit, cut in [(32.0, 5.0), (-7.0, -5.0), (4.0, 4.0)]:
        loss, gradient, _ = objective(method("awm"), VELOCITY, at, credit)
        assert loss == pytest.approx([-cut / 5])
        assert gradient == objective(method("awm"), VELOCITY, at, cut)[1]
    wider = objective(method("awm", adv_clip_max=40.0), VELOCITY, at, 32.0)[0]
    assert wider == pytest.approx([-6.4])


@pytest.mark.parametrize("error", [0.0, 1e-12])
def test_awm_is_finite_where_the_error_is_zero(error):
    at = at_noise_level(0.5, TARGET, old=TARGET)
    _, gradient, _ = objective(method("awm"), TARGET + error**0.5, at, 5.0)
    assert np.isfinite(gradient).all()


def test_rams_gradient_is_that_of_its_regression():
    """|v - sg(v_ref + R (u - v))|^2 with R = clip(A, +-5)/5, in the paper's own form; by hand with
    R = .5, v - v_ref = (.2, -.2), v - u = (-.6, .2): (.2, -.2) + .5 (-.6, .2) = (-.1, -.1)."""
    algorithm = method("ram", {"num_steps": STEPS}, times=2)
    for credit, share in [(2.5, 0.5), (-32.0, -1.0)]:
        at = at_noise_level(0.5, TARGET, reference=OLD)
        loss, gradient, _ = objective(algorithm, VELOCITY, at, credit)
        assert loss == pytest.approx([share * 0.2])
        leash = torch.autograd.functional.vjp(
            lambda v, at=at: algorithm.kl_weight * algorithm.kl(None, v, at).sum(), VELOCITY
        )[1]
        v = VELOCITY.clone().requires_grad_()
        goal = (OLD + share * (TARGET - v)).detach()
        ((v - goal) ** 2).mean().backward()
        torch.testing.assert_close(v.grad, pixels(*gradient) + leash)
        if share == 0.5:
            torch.testing.assert_close(v.grad, pixels([-0.1, -0.1]))


@pytest.mark.parametrize(
    ("name", "settings", "keeps"),
    [
        ("nft", {}, {1: 0.001, 200: 0.2, 500: 0.5, 900: 0.5}),
        (
            "nft",
            {"old_rate": 0.0075, "old_start": 75, "old_max_decay": 0.999},
            {75: 0.0, 175: 0.75},
        ),
        ("awm", {}, {1: 0.001, 200: 0.2, 300: 0.3, 900: 0.3}),
        ("dgpo", {}, {1: 0.0, 2: 0.001, 201: 0.2, 301: 0.3, 900: 0.3}),
        ("dgpo", {"old_max_decay": 0.0}, {1: 0.0, 900: 0.0}),
    ],
)
def test_the_old_policy_is_updated_after_an_epoch(name, settings, keeps):
    """nft min(.001 n, .5), or 0 until 75 and then min(.0075 (n - 75), .999); awm min(.001 n, .3);
    dgpo min(.001 (n - 1), .3). n counts updates."""
    algorithm = method(name, {"num_steps": STEPS}, times=2, **settings)
    for updates, keep in keeps.items():
        policy, _ = rollout(algorithm)
        old = [copy.clone() for copy in policy.old.copy]
        algorithm.after_epoch(policy, updates)
        for before, weight, after in zip(old, policy.parameters(), policy.old.copy, strict=True):
            torch.testing.assert_close(after, keep * before + (1 - keep) * weight.detach())


@pytest.mark.parametrize(("name", "after"), [("nft", -1), ("dgpo", 200), ("awm", math.inf)])
def test_the_old_policy_samples_after_a_number_of_updates(name, after):
    found = [method(name).samples_with_old_policy(updates) for updates in (0, 1, 200, 201)]
    assert found == [updates > after for updates in (0, 1, 200, 201)]


def test_the_largest_guidance_is_reported():
    asked = [{}, {"train_guidance": 4.5}, {"kl_guidance": 3.0}]
    asked.append({"train_guidance": 2.0, "kl_guidance": 3.0})
    assert [method("awm", **each).max_guidance for each in asked] == [0, 4.5, 3, 3]


def test_decays_in_closed_form():
    slow = {"rate": 0.0075, "start": 75, "maximum": 0.999}
    decays = [old_policy_decay(n, **slow) for n in (1, 75, 76, 175, 208, 209, 1000)]
    assert decays == pytest.approx([0, 0, 0.0075, 0.75, 0.9975, 0.999, 0.999])
    assert old_policy_decay(300, rate=0.001, start=0, maximum=0.5) == pytest.approx(0.3)


class EveryDraw:
    """Random generator that returns the k-th of all values."""

    def __init__(self, k: int) -> None:
        self.k = k

    def integers(self, count: int) -> int:
        assert 0 <= self.k < count
        return self.k


@pytest.mark.parametrize(("steps", "count"), [(10, 6), (10, 9), (10, 10), (10, 1), (7, 3), (25, 4)])
def test_noise_levels_are_evenly_spaced_and_equally_likely(steps, count):
    """Over all offsets, each step is selected in `count` of `steps` of them."""
    drawn = np.stack([sample_stratified_steps(EveryDraw(k), steps, count) for k in range(steps)])
    assert np.bincount(drawn.flatten(), minlength=steps).tolist() == [count] * steps
    part = np.arange(count) * steps / count
    assert (drawn >= np.floor(part)).all()
    assert (drawn < part + steps / count).all()
    assert (np.diff(drawn) > 0).all()  # no duplicates


def test_nft_trains_nine_of_ten_noise_levels():
    """Each sample leaves out a different one."""
    rngs = [np.random.default_rng(seed) for seed in range(200)]
    left_out = [set(range(10)) - set(sample_stratified_steps(rng, 10, 9).tolist()) for rng in rngs]
    assert all(len(out) == 1 for out in left_out)
    assert set.union(*left_out) == set(range(10))


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_noise_levels_at_the_ends_can_be_skipped(name):
    """Exactly the remaining ones of four steps are selected."""
    for first, last, left in [(1, 1, {1, 2}), (0, 2, {0, 1}), (1, 0, {1, 2, 3})]:
        setup = {"num_steps": STEPS, "group_size": 2}
        algorithm = method(name, setup, times=1, skip_first=first, skip_last=last)
        policy, batch = rollout(algorithm)
        seeds = [(3, epoch, 0) for epoch in range(8)]
        drawn = [algorithm.prepare(policy, replace(batch, seed=seed)).steps for seed in seeds]
        assert set(np.concatenate(drawn).flatten().tolist()) == left


@pytest.mark.parametrize("kl_guidance", [None, 3.0])
@pytest.mark.parametrize("name", ["awm", "dgpo"])
def test_a_guided_rollout_can_be_trained_without_guidance(name, kl_guidance):
    """The velocity and that of the old weights have train_guidance, the reference kl_guidance."""
    setup = {"num_steps": STEPS, "group_size": 2}
    guidance = {"train_guidance": 1.0, "kl_guidance": kl_guidance}
    algorithm = method(name, setup, times=2, kl_beta=0.3, **guidance)
    policy, batch = rollout(algorithm, guidance=4.5)
    [(batch, prepared)] = algorithm.iter_prepared(policy, [batch])
    at, conditioning = prepared[1], batch.trajectory.conditioning

    def velocity(which: str, scale: float) -> torch.Tensor:
        with policy.frozen_denoiser(which) as denoiser:
            dynamics = replace(policy.dynamics, guidance_scale=scale)
            guided = replace(denoiser, dynamics=dynamics)
            return guided.velocity(at.x_t, at.timesteps, conditioning)

    reference = velocity("reference", kl_guidance or 1.0)
    torch.testing.assert_close(at.reference, reference)
    assert not torch.allclose(reference, velocity("reference", 4.5), atol=1e-3)
    torch.testing.assert_close(at.old, velocity("old", 1.0))
    before = policy.passes
    with torch.no_grad():
        loss = algorithm.loss(policy, batch, prepared, 1)
    assert policy.passes - before == 3 * len(batch)  # one forward and its backward each
    kl = ((velocity("current", 1.0) - reference) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(loss.columns["kl"], kl)


@pytest.mark.parametrize(("name", "per"), [*((n, "sample") for n in FORWARD), ("awm", "group")])
def test_latents_are_noised_towards_the_target(name, per):
    """x_t = (1 - t) x0 + t e with u = e - x0, t of the schedule. In a group noise and times are
    shared by methods that compare its samples, or if asked for, and are each sample's own else."""
    algorithm = method(name, {"num_steps": STEPS, "group_size": 2}, times=2, noise_per=per)
    together = name in GROUPS or per == "group"
    policy, batch = rollout(algorithm)
    at = algorithm.prepare(policy, batch)
    x0 = batch.trajectory.final[:, None]
    e = at.target + x0
    torch.testing.assert_close(at.x_t, (1 - at.t) * x0 + at.t * e)
    assert 0.8 < e.std() < 1.2
    schedule = policy.dynamics.schedule
    assert at.t.flatten().tolist() == pytest.approx([schedule.sigmas[i] for i in at.steps.flat])
    timesteps = [schedule.timesteps[i] for i in at.steps.flat]
    assert at.timesteps.flatten().tolist() == pytest.approx(timesteps)
    for first, second, shared in [(0, 1, together), (2, 3, together), (1, 2, False)]:
        is_equal = torch.allclose(e[first], e[second], rtol=0, atol=1e-12)
        assert is_equal == shared
        assert not shared or (at.steps[first] == at.steps[second]).all()


@pytest.mark.parametrize("name", ["awm", "dpo"])
def test_noise_depends_on_sample_epoch_and_pass_but_not_on_the_batch(name):
    algorithm = method(name, {"num_steps": STEPS, "group_size": 2}, times=2)
    policy, batch = rollout(algorithm)
    whole, part = (algorithm.prepare(policy, b) for b in (batch, batch[2:]))
    assert torch.equal(whole.x_t[2:], part.x_t)
    for seed in [(4, 1, 0), (3, 2, 0), (3, 1, 1)]:
        other = algorithm.prepare(policy, replace(batch, seed=seed))
        assert not torch.allclose(other.target, whole.target)


@pytest.mark.parametrize("name", FORWARD)
def test_the_kl_to_the_reference_is_part_of_the_loss(name):
    algorithm = method(name, {"num_steps": STEPS, "group_size": 2}, times=2, kl_beta=0.3)
    policy, batch = rollout(algorithm)
    [(batch, prepared)] = algorithm.iter_prepared(policy, [batch])
    with policy.frozen_denoiser("reference") as reference:
        expected = reference.velocity(
            prepared.x_t[:, 1], prepared.timesteps[:, 1], batch.trajectory.conditioning
        )
    with torch.no_grad():
        loss = algorithm.loss(policy, batch, prepared, 1)
        velocity = policy.velocity(
            prepared.x_t[:, 1], prepared.timesteps[:, 1], batch.trajectory.conditioning
        )
    kl = ((velocity - expected) ** 2).mean((1, 2, 3))
    assert kl.min() > 0
    torch.testing.assert_close(loss.columns["kl"], kl)
    torch.testing.assert_close(loss.per_sample, loss.columns["policy_loss"] + 0.3 * kl)


@pytest.mark.parametrize("name", ["nft", "awm", "dgpo"])
def test_old_velocities_are_not_computed_if_equal_to_the_policy(name):
    algorithm = method(name)
    policy, batch = rollout(algorithm)
    policy.old.blend(0)
    [(part, short)] = algorithm.iter_prepared(policy, [batch])
    policy.on_weights_updated()  # so the trainer would think
    [(_, whole)] = algorithm.iter_prepared(policy, [batch])
    assert short.old is None
    assert whole.old is not None
    first, second = (algorithm.loss(policy, part, at, 1) for at in (short, whole))
    torch.testing.assert_close(first.per_sample, second.per_sample, rtol=1e-9, atol=1e-12)
    for a, b in zip(
        *(torch.autograd.grad(o.per_sample.sum(), policy.parameters()) for o in (first, second)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-12)
