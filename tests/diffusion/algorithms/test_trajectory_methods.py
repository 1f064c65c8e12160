"""grpo, grpo_guard, dppo and mix against numbers worked out by hand from their formulas."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_fixtures import STEPS, method, numbers, pixels, policy_step, rollout

from flow_grpo.diffusion.algorithms.base import ScoredSamples

# Ratios of 1.2 and .8, each with an advantage of either sign.
LOG_RATIOS = [math.log(1.2), math.log(1.2), math.log(0.8), math.log(0.8)]
CREDIT = [2.0, -2.0, 2.0, -2.0]


def surrogate(algorithm, given) -> tuple[list[float], list[float], dict]:
    """Return the loss and its gradient by the log-ratio."""
    loss, columns = algorithm.surrogate(given)
    loss.sum().backward()
    return loss.tolist(), given.log_ratio.grad.tolist(), columns


@pytest.mark.parametrize("name", ["grpo", "mix"])
def test_grpo_and_mix_by_hand(name):
    """max(-A rho, -A clip(rho)). With rho in [.9, 1.1]: max(-2.4, -2.2), max(2.4, 2.2),
    max(-1.6, -1.8), max(1.6, 1.8). The first and the last are clipped; the gradient of the
    others is -A rho."""
    loss, gradient, columns = surrogate(
        method(name, clip_range=0.1), policy_step(LOG_RATIOS, CREDIT)
    )
    assert loss == pytest.approx([-2.2, 2.4, -1.6, 1.8])
    assert gradient == pytest.approx([0, 2.4, -1.6, 0])
    assert columns["clip_high"].tolist() == [True, False, False, False]
    assert columns["clip_low"].tolist() == [False, False, False, True]


def test_each_bound_of_the_clip_can_be_set():
    """Low .3, high .1: .8 is within [.7, 1.1], so that the last is -A rho = 1.6."""
    algorithm = method("grpo", clip_range=0.1, clip_range_low=0.3)
    assert (algorithm.trust_radius, method("dppo").trust_radius) == (0.1, None)
    assert surrogate(algorithm, policy_step(LOG_RATIOS, CREDIT))[0] == pytest.approx(
        [-2.2, 2.4, -1.6, 1.6]
    )
    algorithm = method("grpo", clip_range=0.1, clip_range_high=0.3)
    assert surrogate(algorithm, policy_step(LOG_RATIOS, CREDIT))[0] == pytest.approx(
        [-2.4, 2.4, -1.6, 1.8]
    )


def guarded() -> dict:
    """Return means that moved by (.2, -.2) and (.4, 0), with a noise of .5."""
    return {
        "mean": pixels([0.3, -0.1], [0.5, 0.1]),
        "old_mean": pixels([0.1, 0.1], [0.1, 0.1]),
        "std": 0.5,
    }


def test_guard_by_hand_with_b_per_sample():
    """b = mean(moved^2)/(2 S^2): .04/.5 = .08 and .08/.5 = .16, whose mean over the batch would be
    .12. Log-ratios (.12 + .08) .5 = .1 and (-.26 + .16) .5 = -.05; -A rho with A = 1 and -2 is
    -e^.1 = -1.105171 and 2 e^-.05 = 1.902459."""
    given = policy_step([0.12, -0.26], [1.0, -2.0], **guarded())
    loss, gradient, columns = surrogate(method("grpo_guard", clip_range=0.2), given)
    assert loss == pytest.approx([-1.105171, 1.902459], abs=1e-6)
    assert columns["ratio"].tolist() == pytest.approx([1.105171, 0.951229], abs=1e-6)
    # through log_ratio only, S times the ratio: .5 * -1.105171 and .5 * 1.902459
    assert gradient == pytest.approx([-0.552585, 0.951229], abs=1e-6)


def test_guard_clips_its_own_ratio():
    """A clip of .1: 1.105171 is clipped to 1.1, while e^.12 = 1.127 and e^-.26 = .771 would be the
    plain ratios. .951229 is not clipped."""
    given = policy_step([0.12, -0.26], [1.0, -2.0], **guarded())
    loss, gradient, _ = surrogate(method("grpo_guard", clip_range=0.1), given)
    assert loss == pytest.approx([-1.1, 1.902459], abs=1e-6)
    assert gradient[0] == 0


def test_the_mean_ratio_of_guard_is_closer_to_one_than_that_of_grpo_at_low_noise():
    """The old policy draws 64 pixels with a noise of S = .05 and the mean then moves by .05, so
    b = 1/2. A log-ratio, the mean over n = 64 pixels, is normal with mean -b and variance 2 b/n:
    E rho = e^(b/n - b) = .611. Guard's has mean 0 and variance 2 b S^2/n: E rho = e^(S^2 b/n),
    1.00002."""
    generator = torch.Generator().manual_seed(0)
    count, std = 2000, 0.05
    old_mean = torch.zeros(count, 1, 1, 64, dtype=torch.float64)
    landed = std * torch.randn(old_mean.shape, generator=generator, dtype=torch.float64)
    mean = old_mean + 0.05
    squares = [((landed - m) ** 2).flatten(1).mean(1) for m in (mean, old_mean)]
    log_ratio = (squares[1] - squares[0]) / (2 * std**2)
    given = policy_step(log_ratio.tolist(), [1.0] * count, mean=mean, old_mean=old_mean, std=std)
    ratios = {
        name: method(name).surrogate(given)[1]["ratio"].mean().item()
        for name in ("grpo", "grpo_guard")
    }
    assert ratios["grpo"] == pytest.approx(0.611, abs=0.01)
    assert ratios["grpo_guard"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("ratio", "credit", "outward"),
    [(1.2, 0.5, True), (1.2, -0.5, False), (0.8, 0.5, False), (0.8, -0.5, True)],
)
@pytest.mark.parametrize(("delta", "far"), [(0.4, True), (0.5, True), (0.500001, False)])
def test_dppo_masks_distant_samples_that_move_outward(ratio, credit, outward, delta, far):
    """D = .5^2/(2 .5^2) = .5, at least delta or not; then the loss is 0, and -A rho elsewhere: no
    clip holds 1.2 or .8."""
    given = policy_step(
        [math.log(ratio)],
        [credit],
        mean=pixels([0.5, -0.5]),
        old_mean=pixels([0.0, 0.0]),
        std=0.5,
    )
    loss, gradient, columns = surrogate(method("dppo", delta=delta), given)
    masked = far and outward
    assert columns["masked"].tolist() == [masked]
    assert columns["ratio"].tolist() == pytest.approx([ratio])
    assert loss == gradient == pytest.approx([0 if masked else -credit * ratio])


def test_dppo_masks_samples_one_by_one():
    """D = .02/.5 = .04 and .5: with delta .1 only the second is far. -2 e^.1 = -2.210342."""
    moved = pixels([0.2, 0.0], [0.5, 0.5])
    given = policy_step([0.1, 0.1], [2.0, 2.0], mean=moved, old_mean=0 * moved, std=0.5)
    assert surrogate(method("dppo", delta=0.1), given)[0] == pytest.approx([-2.210342, 0], abs=1e-6)


def test_nothing_is_masked_at_ratio_one_or_without_an_advantage():
    moved = pixels(*[[0.5, 0.5]] * 4)
    trajectory_log_ratios, credit = [0.0, 0.3, 0.0, -0.3], [2.0, 0.0, -2.0, 0.0]
    given = policy_step(trajectory_log_ratios, credit, mean=moved, old_mean=0 * moved, std=0.5)
    _, gradient, columns = surrogate(method("dppo"), given)
    assert not columns["masked"].any()
    assert gradient == [-2.0, 0.0, 2.0, 0.0]


SETUP = {"num_steps": STEPS}


def losses(algorithm, policy, batch, j: int) -> tuple[list[float], dict[str, list[float]]]:
    [(batch, prepared)] = algorithm.iter_prepared(policy, [batch])
    loss = algorithm.loss(policy, batch, prepared, j)
    return loss.per_sample.tolist(), {n: c.tolist() for n, c in loss.columns.items()}


def test_advantages_are_clamped_before_they_are_used():
    """A = 50 is 5 and -50 is -5, where the clip is wide: -5 rho and 5 rho."""
    algorithm = method("grpo", SETUP, beta=0.0, clip_range=1e3)
    policy, batch = rollout(algorithm)
    batch = replace(batch, credit=numbers(50.0, -50.0, 3.0, 0.0))
    loss, columns = losses(algorithm, policy, batch, 1)
    cut = [5, -5, 3, 0]
    expected = [-a * r for a, r in zip(cut, columns["ratio"], strict=True)]
    assert loss == pytest.approx(expected)
    cut_at_one = method("grpo", SETUP, beta=0.0, clip_range=1e3, adv_clip_max=1.0)
    assert losses(cut_at_one, policy, batch, 1)[0][2] == pytest.approx(-columns["ratio"][2])


@pytest.mark.parametrize(
    ("j", "of_guard", "of_tempflow"),
    [(0, 7.027027, 1.575), (1, 3.913255, 1.954623), (2, 1.685710, 1.492390)],
)
def test_steps_are_weighted(j, of_guard, of_tempflow):
    """Sigmas of four steps: 1, .857692, .602151, .008929. guard 1/(-dt): 1/.142308 = 7.027027.
    tempflow 2.25 S, S^2 = .49 sigma/(1 - sigma) (-dt), where sigma_1 stands in for sigma_0 = 1:
    S^2 = .49 * .142308/.142308 and .49 * 6.027027 * .255542 = .754677."""
    none, guard, tempflow = (
        method("grpo", SETUP, beta=0.0, step_weight=w) for w in ("none", "guard", "tempflow")
    )
    policy, batch = rollout(none)
    plain, _ = losses(none, policy, batch, j)
    for algorithm, weight in ((guard, of_guard), (tempflow, of_tempflow)):
        weighted, _ = losses(algorithm, policy, batch, j)
        assert weighted == pytest.approx([weight * x for x in plain], rel=1e-5)


def test_guard_divides_by_the_dt_of_each_step():
    """On-policy the ratio is 1 and the loss is A/dt."""
    algorithm = method("grpo_guard", SETUP)
    policy, batch = rollout(algorithm, moved=0.0)
    sigmas = policy.dynamics.schedule.sigmas
    for j in range(3):
        expected = [a / (sigmas[j + 1] - sigmas[j]) for a in batch.credit.tolist()]
        assert losses(algorithm, policy, batch, j)[0] == pytest.approx(expected)


def test_the_loss_includes_the_kl():
    algorithm, without = (method("grpo", SETUP, beta=beta) for beta in (0.3, 0.0))
    policy, batch = rollout(algorithm)
    loss, columns = losses(algorithm, policy, batch, 2)
    assert min(columns["kl"]) > 0
    plain = losses(without, policy, batch, 2)[0]
    assert loss == pytest.approx([p + 0.3 * k for p, k in zip(plain, columns["kl"], strict=True)])


def test_mix_moves_its_window_and_wraps():
    """Four of ten steps, of which the last adds no noise: starts 0 to 5, then 0 again."""
    algorithm = method("mix", window_size=4, shift=1, every=25)
    windows = [algorithm.noisy_steps(None, epoch) for epoch in range(7 * 25)]
    assert [w.start for w in windows[::25]] == [0, 1, 2, 3, 4, 5, 0]
    assert [w.start for w in windows[24:26]] == [0, 1]
    assert all(w.stop - w.start == 4 == algorithm.losses_per_sample for w in windows)
    assert max(w.stop for w in windows) == 9


def test_mix_adds_the_z_scores_of_each_reward():
    """With the sample standard deviation (n - 1), as the authors' code has it. Group 0, reward a:
    1, 3 have mean 2 and deviation sqrt 2: -.707107, .707107; b: 10, 10 are equal: 0, 0. Group 1, a:
    0, 4, 4, 0 have mean 2 and variance 16 / 3: -.866025, .866025 and so on; b: 1, 1, 1, 5 have mean
    2 and deviation 2: -.5 three times and 1.5. Weights 1 and .5: -.866025 - .25 and so on."""
    rewards = {
        "a": np.array([1.0, 3, 0, 4, 4, 0]),
        "b": np.array([10.0, 10, 1, 1, 1, 5]),
        "unweighted": np.arange(6.0),
    }
    scored = ScoredSamples(rewards, np.array([0, 0, 1, 1, 1, 1]), {"a": 1.0, "b": 0.5})
    expected = [-0.707107, 0.707107, -1.116025, 0.616025, 0.616025, -0.116025]
    assert method("mix").credit(scored).tolist() == pytest.approx(expected, abs=1e-6)


def test_mix_excludes_samples_that_lack_a_reward():
    """They get 0 and are excluded from the statistics of both rewards. a: 1, 3 ->
    -.707107, .707107; b: 4, 2 -> .707107, -.707107."""
    rewards = {"a": np.array([1.0, 3, 9]), "b": np.array([4.0, 2, np.nan])}
    scored = ScoredSamples(rewards, np.zeros(3, int), {"a": 1.0, "b": 3.0})
    assert method("mix").credit(scored).tolist() == pytest.approx([2**0.5, -(2**0.5), 0], abs=1e-6)


@pytest.mark.parametrize("window", [{}, {"window_size": 1, "window_range": (1, 2)}])
def test_the_ratio_of_a_trajectory_is_the_product_of_its_steps(window):
    """Each step's loss has the value of the whole and the gradient of its own part, so that their
    sum has the gradient of exp(sum of log-ratios), worked out here in one graph."""
    setup = {"num_steps": STEPS, **window}
    algorithm = method("grpo", setup, beta=0.0, ratio="trajectory", clip_range=10.0)
    policy, batch = rollout(algorithm, moved=0.05)
    prepared = algorithm.prepare(policy, batch)
    losses = [algorithm.loss(policy, batch, prepared, j) for j in range(1 if window else 3)]
    trajectory, total = batch.trajectory, 0.0
    for j, i in enumerate(trajectory.steps):
        state, landed = trajectory.latents[:, j], trajectory.latents[:, j + 1]
        step, _ = policy.step(i, state, landed, trajectory.conditioning)
        total = total + step.log_prob - trajectory.log_probs[:, j]
    whole = -batch.credit * torch.exp(total)
    for loss in losses:
        torch.testing.assert_close(loss.per_sample, whole, rtol=1e-9, atol=0)
        torch.testing.assert_close(loss.columns["ratio"], torch.exp(total), rtol=1e-9, atol=0)
    found, expected = (
        torch.autograd.grad(values.sum(), policy.parameters())
        for values in (sum(loss.per_sample for loss in losses), whole)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-12)


def test_the_weight_of_the_kl_is_adapted_and_saved():
    algorithm = method("grpo", beta=0.5, kl_target=0.1)
    assert algorithm.update_kl_weight({"train/kl": 1.0}) == {
        "train/kl_weight": 0.5
    }  # the one that was used
    assert algorithm.kl_weight == 1.0
    other = method("grpo", beta=0.5, kl_target=0.1)
    other.load_state_dict(algorithm.state_dict())
    assert other.kl_weight == 1.0
    fixed = method("grpo", beta=0.5)
    fixed.load_state_dict(algorithm.state_dict())  # of a run that had a target
    assert (fixed.kl_weight, fixed.update_kl_weight({"train/kl": 1.0})) == (0.5, {})
    other.load_state_dict({})  # of a run that knew of no target
    assert (other.kl_weight, other.most_kl) == (1.0, 0.0)


def test_the_weight_of_the_kl_is_constant_until_its_target_is_reached():
    """The KL starts at 0 for every weight."""
    algorithm = method("grpo", beta=0.5, kl_target=0.1)
    used = [
        algorithm.update_kl_weight({"train/kl": kl}) for kl in (0.0, 1e-6, 0.01, 0.1, 0.01, 0.2)
    ]
    assert [each["train/kl_weight"] for each in used] == [0.5, 0.5, 0.5, 0.5, 0.5, 0.25]
    assert algorithm.kl_weight == 0.5


@pytest.mark.parametrize(("target", "weight"), [(0.1, 0.25), (0.5, 0.5)])
def test_a_resumed_run_remembers_whether_the_target_was_reached(target, weight):
    algorithm = method("grpo", beta=0.5, kl_target=0.1)
    algorithm.update_kl_weight({"train/kl": 0.12})
    resumed = method("grpo", beta=0.5, kl_target=target)
    resumed.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    resumed.update_kl_weight({"train/kl": 0.01})
    assert resumed.kl_weight == weight
