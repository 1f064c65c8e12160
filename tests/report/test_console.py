"""Console lines: one per epoch, and progress within an epoch."""

import sys
from types import SimpleNamespace

import pytest

from flow_grpo.report import console
from flow_grpo.report.console import (
    ProgressLines,
    RemainingTime,
    format_duration,
    format_epoch,
    progress_bar,
)
from flow_grpo.training import session

RECORD = {
    "epoch": 3,
    "step": 6,
    "reward/ocr": 0.51234,
    "reward/avg": 0.51234,
    "reward/ocr/std": 0.1,
    "reward/std_within_group": 0.2,
    "reward/failed": 0,
    "eval/ocr": 0.75,
    "eval/avg": 0.75,
    "eval/failed": 0,
    "eval/signs/ocr": 0.8,
    "train/loss": 0.0,
    "time/sample": 6.0,
    "time/train": 3.97,
    "time/eval": 0.0,
    "time/save": 0.03,
}
MORE = {"reward/jpeg": -0.00332, "reward/avg": 0.5, "eval/jpeg": None, "eval/avg": None}


def test_the_total_of_a_single_reward_is_not_repeated():
    line = format_epoch(RECORD, ["ocr"], ["ocr"], last=10, left=70.0)
    assert line == (
        "epoch 3/10  reward/ocr 0.5123  eval/ocr 0.7500  10 s (sample 60%, train 40%)"
        "  1 min 10 s left"
    )


def test_several_rewards_are_shown_with_their_total_if_they_have_values():
    line = format_epoch(RECORD | MORE, ["ocr", "jpeg"], ["ocr", "jpeg"], last=3, left=0.0)
    assert line == (
        "epoch 3/3  reward/ocr 0.5123  reward/jpeg -0.00332  reward/avg 0.5000  eval/ocr 0.7500  "
        "10 s (sample 60%, train 40%)"
    )


def test_the_remaining_time_is_estimated_from_this_process():
    pace = RemainingTime()
    evaluation = {"epoch": 0, "time/eval": 100.0}  # before training, so not the time of an epoch
    assert pace.left(evaluation, last=10) == 0
    assert pace.left({"epoch": 1, "time/sample": 3.0, "time/train": 1.0}, last=10) == 36
    assert pace.left({"epoch": 2, "time/sample": 6.0, "time/eval": 2.0}, last=10) == 48
    assert pace.left({"epoch": 10, "time/sample": 6.0}, last=10) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.9, "1 h 0 min"),
        (3600 * 47.5, "47 h 30 min"),
        (3600 * 49, "2 days 1 h"),
    ],
)
def test_durations_are_short(seconds, text):
    assert format_duration(seconds) == text


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that is set by hand and starts at 0."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(console.logger, "propagate", True)
    return clock


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("shown", [True, False])
def test_a_log_file_gets_a_line_every_half_minute(clock, monkeypatch, caplog, shown, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    lines, seen = ProgressLines(), []
    with caplog.at_level("INFO"):
        for name, count in (("sample", 4), ("train 1/2", 3), ("train 2/2", 3)):
            for item in progress_bar(iter(range(count)), name, count, shown=shown, lines=lines):
                seen.append(item)
                clock.now += 12
    assert seen == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    expected = ["sample: 3 of 4", "train 1/2: 2 of 3", "train 2/2: 2 of 3"]
    expected = [f"{line}, 12 s left" for line in expected]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == (expected if shown and not is_terminal else [])


def test_nearly_finished_work_gets_no_line(clock, caplog):
    lines = ProgressLines()
    clock.now += 31
    with caplog.at_level("INFO"):
        assert [*lines.follow(range(3), "wait for rewards")] == [0, 1, 2]
    assert not caplog.records


def test_progress_of_a_dry_run_has_no_epoch(monkeypatch):
    named = []
    monkeypatch.setattr(
        session, "progress_bar", lambda _, name, *args, **kwargs: named.append(name)
    )
    one = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=True), progress_lines=None)
    for one.is_dry_run in (True, False):
        for name in ("epoch 4 train 1/2", "wait for rewards"):
            session.BaseSession.bar(one, [], name)
    assert named == [
        "dry run: train 1/2",
        "dry run: wait for rewards",
        "epoch 4 train 1/2",
        "wait for rewards",
    ]
