"""Formulas of benchmarks against numbers computed by hand."""

import math

import numpy as np
import pytest

from flow_grpo.benchmarks.formulas import apply_formula
from flow_grpo.report.score_table import ScoreTable, sample_means


def test_the_score_of_geneval_is_the_mean_of_the_means_by_tag():
    scores = {"geneval": np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])}
    tags = np.array(["counting", "position", "position"])
    columns = apply_formula("mean_of_tags", scores, tags)
    table = ScoreTable(unit="prompt")
    table.add("base", columns.values, columns.groups)
    found = {name: table.score("base", name).mean for name in columns.values}
    assert found == {
        "score": pytest.approx((1.0 + 0.25) / 2),
        "counting": 1.0,
        "position": 0.25,
        "samples": 0.5,
        "any of 2": pytest.approx(2 / 3),
    }


def test_samples_without_a_score_are_left_out_and_never_count_as_zero():
    nan = math.nan
    values = np.array([[1.0, nan], [nan, nan], [-np.inf, -np.inf], [0.0, 1.0]])
    np.testing.assert_array_equal(sample_means(values), [1.0, nan, -np.inf, 0.5])
    tags = np.array(["a", "a", "b", "b"])
    values = np.array([[1.0, nan], [nan, 0.0], [0.0, 0.0], [0.0, 1.0]])
    columns = apply_formula("mean_of_tags", {"geneval": values}, tags)
    # a prompt with an incorrect and an unscored image may or may not have a correct one
    np.testing.assert_array_equal(columns.values["any of 2"], [1.0, nan, 0.0, 1.0])


def test_percent_scales_every_scorer():
    columns = apply_formula("percent", {"a": np.array([[0.5], [1.0]])}, np.array(["", ""]))
    np.testing.assert_array_equal(columns.values["a"], [50.0, 100.0])
