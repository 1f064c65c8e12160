"""Each health check, on rows that pass and fail it."""

import json
from pathlib import Path

import pytest

from flow_grpo.report.health import CHECKS, Finding, run_checks, summarize

RESULTS = Path(__file__).parents[2] / "docs/results"
LOGS = sorted(RESULTS.rglob("*.jsonl"))
# Unhealthy runs of docs/results: all images become alike, or the KL exceeds 1 (the window of mix
# moves to steps with less noise, which these logs do not record)
UNHEALTHY = {
    "tiny_awm-1": {"diversity"},
    "tiny_awm-2": {"diversity"},
    "tiny_awm-3": {"flat groups"},  # solved
    "tiny_dpo-3": {"KL"},
    "tiny_mix-1": {"diversity", "flat groups"},
    "tiny_mix-2": {"diversity"},
    "tiny_mix-3": {"diversity"},
    **{f"tiny_rwr-{i}": {"diversity"} for i in (1, 2, 3)},
    "scenes-tiny_mix-2": {"diversity"},
    **{f"gspo_seed{i}": {"clip shares"} for i in (1, 2, 3)},  # its bounds of 3e-4 clip about half
    # trained past their best
    **{
        f"scenes-tiny_{name}": {"past the best", "falling reward"}
        for name in ("rwr-1", "rwr-3", "sft-2")
    },
    **{f"scenes-tiny_{name}": {"past the best"} for name in ("rwr-2", "sft-3")},
    "no_leash-3": {"past the best", "falling reward"},
    # correct edits of one image are alike
    **{name: {"diversity"} for name in ("nft_fast", "nft_graded", "nft_cpu", "grpo_strict")},
    "tiny_mixed-1": {"diversity"},
    "tiny_mixed-2": {"diversity"},
    **{f"no_leash-{i}": {"diversity"} for i in (1, 2)},
    **{f"leash_0.1-{i}": {"diversity"} for i in (1, 3)},
    "seed1_round2_enhancer": {"ratio drift"},  # its last update adds spaces to prompts
    # hacked, or solved
    **{f"hacking_{name}": {"diversity"} for name in ("nothing-1", "nothing-2")},
    **{f"hacking_{name}": {"diversity"} for name in ("diversity-1", "diversity-2")},
    **{
        f"hacking_{name}": {"flat groups"}
        for name in ("nothing-3", "data-2", "data-3", "gated_KL_reset-3")
    },
    "mixed-2": {"diversity"},
    "opd_gaussian-3": {"past the best"},
    # runs with deliberate errors, for docs/metrics.md
    "constant": {"flat groups"},
    "narrow_clip": {"ratio drift", "clip shares"},
    "white": {"diversity", "velocity norm"},
    "wide_clip": {"ratio drift", "failed rewards", "falling reward", "velocity norm"},
}


def rows(**columns: list) -> list[dict]:
    """Return rows from a column per metric, with __ for the slash; epochs count from 1."""
    names = [name.replace("__", "/") for name in columns]
    values = zip(*columns.values(), strict=True)
    return [{"epoch": i, **dict(zip(names, v, strict=True))} for i, v in enumerate(values, 1)]


def only(check: str, table: list[dict]) -> Finding | None:
    """Return the finding, if any, and assert that no other check fails."""
    found = run_checks(table)
    assert {finding.check for finding in found} <= {check}
    return found[0] if found else None


def rewards(avg: list[float], spread: float = 0.2, **columns: list) -> list[dict]:
    return rows(reward__avg=avg, reward__std_within_group=[spread] * len(avg), **columns)


@pytest.mark.parametrize(("deviation", "epoch"), [(0.0625, None), (0.07, 2)])
def test_on_policy_ratios_deviate_by_at_most_a_tenth_of_the_clip_range(deviation, epoch):
    table = rows(train__first_update_ratio_dev=[0, deviation, 0.1], train__clip_range=[0.625] * 3)
    found = only("on-policy ratios", table[:2])
    assert (found and found.epoch) == epoch
    if epoch:
        assert "7.0e-02" in found.text
        assert "6.2e-02" in found.text


@pytest.mark.parametrize(
    ("ratio", "clip", "most"),
    [
        (1.0009, 1e-3, None),
        (0.998, 1e-3, "1.0e-03"),
        (1.009, 1.0, None),  # for any clip range
        (1.011, 1.0, "1.0e-02"),
        (0.98, None, "1.0e-02"),  # dppo has no clip range
    ],
)
def test_the_mean_ratio_stays_within_the_clip_range_of_1(ratio, clip, most):
    found = only("ratio drift", rows(train__ratio_mean=[1, ratio], train__clip_range=[clip] * 2))
    assert bool(found) == bool(most)
    if found:
        assert f" {abs(ratio - 1):.1e}, more than {most}" in found.text


def test_a_value_and_its_limit_are_formatted_differently():
    drift = only("ratio drift", rows(train__ratio_mean=[1.01003]))
    assert " 1.003e-02, more than 1.000e-02" in drift.text
    ratios = rows(train__first_update_ratio_dev=[1.02e-5], train__clip_range=[1e-4])
    assert " 1.02e-05, more than 1.00e-05" in only("on-policy ratios", ratios).text


@pytest.mark.parametrize(
    ("skipped", "scale", "epoch"),
    [
        ([0, 0, 0], None, None),
        ([0, 1, 2], None, 2),
        ([3, 0, 1], [8192, 8192, 1], None),  # fp16 lowers its loss scale
        ([3, 0, 1], [8192, 8192, 0.5], 3),
    ],
)
def test_updates_may_be_skipped_only_while_the_loss_scale_is_lowered(skipped, scale, epoch):
    columns = {} if scale is None else {"train__loss_scale": scale}
    found = only("skipped updates", rows(train__skipped_updates=skipped, **columns))
    assert (found and found.epoch) == epoch
    if found:
        assert found.text.startswith(f"{skipped[epoch - 1]} updates")


@pytest.mark.parametrize(("ratio", "fails"), [(1.15, False), (1.25, True)])
def test_token_ratios_may_move_within_the_clip_range(ratio, fails):
    columns = {"train__ratio_mean": [ratio], "train__clip_range": [0.2], "answer__length": [9]}
    assert bool(only("ratio drift", rows(**columns))) == fails
    deviation = {**columns, "train__ratio_mean": [1.0], "train__first_update_ratio_dev": [0.1]}
    assert "train.recompute_old=True" in only("on-policy ratios", rows(**deviation)).advice


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"train__clip_low": [0.3], "train__clip_high": [0.2]}, None),
        ({"train__clip_low": [0.3], "train__clip_high": [0.21]}, ["51%", "clipped"]),
        ({"train__masked": [0.5]}, None),
        ({"train__masked": [0.75]}, ["75%", "masked"]),
    ],
)
def test_at_most_half_of_the_losses_are_clipped_or_masked(columns, text):
    found = only("clip shares", rows(**columns))
    assert all(part in found.text for part in text) if text else found is None


@pytest.mark.parametrize(
    ("share", "avg", "words"),
    [
        ([0, 1, 1, 0.9], [0.2] * 4, None),
        ([0, 1, 0.95, 1], [0.2, 0.9, 0.9, 0.9], "from 0.2 to 0.9: the task is solved"),
        ([0, 1, 0.95, 1], [0.2, 0.19, 0.19, 0.19], "from 0.2 to 0.19: there is nothing to learn"),
        ([1, 1, 1, 1], [0.2, 0.9, 0.9, 0.9], "from 0.2 to 0.9: there is nothing to learn"),
    ],
)
def test_groups_with_equal_scores_are_solved_or_unsolvable(share, avg, words):
    found = only("flat groups", rewards(avg, reward__zero_std_ratio=share))
    assert words in found.text if words else found is None


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        ([1e-5, 1e-4, 1e-3, 9e-3], None),
        ([1e-9, 1e-8, 1e-8, 9e-5], None),  # still negligible
        ([0.001, 0.001, 0.02], None),  # too early
        ([0.001, 0.002, 0.001, 0.021], "from 0.002 to 0.021"),
        ([1.0, 1.1], "is 1.1"),
    ],
)
def test_kl_grows_slowly(kl, words):
    found = only("KL", rows(train__kl=kl))
    assert words in found.text if words else found is None


@pytest.mark.parametrize(
    ("norm", "share", "words"),
    [
        ([1, 9, 2, 20], 0, None),
        ([1, 2, 21], 0, None),  # too early
        ([1, 9, 2, 21], 0, "is 21, 10.5 times its median"),
        ([1] * 10 + [30] * 20 + [200], 0, "is 30, 30 times"),
        ([30] * 21 + [1] * 11 + [11], 0, "is 11, 11 times"),  # the median is of the last 20
        ([1, 0], 0.9, "the gradient is 0"),
        ([1, 0], 1.0, None),  # reported as flat groups
    ],
)
def test_gradients_neither_spike_nor_vanish(norm, share, words):
    found = only(
        "gradient norm", rows(train__grad_norm=norm, reward__zero_std_ratio=[share] * len(norm))
    )
    assert words in found.text if words else found is None


def test_a_saturated_loss_of_given_pairs_is_reported():
    found = only("gradient norm", rows(train__grad_norm=[1, 0], train__margin=[0.0, 1173.2]))
    assert "at a margin of 1.2e+03" in found.text


@pytest.mark.parametrize(
    ("limit", "fails"), [(0.5, True), (1.0, False), (2.0, False), (None, True)]
)
def test_a_gradient_below_the_clipping_norm_is_no_spike(limit, fails):
    """Older logs lack the limit."""
    norm = [0.05, 0.05, 0.05, 1.0]
    table = rows(train__grad_norm=norm, train__max_grad_norm=[limit] * 4)
    assert bool(only("gradient norm", table)) == fails


@pytest.mark.parametrize(("failed", "samples", "fails"), [(1, 20, 0), (2, 20, 1), (2, None, 0)])
def test_at_most_a_twentieth_of_the_samples_may_fail(failed, samples, fails):
    """Old logs lack the number of samples."""
    table = rows(reward__failed=[0, failed], reward__samples=[samples] * 2)
    table[1] |= {"reward/a": 0.5, "reward/a/failed": 0, "reward/b": None, "reward/b/failed": failed}
    found = only("failed rewards", table)
    assert bool(found) == fails
    if found:
        assert found.text.startswith("2 of 20 samples ")
        assert "reward/b" in found.text


@pytest.mark.parametrize(
    ("avg", "diversity", "fails"),
    [
        ([0.5, 0.61], [0.4, 0.19], True),
        ([0.5, 0.61], [0.4, 0.2], False),
        ([0.5, 0.59], [0.4, 0.19], False),  # the reward has not risen by half a spread
    ],
)
def test_a_rising_reward_with_falling_diversity_may_be_hacked(avg, diversity, fails):
    found = only("diversity", rewards(avg, reward__diversity=diversity))
    assert bool(found) == fails
    if found:
        assert "rose from 0.5 to 0.61" in found.text
        assert "fell from 0.4 to 0.19" in found.text


def test_epochs_are_compared_with_those_of_the_same_noise_window():
    """A moving window changes the diversity and the velocity norm by itself."""
    columns = dict(train__velocity_norm=[1, 2, 1.2, 2.5], reward__diversity=[0.4, 0.1, 0.3, 0.1])
    moving = rewards([0.2, 0.4, 0.6, 0.8], **columns, train__noisy_from=[0, 1, 0, 1])
    assert run_checks(moving) == []
    still = [{**row, "train/noisy_from": 0} for row in moving]
    assert [(f.check, f.epoch) for f in run_checks(still)] == [
        ("diversity", 2),
        ("velocity norm", 2),
    ]


@pytest.mark.parametrize(
    ("avg", "other", "fails"),
    [
        ([0.5, 0.7, 0.8], [0.5, 0.35, 0.35], True),
        ([0.5, 0.7, 0.8], [0.5, 0.35, 0.46], False),  # not twice in a row
        ([0.5, 0.7, 0.55], [0.5, 0.35, 0.35], False),  # the total has not risen
    ],
)
@pytest.mark.parametrize(("part", "spread"), [("reward", 0.14), ("eval", 0.29)])
def test_a_reward_that_falls_while_the_total_rises_is_reported(part, spread, avg, other, fails):
    """It falls twice in a row, by its spread in training or by half of it in evaluations.

    A reward that was not requested has no value.
    """
    table = rewards(avg)
    for row, value in zip(table, other, strict=True):
        row |= {f"{part}/b": value, f"{part}/b/std": spread}
        row |= {f"{part}/c": None, f"{part}/c/std": None}
    wider = [{**row, f"{part}/b/std": 1.1 * spread} for row in table]
    assert only("second reward", [wider[0], *table[1:]]) is None
    assert only("second reward", [table[0], *wider[1:]]) is None
    found = only("second reward", table)
    assert bool(found) == fails
    if found:
        assert found.epoch == 3
        assert f"rose from 0.5 to 0.8 while {part}/b fell from 0.5 to 0.35" in found.text


def test_an_evaluation_before_training_counts_as_the_start():
    table = [{"epoch": 0, "eval/b": 0.9, "eval/b/std": 0.1}, *rewards([0.5, 0.8, 0.8])]
    for row in table[1:]:
        row |= {"eval/b": 0.7, "eval/b/std": 0.1}
    assert "eval/b fell from 0.9 to 0.7" in only("second reward", table).text


@pytest.mark.parametrize(("norm", "fails"), [(1.5, False), (1.6, True)])
def test_velocity_norms_grow_by_at_most_half(norm, fails):
    found = only("velocity norm", rows(train__velocity_norm=[1, 0.5, norm]))
    assert bool(found) == fails
    if found:
        assert "from 1 to 1.6" in found.text


@pytest.mark.parametrize(
    ("check", "column", "values", "epoch"),
    [
        ("norm against the reference", "train__norm_ratio", [1, 1.15, 1.16], 3),
        ("norm against the reference", "train__norm_ratio", [1, 1.15], None),
        ("norm against the reference", "train__norm_ratio", [1.5, 1.7], None),  # other guidance
        ("norm against the reference", "train__norm_ratio", [0.5, 0.9], None),
        ("reference resets", "train__reference_reset", [1, 1, 0, 1, 1, 1], 6),
        ("reference resets", "train__reference_reset", [1, 1, 0, 1, 1], None),
    ],
)
def test_anchor_metrics_are_checked(check, column, values, epoch):
    found = only(check, rows(**{column: values}))
    assert (found.epoch if found else None) == epoch


@pytest.mark.parametrize(
    ("change", "epoch"),
    [([0, 0.06, 0.06], 3), ([0, 0.06, 0.04, 0.06], None), ([0.05, 0.05, -0.2], None)],
)
def test_the_error_of_preferred_images_rises_by_at_most_a_tenth(change, epoch):
    """Of 0.5 of the reference; twice in a row."""
    error = [0.5 + each for each in change]
    columns = {"train__chosen_change": change, "train__chosen_error": error}
    found = only("preferred images", rows(**columns))
    assert (found.epoch if found else None) == epoch


def test_runs_of_any_length_and_method_can_be_checked():
    assert run_checks([]) == []
    assert only("failed rewards", rows(reward__failed=[3], reward__samples=[4])).epoch == 1
    assert run_checks([{"epoch": 0, "step": 0, "time/eval": 1.0}]) == []
    assert run_checks([{"epoch": 0, "eval/avg": None}, {"epoch": 1, "train/kl": None}]) == []


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_only_unhealthy_runs_have_findings(log):
    """A finding also does not change as rows are added."""
    table = [json.loads(line) for line in log.open()]
    found = run_checks(table)
    assert {finding.check for finding in found} == UNHEALTHY.get(log.stem, set())
    assert all(finding.check in CHECKS for finding in found)
    for i in range(len(table)):
        until = [finding for finding in found if finding.epoch <= table[i]["epoch"]]
        assert run_checks(table[: i + 1]) == until


@pytest.mark.parametrize(
    ("scores", "epoch"),
    [
        ([0.4, 0.7, 0.59, 0.59, 0.59], 5),
        ([0.4, 0.7, 0.61, 0.61, 0.61], None),  # a third of the gain is 0.1
        ([0.4, 0.7, 0.5, 0.5, 0.65, 0.5, 0.5], None),  # not in a row
        ([0.4, 0.7, 0.5, 0.5, 0.71, 0.7, 0.7], None),
        ([0.4, 0.3, 0.2, 0.1, 0.1], None),  # nothing was gained
        ([0.4, 0.7, None, 0.5, None, 0.5, 0.5], 7),  # epochs between evaluations
    ],
)
def test_an_evaluation_that_stays_below_its_best_is_reported(scores, epoch):
    found = only("past the best", rows(eval__avg=scores))
    assert (found and found.epoch) == epoch
    if epoch:
        assert all(part in found.text for part in ("eval/avg", "0.7", "epoch 2", str(scores[-1])))
        assert "checkpoints/best" in found.advice


@pytest.mark.parametrize(
    ("averages", "epoch"),
    [
        ([0.18, 0.12, 0.12, 0.12], 4),
        ([0.18, 0.14, 0.14, 0.14], None),  # by less than a quarter of the spread
        ([0.18, 0.12, 0.12, 0.18, 0.12, 0.12], None),  # not in a row
        ([0.18, 0.12, None, 0.12, 0.08], 5),
        ([-1.0, -2.0, -2.0, -2.0], 4),
    ],
)
def test_a_training_reward_that_stays_below_its_start_is_reported(averages, epoch):
    found = only("falling reward", rewards(averages))
    assert (found and found.epoch) == epoch


def test_checks_without_data_do_not_count_as_passed():
    """AWM logs no ratio, clip share or KL."""
    table = rewards([0.2, 0.3], train__grad_norm=[1.0, 1.0], eval__avg=[0.2, 0.3])
    failed, passed, not_applicable = summarize(table)
    assert failed == []
    assert passed == ["gradient norm", "falling reward", "past the best"]
    assert {*passed, *not_applicable} == {*CHECKS}
    table = rows(train__ratio_mean=[2.0], train__clip_range=[0.1])
    failed, passed, not_applicable = summarize(table)
    assert [finding.check for finding in failed] == ["ratio drift"]
    assert passed == []
    assert len(not_applicable) == len(CHECKS) - 1


def test_several_rewards_are_compared_with_each_other_only():
    one = rewards([0.2], reward__ocr=[0.2], **{"reward__ocr/std": [0.1], "reward__avg/std": [0.1]})
    both = [row | {"reward/jpeg": 1.0, "reward/jpeg/std": 0.1} for row in one]
    assert "second reward" in summarize(one)[2]
    assert "second reward" in summarize(both)[1]


def test_advice_for_a_method_without_a_clip_range_does_not_mention_one():
    """dppo has a ratio and masks losses by its delta."""
    [drift] = [f for f in run_checks(rows(train__ratio_mean=[1, 1.5])) if f.check == "ratio drift"]
    assert "clip" not in drift.advice
    [masked] = [f for f in run_checks(rows(train__masked=[0, 0.9])) if f.check == "clip shares"]
    assert "clip" not in masked.advice
    assert "delta" in masked.advice
