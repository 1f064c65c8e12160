"""Confidence intervals, paired differences and files of a score table."""

import csv
import io
import json

import numpy as np
import pytest

from flow_grpo.report.score_table import ScoreTable, estimate


def test_the_interval_is_that_of_the_mean():
    found = estimate(np.array([0.0, 1.0, 1.0, 0.0, np.nan, -np.inf]))
    standard_error = np.std([0, 1, 1, 0], ddof=1) / 2
    assert (found.mean, found.count) == (0.5, 4)
    assert found.standard_error == pytest.approx(standard_error)
    assert found.high - found.low == pytest.approx(2 * 1.959964 * standard_error)


def test_the_interval_covers_the_true_mean_in_95_percent_of_samples():
    samples = np.random.default_rng(0).binomial(1, 0.3, (2000, 200)).astype(float)
    covered = [found.low < 0.3 < found.high for found in map(estimate, samples)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_a_column_with_groups_is_the_mean_of_the_means_of_the_groups():
    scores, groups = np.array([1.0, 1.0, 1.0, 0.0, 1.0]), np.array(["a", "a", "a", "b", "b"])
    found = estimate(scores, groups)
    assert found.mean == pytest.approx((1 + 0.5) / 2)
    assert found.standard_error == pytest.approx(np.sqrt(0.5 / 2) / 2)  # group a has no variance


def test_one_score_has_a_mean_and_no_interval():
    table = ScoreTable()
    table.add("base", {"math": np.array([1.0])})
    assert table.format_cell("base", "math") == "1.0000"
    assert table.to_json()[0]["scores"]["math"]["low"] is None


def build_table() -> ScoreTable:
    """Return a table with a constant gain of 0.25 and a score that failed."""
    scores = np.array([0.1, 0.9, 0.5, 0.3])
    table = ScoreTable()
    table.add("base", {"math": scores, "format": np.ones(4)})
    table.add("trained", {"math": np.where(scores == 0.5, np.nan, scores + 0.25)})
    return table


def test_differences_are_paired():
    table = build_table()
    difference = table.difference("trained", "math")
    assert (difference.mean, difference.count) == (pytest.approx(0.25), 3)
    assert difference.high - difference.low == pytest.approx(0, abs=1e-9)
    assert table.difference("base", "math") is None
    assert table.difference("trained", "format") is None
    assert table.format_cell("trained", "format") == "-"


def test_the_files_have_the_same_numbers(tmp_path):
    table = build_table()
    table.write(tmp_path, {"dataset": "sums"})
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["dataset"] == "sums"
    entries = {each["name"]: each["scores"] for each in content["candidates"]}
    lines = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert [(line["candidate"], line["column"]) for line in lines] == [
        ("base", "math"),
        ("base", "format"),
        ("trained", "math"),
        ("trained", "format"),
    ]
    for line in lines:
        entry = entries[line["candidate"]][line["column"]]
        for key in ("mean", "low", "high", "count", "failed"):
            assert line[key] == ("" if entry[key] is None else str(entry[key]))
    assert float(lines[2]["difference"]) == pytest.approx(0.25)
    assert lines[2]["failed"] == "1"
    markdown = (tmp_path / "results.md").read_text()
    assert markdown.startswith("| checkpoint")
    assert "(+0.2500 ± 0.0000)" in markdown
