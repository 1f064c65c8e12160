import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flow_grpo.advantages import (
    ESTIMATORS,
    compute_advantages,
    group_rows,
    group_softmax,
    keep_best_worst,
    mark_best_and_worst,
    win_rates,
)

FIXTURE_GROUPS = np.array([0, 1, 0, 2, 1, 0])
FIXTURE_REWARDS = np.arange(1, 7)
WITHIN_GROUP = ["grpo", "dr_grpo", "rloo", "grpo_passk", "pairwise"]
SCALES = ["group", "batch", "none"]

rewards_and_groups = st.integers(1, 24).flatmap(
    lambda n: st.tuples(
        arrays(np.float64, n, elements=st.floats(-10, 10).map(lambda x: round(x, 3))),
        arrays(np.int64, n, elements=st.integers(0, 4)),
    )
)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [-1.135495, -0.999933, -0.162214, 0, 0.999933, 1.297708]),
        ("batch", [-1.36618, -0.878259, -0.195169, 0, 0.878259, 1.561349]),
        ("none", [1 - 10 / 3, -1.5, 3 - 10 / 3, 0, 1.5, 6 - 10 / 3]),
    ],
)
def test_grpo_advantages_equal_the_fixture(scale, expected):
    out = compute_advantages(FIXTURE_REWARDS, FIXTURE_GROUPS, scale=scale)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@given(rewards_and_groups, st.sampled_from(WITHIN_GROUP), st.sampled_from(SCALES), st.randoms())
def test_permuting_samples_permutes_advantages(data, estimator, scale, random):
    rewards, groups = data
    order = np.array(random.sample(range(len(rewards)), len(rewards)))
    kwargs = {"estimator": estimator, "scale": scale}
    out = compute_advantages(rewards, groups, **kwargs)
    permuted = compute_advantages(rewards[order], groups[order], **kwargs)
    np.testing.assert_allclose(permuted, out[order], atol=1e-9)


@given(rewards_and_groups, st.sampled_from(WITHIN_GROUP), st.floats(-5, 5))
def test_advantages_are_invariant_to_a_shift_of_the_rewards(data, estimator, shift):
    rewards, groups = data
    kwargs = {"estimator": estimator, "scale": "none"}
    out = compute_advantages(rewards, groups, **kwargs)
    shifted = compute_advantages(rewards + shift, groups, **kwargs)
    np.testing.assert_allclose(shifted, out, atol=1e-9)


@given(rewards_and_groups, st.sampled_from(["group", "batch"]), st.floats(0.1, 10))
def test_a_scale_cancels_where_the_estimator_divides(data, scale, factor):
    rewards, groups = data
    rewards = np.round(rewards)  # division would amplify spreads below rounding
    out = compute_advantages(rewards, groups, scale=scale, eps=0)
    scaled = compute_advantages(rewards * factor, groups, scale=scale, eps=0)
    np.testing.assert_allclose(scaled, out, atol=1e-6)
    np.testing.assert_allclose(
        compute_advantages(rewards * factor, groups, estimator="dr_grpo"),
        factor * compute_advantages(rewards, groups, estimator="dr_grpo"),
        atol=1e-9,
    )


@given(
    st.floats(-10, 10), st.integers(1, 9), st.sampled_from(WITHIN_GROUP), st.sampled_from(SCALES)
)
def test_a_constant_group_and_a_group_of_one_are_exactly_zero(value, size, estimator, scale):
    rewards = np.array([value] * size + [1.0, 2.0, 7.0])
    groups = np.array([0] * size + [1, 1, 2])
    for eps in (1e-4, 0.0):
        out = compute_advantages(rewards, groups, estimator=estimator, scale=scale, eps=eps)
        assert (out[:size] == 0).all()
        assert out[-1] == 0
        only_best = estimator == "grpo_passk"
        assert (out[size:-1] != 0).tolist() == [not only_best, True]


@given(rewards_and_groups, st.sampled_from([*WITHIN_GROUP, "reinforce_pp"]), st.data())
def test_failed_rewards_are_excluded(data, estimator, draw):
    rewards, groups = data
    failed = draw.draw(arrays(np.bool_, len(rewards)))
    with_nan = np.where(failed, np.nan, rewards)
    out = compute_advantages(with_nan, groups, estimator=estimator)
    assert (out[failed] == 0).all()
    expected = compute_advantages(rewards[~failed], groups[~failed], estimator=estimator)
    np.testing.assert_array_equal(out[~failed], expected)


def test_a_sample_that_failed_in_one_reward_has_no_total():
    rewards = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([0.0, np.nan, 0.0])}
    out = compute_advantages(rewards, np.zeros(3, int), estimator="dr_grpo")
    np.testing.assert_allclose(out, [-1, 0, 1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("other", [np.nan, np.inf, 7.0])
def test_a_reward_of_weight_0_is_ignored(estimator, other):
    """Also where it failed: 0 * NaN would remove the sample."""
    credited, groups = np.array([1.0, 2.0, 6.0, 4.0, 3.0]), np.array([0, 0, 0, 1, 1])
    rewards = {"a": credited, "b": np.array([0.0, other, 0.0, other, 1.0])}
    options = {"estimator": estimator, "baseline": np.ones(5) if estimator == "remax" else None}
    expected = compute_advantages({"a": credited}, groups, weights={"a": 2.0}, **options)
    out = compute_advantages(rewards, groups, weights={"a": 2.0, "b": 0.0}, **options)
    np.testing.assert_array_equal(out, expected)
    none = compute_advantages(rewards, groups, weights={"a": 0.0, "b": 0.0}, **options)
    assert none.tolist() == [0.0] * 5


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e != "remax"])
def test_all_failed_gives_zeros(estimator):
    out = compute_advantages(np.full(3, np.nan), np.zeros(3, int), estimator=estimator)
    assert out.tolist() == [0, 0, 0]


def test_other_estimators_equal_their_formulas():
    r, g = np.array([1.0, 2.0, 6.0, 4.0]), np.array([0, 0, 0, 1])
    rloo = compute_advantages(r, g, estimator="rloo")
    np.testing.assert_allclose(rloo, [1 - 4, 2 - 3.5, 6 - 1.5, 0])
    z = (r - r.mean()) / (r.std() + 1e-4)
    np.testing.assert_allclose(compute_advantages(r, g, estimator="reinforce_pp"), z)
    baseline = np.array([0.5, 0.5, 0.5, 5.0])
    remax = compute_advantages(r, g, estimator="remax", baseline=baseline)
    np.testing.assert_allclose(remax, r - baseline)


@pytest.mark.parametrize(
    ("scale", "deviation"),
    [("none", 1.0), ("group", np.std([1.0, 6.0, 4.0])), ("batch", np.std([1.0, 6, 4, 3, 3, 2]))],
)
def test_pass_at_k_credits_the_lead_of_the_best_of_a_group(scale, deviation):
    """Group 0 has a failed sample; group 1 has two best samples, so their lead is 0."""
    rewards = np.array([1.0, np.nan, 6.0, 4.0, 3.0, 3.0, 2.0])
    groups = np.array([0, 0, 0, 0, 1, 1, 1])
    kwargs = {"estimator": "grpo_passk", "scale": scale, "eps": 0.5 * (scale != "none")}
    out = compute_advantages(rewards, groups, **kwargs)
    lead = 2 / (deviation + kwargs["eps"])
    np.testing.assert_allclose(out, [0, 0, lead, 0, 0, 0, 0], atol=1e-12)
    assert compute_advantages(np.ones(1), np.zeros(1, int), **kwargs).tolist() == [0]


def test_pass_at_k_gradient_is_that_of_the_expected_maximum():
    """Enumerate three independent samples of a softmax policy over four rewards."""
    rewards, logits = np.array([0.0, 0.3, 1.0, 2.5]), np.array([0.4, -0.2, 0.1, -0.9])
    policy = np.exp(logits) / np.exp(logits).sum()
    exact, estimate = np.zeros(4), np.zeros(4)
    for group in itertools.product(range(4), repeat=3):
        own = np.array(group)
        scores = np.eye(4)[own] - policy  # gradients of the log-probabilities
        chance = policy[own].prod()
        exact += chance * rewards[own].max() * scores.sum(0)
        credit = compute_advantages(
            rewards[own], np.zeros(3, int), estimator="grpo_passk", scale="none"
        )
        estimate += chance * credit @ scores
    np.testing.assert_allclose(estimate, exact, atol=1e-12)


def test_gdpo_normalises_each_reward_before_it_adds_them():
    rewards = {"small": np.array([0.0, 0.1, 0.0, 0.2]), "large": np.array([0.0, 10.0, 30.0, 20.0])}
    groups = np.array([0, 0, 1, 1])
    weights = {"small": 2.0, "large": 1.0}
    out = compute_advantages(rewards, groups, estimator="gdpo", weights=weights, eps=0)
    total = 2 * np.array([-1, 1, -1, 1]) + np.array([-1, 1, 1, -1])
    np.testing.assert_allclose(out, total / total.std(), atol=1e-12)


def test_gdpo_weights_normalised_rewards():
    """0, 1, 5 have mean 2 and variance 14/3; 3, 0, 0 have mean 1 and variance 2."""
    rewards = {"a": np.array([0, 1, 5]), "b": np.array([3, 0, 0])}
    out = compute_advantages(
        rewards, np.zeros(3, int), estimator="gdpo", weights={"a": 3.0, "b": 1.0}, eps=0.1
    )
    a, b = np.array([-2, -1, 3]) / (np.sqrt(14 / 3) + 0.1), np.array([2, -1, -1]) / (2**0.5 + 0.1)
    np.testing.assert_allclose(out, (3 * a + b) / ((3 * a + b).std() + 0.1), atol=1e-12)


def test_gdpo_of_a_constant_group_is_exactly_zero():
    """The rounding error of the other group's mean must not leak into it."""
    rewards = np.array([1.0, 2.0, 7.0, 0.3, 0.3, 0.1, 0.7, 0.2])
    out = compute_advantages(rewards, np.array([0, 0, 0, 1, 1, 2, 2, 2]), estimator="gdpo")
    assert out[3:5].tolist() == [0, 0]
    assert (out[[0, 1, 2, 5, 6, 7]] != 0).all()


NAN = np.nan  # not compared


@pytest.mark.parametrize(
    ("wins", "expected"),
    [
        # the first beats both, the others tie: 2/2, (0 + .5)/2, (0 + .5)/2
        ([[NAN, 1, 1], [0, NAN, 0.5], [0, 0.5, NAN]], [1, 0.25, 0.25]),
        # 1 beats 2, 2 beats 3, 3 beats 1: one of two each
        ([[NAN, 1, 0], [0, NAN, 1], [1, 0, NAN]], [0.5, 0.5, 0.5]),
        # 1 and 2 not compared: 1 has only its win over 3, 2 its tie with 3, and 3 has (0 + .5)/2
        ([[NAN, NAN, 1], [NAN, NAN, 0.5], [0, 0.5, NAN]], [1, 0.5, 0.25]),
        # all of the second's comparisons failed
        ([[NAN, NAN, 1], [NAN, NAN, NAN], [0, NAN, NAN]], [1, NAN, 0]),
        ([[NAN]], [NAN]),
    ],
)
def test_win_rates_equal_hand_computed_values(wins, expected):
    np.testing.assert_array_equal(win_rates(np.array(wins, dtype=float)), expected)


def test_pairwise_equals_hand_computed_values():
    """3 beats 1 and 1 and loses to 9: 2/3. Each 1 only ties with the other: .5/3 = 1/6. 9: 3/3.
    Minus the mean 1/2: 1/6, -1/3, -1/3, 1/2, whose mean square is (1 + 4 + 4 + 9)/36/4 = 1/8:
    times sqrt(8), .471405, -.942809, -.942809, 1.414214. The size of 9 does not matter."""
    for best in (9.0, 9e6):
        out = compute_advantages(
            np.array([3.0, 1.0, 1.0, best]),
            np.zeros(4, int),
            estimator="pairwise",
            scale="group",
            eps=0,
        )
        np.testing.assert_allclose(out, [0.471405, -0.942809, -0.942809, 1.414214], atol=1e-6)


def test_pairwise_compares_within_groups_only():
    """Win rates 1, 0 and, for 5, 5, 7, (.5 + 0)/2, (.5 + 0)/2, 1; mean 1/2 in both groups. The
    variance over the batch is (.25 + .25 + .0625 + .0625 + .25)/5 = .175, its root .418330. The
    last is alone in its group: it has no win rate and is not in the variance."""
    r, g = np.array([200.0, 100.0, 5.0, 5.0, 7.0, 40.0]), np.array([4, 4, 2, 2, 2, 0])
    out = compute_advantages(r, g, estimator="pairwise", scale="batch", eps=0)
    expected = [1.195229, -1.195229, -0.597614, -0.597614, 1.195229, 0]
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_pairwise_sums_the_win_rates_of_each_reward():
    """The third has no "b" and is not compared in "a" either: win rates 0, 1 and 1, 0. With
    weights 1 and 3 the sums are 3 and 1, with a mean of 2."""
    rewards = {"a": np.array([0.1, 0.3, 0.5]), "b": np.array([50.0, 2.0, np.nan])}
    out = compute_advantages(
        rewards,
        np.zeros(3, int),
        estimator="pairwise",
        scale="none",
        weights={"a": 1.0, "b": 3.0},
    )
    assert out.tolist() == [1, -1, 0]


def test_pairwise_uses_win_rates_of_a_judge_directly():
    """Compared with each other the judge's .9, .5, .1 would be 1, .5, 0."""
    rewards = {"judge": np.array([0.9, 0.5, 0.1]), "score": np.array([7.0, 3.0, 90.0])}
    kwargs = {"estimator": "pairwise", "scale": "none", "judged": {"judge"}}
    out = compute_advantages(rewards, np.zeros(3, int), **kwargs)
    # plus .5, 0, 1 for the scores: 1.4, .5, 1.1, minus their mean 1
    np.testing.assert_allclose(out, [0.4, -0.5, 0.1], atol=1e-12)


@given(rewards_and_groups)
def test_pairwise_does_not_change_with_the_scale_of_the_scores(data):
    rewards, groups = data
    out = compute_advantages(rewards, groups, estimator="pairwise")
    stretched = compute_advantages(np.expm1(rewards), groups, estimator="pairwise")
    np.testing.assert_array_equal(stretched, out)


def test_rloo_of_a_pair_is_the_difference_from_the_other_reward():
    out = compute_advantages(np.array([1.0, 5.0]), np.zeros(2, int), estimator="rloo")
    assert out.tolist() == [-4, 4]


@given(rewards_and_groups)
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(data):
    rewards, groups = data
    size = np.array([(groups == g).sum() for g in groups])
    rloo, centred = (compute_advantages(rewards, groups, estimator=e) for e in ("rloo", "dr_grpo"))
    several = size > 1
    expected = centred[several] * size[several] / (size[several] - 1)
    np.testing.assert_allclose(rloo[several], expected, atol=1e-12)
    assert (rloo[~several] == 0).all()


def test_a_missing_baseline_is_a_missing_score():
    r, baseline = np.array([1.0, np.nan, 3.0, 4.0]), [0.5, 0.5, None, 1.0]
    out = compute_advantages(r, np.zeros(4, int), estimator="remax", baseline=baseline)
    assert out.tolist() == [0.5, 0, 0, 3]


def test_rewards_are_summed_with_their_weights():
    rewards = {"a": np.array([1.0, 2.0]), "b": np.array([5.0, 1.0])}
    out = compute_advantages(
        rewards, np.zeros(2, int), estimator="dr_grpo", weights={"a": 1.0, "b": 0.5}
    )
    np.testing.assert_allclose(out, [0.5, -0.5])
    alone = compute_advantages(
        rewards["a"], np.zeros(2, int), estimator="dr_grpo", weights={"reward": 4.0}
    )
    np.testing.assert_allclose(alone, [-2, 2])


def test_integer_rewards_do_not_truncate():
    out = compute_advantages(np.array([0, 0, 1]), np.zeros(3, int), estimator="dr_grpo")
    np.testing.assert_allclose(out, [-1 / 3, -1 / 3, 2 / 3])


def test_inputs_are_not_changed():
    rewards = FIXTURE_REWARDS.astype(float)
    compute_advantages(rewards, FIXTURE_GROUPS)
    assert rewards.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"estimator": "ppo"},
            "'ppo'.*grpo, dr_grpo, rloo, reinforce_pp, remax, gdpo, grpo_passk, pairwise",
        ),
        ({"scale": "all"}, "'all'.*group, batch, none"),
        ({"estimator": "remax"}, "estimator='remax'.*baseline"),
        ({"baseline": np.zeros(2)}, "estimator='grpo'.*baseline"),
        (
            {"estimator": "remax", "baseline": np.zeros(1)},
            r"baseline\.shape=\(1,\) .*\(2,\)",
        ),
        ({"group_ids": np.array(["a", "b"])}, r"group_ids\.dtype=<U1 .*integer"),
        ({"group_ids": np.array([0])}, r"group_ids\.shape=\(1,\) .*\(2,\)"),
        ({"rewards": {}}, "^rewards .*empty"),
        ({"rewards": np.zeros((2, 1))}, r"^rewards .*\(2, 1\)"),
        ({"rewards": {"a": np.zeros(2), "b": np.zeros(3)}}, r"^rewards .*\((2|3),\).*\((3|2),\)"),
    ],
)
def test_invalid_arguments_are_rejected(kwargs, message):
    arguments = {"rewards": np.array([1.0, 2.0]), "group_ids": np.array([0, 0]), **kwargs}
    with pytest.raises(ValueError, match=message):
        compute_advantages(arguments.pop("rewards"), arguments.pop("group_ids"), **arguments)


def test_softmax_of_missing_equal_and_huge_rewards():
    """A missing score gets no weight, equal ones share it, and e^1000 does not overflow."""
    total = np.array([1.0, np.nan, 1.0, 3.0, 3.0, 0.0, 1000.0, np.nan])
    groups = np.array([0, 0, 0, 1, 1, 2, 2, 3])
    assert group_softmax(total, groups, 1.0).tolist() == [1, 0, 1, 1, 1, 0, 2, 0]


def test_tied_rewards_share_their_weight():
    """log(4)/2 = log 2; 0, log 2, log 2: 1/5, 2/5, 2/5, times three."""
    found = group_softmax(np.log([1.0, 4, 4]), np.zeros(3, int), 2.0)
    assert found.tolist() == pytest.approx([0.6, 1.2, 1.2])


def test_best_and_worst_of_ties_and_missing_scores():
    """Ties mark the first; constant groups and groups with one score mark none."""
    total = np.array([2.0, 5, 5, 2, 3, 3, 1, np.nan, 4, np.nan, 8, 6])
    groups = np.array([0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4])
    expected = [-1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, -1]
    assert mark_best_and_worst(total, groups).tolist() == expected


@pytest.mark.parametrize(("count", "kept"), [(1, [1, 3, 6, 8]), (2, [0, 1, 3, 4, 6, 7, 8, 9])])
def test_the_best_and_the_worst_of_each_group_are_kept(count, kept):
    """Samples without a score are kept only where too few have one."""
    total = np.array([5.0, 9, np.nan, 1, 2, np.nan, 3.0, np.nan, 7, np.nan, np.nan, np.nan])
    groups = np.repeat([0, 1], 6)
    found = keep_best_worst(total, groups, count).tolist()
    assert found[: 2 * count] == kept[: 2 * count]
    assert {6, 8} <= {*found[2 * count :]}
    assert len({*found}) == 4 * count


def test_rows_are_grouped_by_id_in_ascending_order():
    found = group_rows(np.array([7, 2, 7, -1, 2, 7]))
    assert [rows.tolist() for rows in found] == [[3], [1, 4], [0, 2, 5]]
    assert group_rows(np.array([], np.int64)) == []
