"""Trackers that cannot be used. What they show is read back in tests/e2e/test_tracked_run.py."""

import importlib.util
import logging

import pytest
from PIL import Image, ImageDraw

from flow_grpo.config.trackers import parse_trackers
from flow_grpo.errors import UserError
from flow_grpo.run import trackers
from flow_grpo.show.grid import fitted


def test_several_are_separated_by_commas():
    assert parse_trackers("") == []
    assert parse_trackers(" tensorboard ,tensorboard,") == ["tensorboard"]


@pytest.mark.parametrize("log_with", ["tensorbord", "wandb;tensorboard", "all", "wandb,aim"])
def test_an_unknown_one_is_named_with_those_there_are(log_with, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError) as told:
        parse_trackers(log_with)
    assert str(told.value).startswith(
        f"log_with={log_with!r} must be some of wandb, tensorboard, swanlab, trackio, mlflow, "
        "or empty"
    )


def test_one_that_cannot_start_is_told_and_leaves_no_folder(make_session, tmp_path, monkeypatch):
    """The same command can be given again."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)  # it refuses files without it
    with pytest.raises(UserError) as told:
        make_session(log_with="tensorboard,mlflow")
    assert "\n" not in str(told.value)
    assert str(told.value).startswith("log_with=mlflow: The filesystem tracking ")
    assert "; MLFLOW_TRACKING_URI must name a store that can be written" in str(told.value)
    assert not (tmp_path / "run-0").exists()
    make_session(log_with="tensorboard")


def test_a_long_prompt_of_several_lines_is_cut_to_the_width(monkeypatch):
    """With few looks at how wide it is: of 2,000 characters each takes milliseconds."""
    pen = ImageDraw.Draw(Image.new("RGB", (8, 8)))
    looks, textlength = [], pen.textlength
    monkeypatch.setattr(pen, "textlength", lambda text: looks.append(text) or textlength(text))
    assert fitted(pen, "two\n lines", 200, end="  0.5") == "two lines  0.5"
    text = fitted(pen, "i" * 100_000, 200, end="  0.5")
    assert text.endswith("i…  0.5")
    assert 180 < textlength(text) <= 200
    looks.clear()
    fitted(pen, "long " * 400, 1024)
    assert len(looks) < 20


def test_one_that_fails_later_is_told_and_the_run_goes_on(make_session, monkeypatch, caplog):
    session = make_session(log_with="tensorboard")
    [tracker] = session.accelerator.trackers
    monkeypatch.setattr(logging.getLogger("flow_grpo"), "propagate", True)

    def fail(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tracker, "log", fail)
    trackers.log(session.accelerator, {"step": 1, "reward/ocr": 0.5})
    assert "log_with=tensorboard failed, the run goes on: no route to host" in caplog.text
