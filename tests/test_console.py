"""The line of an epoch, and those within one."""

import sys
from types import SimpleNamespace

import pytest

from flow_grpo.run import session
from flow_grpo.show import console
from flow_grpo.show.console import Lines, Pace, duration, epoch_line, progress_bar

RECORD = {
    **{"epoch": 3, "step": 6, "reward/ocr": 0.51234, "reward/avg": 0.51234},
    **{"reward/ocr/std": 0.1, "reward/std_within_group": 0.2, "reward/failed": 0},
    **{"eval/ocr": 0.75, "eval/avg": 0.75, "eval/failed": 0, "eval/signs/ocr": 0.8},
    **{"train/loss": 0.0, "time/sample": 6.0, "time/train": 3.97, "time/eval": 0.0},
    **{"time/save": 0.03},
}
MORE = {"reward/jpeg": -0.00332, "reward/avg": 0.5, "eval/jpeg": None, "eval/avg": None}


def test_of_one_reward_the_sum_is_not_repeated():
    line = epoch_line(RECORD, ["ocr"], ["ocr"], last=10, left=70.0)
    assert line == (
        "epoch 3/10  reward/ocr 0.5123  eval/ocr 0.7500  10 s (sample 60%, train 40%)"
        "  1 min 10 s left"
    )


def test_of_several_each_is_there_and_their_sum_where_they_have_a_value():
    line = epoch_line(RECORD | MORE, ["ocr", "jpeg"], ["ocr", "jpeg"], last=3, left=0.0)
    assert line == (
        "epoch 3/3  reward/ocr 0.5123  reward/jpeg -0.00332  reward/avg 0.5000  eval/ocr 0.7500  "
        "10 s (sample 60%, train 40%)"
    )


def test_the_time_left_is_that_of_the_epochs_of_this_process():
    pace = Pace()
    evaluation = {"epoch": 0, "time/eval": 100.0}  # before training: no measure of an epoch
    assert pace.left(evaluation, last=10) == 0
    assert pace.left({"epoch": 1, "time/sample": 3.0, "time/train": 1.0}, last=10) == 36
    assert pace.left({"epoch": 2, "time/sample": 6.0, "time/eval": 2.0}, last=10) == 48
    assert pace.left({"epoch": 10, "time/sample": 6.0}, last=10) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 0 s")),
        *((3599.4, "59 min 59 s"), (3599.9, "1 h 0 min"), (3600 * 47.5, "47 h 30 min")),
        (3600 * 49, "2 days 1 h"),
    ],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


@pytest.fixture
def clock(monkeypatch):
    """Stands at 0 until it is moved."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(console.logger, "propagate", True)
    return clock


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("shown", [True, False])
def test_a_file_has_a_line_every_half_minute(clock, monkeypatch, caplog, shown, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    lines, seen = Lines(), []
    with caplog.at_level("INFO"):
        for name, count in (("sample", 4), ("train 1/2", 3), ("train 2/2", 3)):
            for item in progress_bar(iter(range(count)), name, count, shown=shown, lines=lines):
                seen.append(item)
                clock.now += 12
    assert seen == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    told = [record.getMessage() for record in caplog.records]
    of_file = ["sample: 3 of 4", "train 1/2: 2 of 3", "train 2/2: 2 of 3"]
    of_file = [f"{line}, 12 s left" for line in of_file]
    assert told == (of_file if shown and not is_terminal else [])


def test_what_is_done_at_once_has_no_line(clock, caplog):
    lines = Lines()
    clock.now += 31
    with caplog.at_level("INFO"):
        assert [*lines.follow(range(3), "wait for rewards")] == [0, 1, 2]
    assert not caplog.records


def test_a_dry_run_names_no_epoch(monkeypatch):
    named = []
    monkeypatch.setattr(
        session, "progress_bar", lambda _, name, *args, **kwargs: named.append(name)
    )
    one = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=True), lines=None)
    for one.dry in (True, False):
        for name in ("epoch 4 train 1/2", "wait for rewards"):
            session.BaseSession.bar(one, [], name)
    of_run = ["epoch 4 train 1/2", "wait for rewards"]
    assert named == ["dry run: train 1/2", "dry run: wait for rewards", *of_run]
