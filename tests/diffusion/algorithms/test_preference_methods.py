"""dgpo, dpo, ipo, kto, sft and rwr, which compare samples, against numbers worked out by hand from
their formulas. Velocities have two pixels, so that a mean is half a sum."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_fixtures import (
    STEPS,
    at_noise_level,
    method,
    numbers,
    objective,
    pixels,
    rollout,
    samples_with_credit,
)
from user_errors import raises_user_error

from flow_grpo.diffusion.algorithms.base import Batch, ScoredSamples, drop_zero_gradient
from flow_grpo.diffusion.algorithms.dgpo import WeightedSamples
from flow_grpo.diffusion.algorithms.forward_process import sample_logit_normal_steps
from flow_grpo.diffusion.algorithms.kto import SamplesWithReferencePoint

SETUP = {"num_steps": STEPS, "group_size": 2, "update_samples": 4}


@pytest.mark.parametrize(
    ("velocity", "credit", "c", "loss", "gradient"),
    [
        ([0.9, 0.1], 0.5, 0.01, 0.01, [0, 0]),  # better already
        ([0.9, 0.1], -0.5, 0.01, -0.01, [0.1, -0.1]),  # 2 * -.5 (-.1, .1)
        ([0.7, 0.3], 0.5, 0.01, 0.09, [-0.3, 0.3]),
        ([0.7, 0.3], -0.5, 0.01, -0.09, [0, 0]),  # worse already
        ([0.7, 0.3], 0.0, 0.01, 0.0, [0, 0]),
        ([0.9, 0.1], 0.0, 0.01, 0.0, [0, 0]),
        ([0.9, 0.1], 0.5, 0.1, 0.01, [-0.1, 0.1]),  # within a wider clip
        ([0.7, 0.3], -0.5, 0.1, -0.09, [0.3, -0.3]),
        ([0.8, 0.2], 0.5, 0.0, 0.04, [-0.2, 0.2]),  # at the edge of the clip
        ([0.8, 0.2], -0.5, 0.0, -0.04, [0.2, -0.2]),
    ],
)
def test_dgpo_by_hand(velocity, credit, c, loss, gradient):
    """u = (1, 0), weight 2. v_old = (.8, .2): d_old = .04. d = .01 for v = (.9, .1), whose rho =
    e^.03 = 1.030; d = .09 for (.7, .3), rho = e^-.05 = .951. Loss 2 A d, gradient 2 A (v - u)."""
    at = at_noise_level(0.5, pixels([1.0, 0.0]), old=pixels([0.8, 0.2]))
    at = WeightedSamples(**vars(at), weight=numbers(2.0))
    algorithm = method("dgpo", clip_range=c)
    assert algorithm.trust_radius == c
    found, slope, columns = objective(algorithm, pixels(velocity), at, credit)
    assert found == pytest.approx([loss])
    assert slope[0] == pytest.approx(gradient)
    ratio = math.exp({0.9: 0.03, 0.8: 0.0, 0.7: -0.05}[velocity[0]])
    assert columns["old_ratio"].tolist() == pytest.approx([ratio])
    assert columns["masked"].tolist() == [ratio > 1 + c if credit > 0 else ratio < 1 - c]
    assert columns["group_weight"].tolist() == [2.0]


def test_dgpo_clamps_advantages_in_the_loss_and_in_the_weight():
    """u = (1, 0), v = (.7, .3): d = .09; at weight .5 and A = 32, clamped to 5: .5 * 5 * .09."""
    at = at_noise_level(0.5, pixels([1.0, 0.0]), old=pixels([0.7, 0.3]))
    at = WeightedSamples(**vars(at), weight=numbers(0.5))
    assert objective(method("dgpo"), pixels([0.7, 0.3]), at, 32.0)[0] == pytest.approx([0.225])
    algorithm = method("dgpo", SETUP, times=2, beta=50.0)
    policy, batch = rollout(algorithm, moved=0.1)
    weights = []
    for most in (32.0, 5.0, 4.0):
        credited = replace(batch, credit=numbers(most, -0.7, 0.3, -most))
        [(_, prepared)] = algorithm.iter_prepared(policy, [credited])
        weights.append(prepared.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_dgpos_group_weight_by_its_formula():
    """sigmoid(s_G), s_G the sum of A beta (d - d_ref)/G over the group, d of the weights as they
    are before the update. Group a has two samples, b two: no other group's enter."""
    algorithm = method("dgpo", SETUP, times=2, beta=50.0)
    policy, batch = rollout(algorithm, moved=0.1)
    [(_, at)] = algorithm.iter_prepared(policy, [batch])
    conditioning = batch.trajectory.conditioning
    d = {}
    for which in ("current", "reference"):
        with policy.frozen_denoiser(which) as denoiser:
            for j in range(2):
                v = denoiser.velocity(at.x_t[:, j], at.timesteps[:, j], conditioning)
                d[which, j] = ((at.target[:, j] - v) ** 2).mean((1, 2, 3)).tolist()
    credit = batch.credit.tolist()
    for j in range(2):
        gain = [
            a * 50 * (d["current", j][i] - d["reference", j][i]) / 2 for i, a in enumerate(credit)
        ]
        a, b = (1 / (1 + math.exp(-s)) for s in (gain[0] + gain[1], gain[2] + gain[3]))
        assert at.weight[:, j].tolist() == pytest.approx([a, a, b, b], rel=1e-6)
        assert abs(a - b) > 1e-3


def test_a_group_of_dgpo_may_span_two_batches():
    algorithm = method("dgpo", SETUP, times=2, beta=50.0)
    policy, batch = rollout(algorithm, moved=0.1)
    [(_, whole)] = algorithm.iter_prepared(policy, [batch])
    parts = [batch[:1], batch[1:3], batch[3:]]
    found = list(algorithm.iter_prepared(policy, parts))
    assert [part for part, _ in found] == parts
    torch.testing.assert_close(torch.cat([at.weight for _, at in found]), whole.weight)
    torch.testing.assert_close(torch.cat([at.x_t for _, at in found]), whole.x_t)


def test_the_group_weight_is_one_half_at_the_reference():
    """s_G = 0."""
    algorithm = method("dgpo", SETUP, times=2)
    policy, batch = rollout(algorithm)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    [(_, at)] = algorithm.iter_prepared(policy, [batch])
    assert at.weight.tolist() == [[0.5, 0.5]] * 4


def dpo_pair() -> dict:
    """Winner: e = .04, e_ref = .25. Loser: e = (.16 + .04)/2 = .1, e_ref = .02."""
    target = pixels([1.0, 0.0], [0.0, 0.0])
    reference = pixels([0.5, 0.5], [0.2, 0.0])
    return {"target": target, "reference": reference}


def test_dpo_by_hand():
    """-beta/2 [(.04 - .25) - (.1 - .02)] = -5 * -.29 = 1.45; log(1 + e^-1.45) = .210723.
    Gradient: -sigmoid(-1.45) = -.189999 times -5 (v - u) of the winner, (-.2, .2), and 5 (v - u) of
    the loser, (.4, .2)."""
    velocity = pixels([0.8, 0.2], [0.4, 0.2])
    at = at_noise_level(0.5, **dpo_pair())
    algorithm = method("dpo", beta=10.0)
    loss, gradient, columns = objective(algorithm, velocity, at, 1.0, -1.0)
    assert loss == pytest.approx([0.210723] * 2, abs=1e-6)
    # both rows have the loss of the pair, so that the sum above counts it twice
    assert gradient[0] == pytest.approx([-0.379999, 0.379999], abs=1e-5)
    assert gradient[1] == pytest.approx([-0.759997, -0.379999], abs=1e-5)
    assert columns["margin"].tolist() == pytest.approx([1.45] * 2)
    assert columns["accuracy"].tolist() == [1, 1]


def test_an_uncertain_preference_by_hand():
    """p = .75: .75 * .210723 + .25 * 1.660723."""
    velocity = pixels([0.8, 0.2], [0.4, 0.2])
    at = at_noise_level(0.5, **dpo_pair())
    loss, _, columns = objective(method("dpo", beta=10.0), velocity, at, 0.5, -0.5)
    assert loss == pytest.approx([0.573223] * 2, abs=1e-6)
    assert columns["chosen_error"].tolist() == pytest.approx([0.04] * 2)
    assert columns["rejected_error"].tolist() == pytest.approx([0.1] * 2)
    assert columns["chosen_change"].tolist() == pytest.approx([-0.21] * 2)
    assert columns["rejected_change"].tolist() == pytest.approx([0.08] * 2)


def test_ipo_by_hand():
    """Margin 1.45 as of dpo: (1.45 - .5)^2. Gradient 2 * .95 times that of the margin, -5 (v - u)
    of the winner, (-.2, .2), and 5 (v - u) of the loser, (.4, .2), in both rows of the pair.
    With p = .75, (1.45 - .25)^2."""
    velocity = pixels([0.8, 0.2], [0.4, 0.2])
    at, algorithm = at_noise_level(0.5, **dpo_pair()), method("ipo", beta=10.0)
    loss, gradient, columns = objective(algorithm, velocity, at, 1.0, -1.0)
    assert loss == pytest.approx([0.9025] * 2)
    assert gradient[0] == pytest.approx([3.8, -3.8])
    assert gradient[1] == pytest.approx([7.6, 3.8])
    assert columns["margin"].tolist() == pytest.approx([1.45] * 2)
    assert objective(algorithm, velocity, at, 0.5, -0.5)[0] == pytest.approx([1.44] * 2)
    assert objective(algorithm, velocity, at, 0.0, 0.0)[:2] == ([0, 0], [[0, 0], [0, 0]])


def test_kto_by_hand():
    """Gains .21 and -.08, z0 = .065: both values are 10 * .145 = 1.45, 1 - sigmoid(1.45) = .190002.
    Gradient -.190002 * .809998 = -.153901 times -10 (v - u) of the liked image and 10 (v - u) of
    the disliked one, whose weight is a half."""
    velocity = pixels([0.8, 0.2], [0.4, 0.2])
    at = at_noise_level(0.5, **dpo_pair())
    at = SamplesWithReferencePoint(**vars(at), reference_point=numbers(0.065, 0.065))
    algorithm = method("kto", beta=10.0, dislike_weight=0.5)
    loss, gradient, columns = objective(algorithm, velocity, at, 1.0, -1.0)
    assert loss == pytest.approx([0.190002, 0.095001], abs=1e-6)
    assert gradient[0] == pytest.approx([-0.307802, 0.307802], abs=1e-6)
    assert gradient[1] == pytest.approx([-0.307802, -0.153901], abs=1e-6)
    assert columns["accuracy"].tolist() == [1, 1]
    assert (columns["chosen_error"].tolist(), columns["rejected_error"].tolist()) == (
        pytest.approx([0.04]),
        pytest.approx([0.1]),
    )
    loss, gradient, columns = objective(algorithm, velocity, at, 0.0, -1.0)
    assert (loss[0], gradient[0], len(columns["chosen_error"])) == (0, [0, 0], 0)


def test_ktos_reference_point_is_that_of_all_rated_images_of_the_update():
    """The mean gain of three of four images, as the second one has no rating; at least 0."""
    algorithm = method("kto", SETUP, times=2)
    policy, batch = rollout(algorithm, moved=0.1)
    batch = replace(batch, credit=numbers(1.0, 0.0, -1.0, 1.0))
    parts = [part for part, _ in algorithm.iter_prepared(policy, [batch])]
    prepared = [at for _, at in algorithm.iter_prepared(policy, [batch[:1], batch[1:]])]
    points = torch.cat([at.reference_point for at in prepared])
    assert points.min() == points.max()
    gains = []
    for part, at in algorithm.iter_prepared(policy, parts):
        for j in range(2):
            columns = algorithm.loss(policy, part, at, j).columns
            gains += [-columns["chosen_change"], -columns["rejected_change"]]
    mean = torch.cat(gains).mean().item()
    assert len(torch.cat(gains)) == 6
    assert points[0, 0].item() == pytest.approx(max(0.0, mean), rel=1e-6)


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto", "sft"])
def test_given_images_join_those_of_the_rollout(name):
    """Two groups of four samples, and given images: a pair, or two groups of one."""
    algorithm = method(name, {"group_size": 4, "update_samples": 8, "given_samples": 2})
    scored = ScoredSamples({"a": np.arange(8.0)}, np.repeat([0, 1], 4), {"a": 1.0})
    online = samples_with_credit(*algorithm.credit(scored).tolist(), groups=[0] * 4 + [1] * 4)
    pair = algorithm.given == "pairs"
    given = samples_with_credit(1.0, -1.0 if pair else 1.0, groups=[2, 2] if pair else [2, 3])
    given = replace(given, index=given.index + 8)
    batches = algorithm.batches([online[:4], online[4:], given], 4)
    trained = {"dpo": [3, 0, 7, 4, 8, 9], "sft": [3, 7, 8, 9], "kto": [*range(10)]}
    trained["ipo"] = trained["dpo"]
    assert np.concatenate([each.index for each in batches]).tolist() == trained[name]
    assert len(trained[name]) == algorithm.trained_samples
    assert len(batches) == algorithm.batch_count(4)
    assert algorithm.given_share == pytest.approx(2 / len(trained[name]))


def test_logit_normal_steps_are_stratified():
    """Quantiles of one level per draw: the middle half of the schedule has probability
    Phi(log 3) - Phi(-log 3) = .728, of a uniform density .5."""
    rng = np.random.default_rng(0)
    drawn = np.stack([sample_logit_normal_steps(rng, 1000, 4) for _ in range(2000)])
    assert (np.diff(drawn, axis=1) > 0).all()
    assert 0 <= drawn.min() < drawn.max() < 1000
    assert ((drawn >= 250) & (drawn < 750)).mean() == pytest.approx(0.728, abs=0.01)
    assert [(drawn[:, i] < 500).all() for i in range(4)] == [True, True, False, False]


def test_dpo_of_the_wrong_order_by_hand():
    """The same errors the other way around: margin -1.45, log(1 + e^1.45) = 1.660723; then once
    more as they were, and a pair of no weight. A tenth of beta changes no order."""
    pair = {name: torch.cat([v.flip(0), v, v]) for name, v in dpo_pair().items()}
    at, credit = at_noise_level(0.5, **pair), (1.0, -1.0, 1.0, -1.0, 0.0, 0.0)
    near, far = [0.8, 0.2], [0.4, 0.2]
    velocity = pixels(far, near, near, far, near, far)
    for beta in (10.0, 1.0):
        loss, _, columns = objective(method("dpo", beta=beta), velocity, at, *credit)
        assert columns["accuracy"].tolist() == [0, 0, 1, 1, 1, 1]
        if beta == 10.0:
            assert loss == pytest.approx([1.660723] * 2 + [0.210723] * 2 + [0, 0], abs=1e-6)


def test_dpo_is_log_two_at_the_reference_and_finite_far_from_it():
    pair = dpo_pair()
    at = at_noise_level(0.5, **pair)
    loss, _, columns = objective(method("dpo"), pair["reference"], at, 1.0, -1.0)
    assert loss == pytest.approx([math.log(2)] * 2)
    assert columns["accuracy"].tolist() == [0, 0]
    far, gradient, _ = objective(
        method("dpo"), 100 + pair["reference"], at_noise_level(0.5, **pair), 1.0, -1.0
    )
    assert np.isfinite(far).all()
    assert np.isfinite(gradient).all()


def test_a_pair_of_weight_zero_has_no_gradient():
    velocity = pixels([0.8, 0.2], [0.4, 0.2])
    loss, gradient, _ = objective(
        method("dpo"), velocity, at_noise_level(0.5, **dpo_pair()), 0.0, 0.0
    )
    assert loss == [0, 0]
    assert gradient == [[0, 0], [0, 0]]


def epoch_of_three_groups() -> tuple[ScoredSamples, list[int]]:
    """Of four: one with a clear order, one of equal scores, one with a score missing."""
    rewards = np.array([1.0, 4, 0, 2, 5, 5, 5, 5, np.nan, 3, 1, 2])
    groups = np.repeat([7, 8, 9], 4)
    return ScoredSamples({"a": rewards}, groups, {"a": 2.0}), groups.tolist()


def in_batches(credit: np.ndarray, groups: list[int], size: int) -> list[Batch]:
    whole = samples_with_credit(*credit.tolist(), groups=groups)
    return [whole[i : i + size] for i in range(0, len(whole), size)]


SIX = {"group_size": 4, "update_samples": 12}


@pytest.mark.parametrize(
    ("size", "sizes"), [(2, [2, 2, 2]), (3, [2, 2, 2]), (4, [4, 2]), (5, [4, 2])]
)
def test_dpo_pairs_the_best_of_each_group_with_its_worst(size, sizes):
    """Pairs stay together for every batch size; that of a constant group has weight 0."""
    scored, groups = epoch_of_three_groups()
    algorithm = method("dpo", SIX)
    credit = algorithm.credit(scored)
    assert credit.tolist() == [0, 1, -1, 0, 0, 0, 0, 0, 0, 1, -1, 0]
    batches = algorithm.batches(in_batches(credit, groups, 5), size)
    assert [len(b) for b in batches] == sizes
    assert len(batches) == algorithm.batch_count(size)
    assert range(sum(map(len, batches))) == range(algorithm.trained_samples) == range(6)
    whole = Batch.concat(batches)
    assert whole.index.tolist() == [1, 2, 4, 5, 9, 10]
    assert whole.credit.tolist() == [1, -1, 0, 0, 1, -1]
    assert whole.trajectory.final.flatten().tolist() == whole.index.tolist()


def test_dpo_trains_pairs_with_a_batch_size_of_one():
    scored, groups = epoch_of_three_groups()
    algorithm = method("dpo", SIX)
    batches = algorithm.batches(in_batches(algorithm.credit(scored), groups, 1), 1)
    assert [len(b) for b in batches] == [2, 2, 2]
    assert algorithm.batch_count(1) == 3


@pytest.mark.parametrize(("kl_beta", "index"), [(0.0, [1, 2, 9, 10]), (0.1, [1, 2, 4, 5, 9, 10])])
def test_dpo_drops_whole_pairs(kl_beta, index):
    """With a KL the pair of weight 0 still has a gradient."""
    scored, groups = epoch_of_three_groups()
    algorithm = method("dpo", SIX, kl_beta=kl_beta)
    batches = algorithm.batches(in_batches(algorithm.credit(scored), groups, 12), 6)
    kept = drop_zero_gradient(algorithm, batches, batch=True, sample=True)
    assert Batch.concat(kept).index.tolist() == index


@pytest.mark.parametrize("size", [2, 4, 6])
def test_one_pair_is_kept_if_all_have_weight_zero(size):
    algorithm = method("dpo", SIX)
    batches = algorithm.batches(in_batches(np.zeros(12), epoch_of_three_groups()[1], 12), size)
    [kept] = drop_zero_gradient(algorithm, batches, batch=True, sample=True)
    assert len(kept) == 2


def test_a_constant_group_does_not_change_the_gradient():
    """Through the model: a pair of weight 0 next to another one."""
    algorithm = method("dpo", SETUP, times=2, beta=20.0)
    policy, batch = rollout(algorithm)

    def gradient(of: Batch) -> torch.Tensor:
        [(of, prepared)] = algorithm.iter_prepared(policy, [of])
        loss = algorithm.loss(policy, of, prepared, 1).per_sample.sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.parameters())])

    batch = replace(batch, credit=numbers(1.0, -1.0, 0.0, 0.0))
    alone, both = gradient(batch[:2]), gradient(batch)
    assert alone.norm() > 1e-4
    torch.testing.assert_close(both, alone, rtol=1e-7, atol=1e-10)
    assert gradient(batch[2:]).abs().max() == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sft_trains_the_best_of_each_group(size):
    scored, groups = epoch_of_three_groups()
    algorithm = method("sft", SIX)
    credit = algorithm.credit(scored)
    assert credit.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    batches = algorithm.batches(in_batches(credit, groups, 5), size)
    assert len(batches) == algorithm.batch_count(size)
    assert range(algorithm.trained_samples) == range(3)
    whole = Batch.concat(batches)
    assert whole.index.tolist() == [1, 4, 9]
    assert whole.credit.tolist() == [1, 0, 1]
    kept = drop_zero_gradient(algorithm, batches, batch=True, sample=True)
    assert Batch.concat(kept).index.tolist() == [1, 9]


@pytest.mark.parametrize("name", ["sft", "rwr"])
def test_sft_and_rwr_by_hand(name):
    """v - u = (-.6, .2) and (.4, 0): errors .2 and .08 with gradients (-.6, .2) and (.4, 0), times
    the credit 1 and .5 (of sft 0 or 1; linear in both)."""
    velocity, target = pixels([0.4, 0.2], [0.4, 1.0]), pixels([1.0, 0.0], [0.0, 1.0])
    loss, gradient, columns = objective(
        method(name), velocity, at_noise_level(0.5, target), 1.0, 0.5
    )
    assert loss == pytest.approx([0.2, 0.04])
    assert gradient[0] == pytest.approx([-0.6, 0.2])
    assert gradient[1] == pytest.approx([0.2, 0.0])
    assert columns["matching_error"].tolist() == pytest.approx([0.2, 0.08])
    loss, gradient, _ = objective(method(name), velocity, at_noise_level(0.5, target), 0.0, 1.0)
    assert loss == pytest.approx([0, 0.08])
    assert gradient[0] == [0, 0]


def test_rwrs_weights_by_hand():
    """Temperature .1, total 2 r. Group 0: 2 r/.1 = 0 and log 3: shares 1/4 and 3/4, times two.
    Group 1: 0, log 2, log 5: 1/8, 2/8, 5/8, times three."""
    rewards = {"a": 0.05 * np.log([1.0, 3, 1, 2, 5])}
    scored = ScoredSamples(rewards, np.array([0, 0, 1, 1, 1]), {"a": 2.0})
    weights = method("rwr", temperature=0.1).credit(scored)
    assert weights.tolist() == pytest.approx([0.5, 1.5, 0.375, 0.75, 1.875])
    warmer = method("rwr", temperature=1e9).credit(scored)
    assert warmer.tolist() == pytest.approx([1] * 5)


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_dpo_rejects_preference_pairs_of_a_data_set(make_session, tmp_path, column):
    """It is online, so such columns would be ignored."""
    file = tmp_path / "train.jsonl"
    rows = [{"prompt": f"a {i}", column: "a.png"} for i in range(8)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with raises_user_error(f"{file}:1", f'"{column}"', "preference", "metadata_columns"):
        make_session(algorithm="dpo", dataset=str(file), **{"dpo.times": 2})
