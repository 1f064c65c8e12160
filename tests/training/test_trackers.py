"""Trackers that fail; e2e/test_tracker_logging.py reads back what they show."""

import importlib.util
import logging

import pytest
from PIL import Image, ImageDraw
from user_errors import raises_user_error

from flow_grpo.config.trackers import parse_trackers
from flow_grpo.report.grid import truncate_to_width
from flow_grpo.training import trackers


def test_several_trackers_are_separated_by_commas():
    assert parse_trackers("") == []
    assert parse_trackers(" tensorboard ,tensorboard,") == ["tensorboard"]


@pytest.mark.parametrize("log_with", ["tensorbord", "wandb;tensorboard", "all", "wandb,aim"])
def test_an_unknown_tracker_is_rejected_with_the_known_ones(log_with, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with raises_user_error(
        f"log_with={log_with!r}", "wandb, tensorboard, swanlab, trackio, mlflow"
    ):
        parse_trackers(log_with)


def test_a_tracker_that_cannot_start_leaves_no_directory(make_session, tmp_path, monkeypatch):
    """The same command can be repeated."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)  # required for file stores
    with raises_user_error("MLFLOW_TRACKING_URI", field="log_with", value="mlflow"):
        make_session(log_with="tensorboard,mlflow")
    assert not (tmp_path / "run-0").exists()
    make_session(log_with="tensorboard")


def test_a_long_prompt_of_several_lines_is_truncated_to_the_width(monkeypatch):
    """With few width measurements, which take milliseconds for 2,000 characters."""
    pen = ImageDraw.Draw(Image.new("RGB", (8, 8)))
    measured, textlength = [], pen.textlength
    monkeypatch.setattr(pen, "textlength", lambda text: measured.append(text) or textlength(text))
    assert truncate_to_width(pen, "two\n lines", 200, end="  0.5") == "two lines  0.5"
    text = truncate_to_width(pen, "i" * 100_000, 200, end="  0.5")
    assert text.endswith("i…  0.5")
    assert 180 < textlength(text) <= 200
    measured.clear()
    truncate_to_width(pen, "long " * 400, 1024)
    assert len(measured) < 20


def test_a_tracker_that_fails_later_does_not_stop_training(make_session, monkeypatch, caplog):
    session = make_session(log_with="tensorboard")
    [tracker] = session.accelerator.trackers
    monkeypatch.setattr(logging.getLogger("flow_grpo"), "propagate", True)

    def fail(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tracker, "log", fail)
    trackers.log_metrics(session.accelerator, {"step": 1, "reward/ocr": 0.5})
    assert "log_with=tensorboard" in caplog.text
    assert "no route to host" in caplog.text
