"""The output directory of a benchmark: one writer, one set of settings, and errors in one line."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from user_errors import raises_user_error

from flow_grpo.benchmarks.protocol import Settings, get_protocol
from flow_grpo.benchmarks.session import BenchmarkSession
from flow_grpo.benchmarks.store import BatchRecord, explain_write_errors
from flow_grpo.diffusion.benchmark import _report, model_settings
from flow_grpo.diffusion.fields import DiffusionConfig
from flow_grpo.errors import RewardOutage
from flow_grpo.training.lock import lock_output

SCORER = "ocr"


@pytest.fixture
def session(tmp_path):
    """A benchmark of two prompts, opened, with the scores of two candidates."""
    protocol = get_protocol("tiny_signs")
    settings = Settings(2, 1, 42, protocol.sampling_of(""), {SCORER: {}}, "ff")
    session = BenchmarkSession(
        protocol, settings, [], ["one", "two"], ["", ""], "model", tmp_path / "out", 2, {"base": 1}
    )
    session.open()
    for name, scores in (("bad", [np.nan, np.nan]), ("good", [0.0, 1.0])):
        session.store.add_candidate(name, "", "")
        session.store.candidate(name).write(0, BatchRecord({SCORER: scores}))
    return session


def test_scores_of_another_precision_are_not_continued(session):
    session.open()
    with raises_user_error("base=1", "not 2", field="--out"):
        replace(session, model_settings={"base": 2}).open()


def test_settings_of_the_model_are_stored_with_the_scores(session):
    assert session.finish().settings["base"] == 1


def test_candidates_are_compared_with_the_first_of_the_command(session):
    assert [each.name for each in session.finish().candidates] == ["bad", "good"]
    assert [each.name for each in session.finish("good").candidates] == ["good", "bad"]


def test_the_precision_of_frozen_weights_is_a_setting_of_the_model():
    config = DiffusionConfig()
    changed = replace(config, pretrained=replace(config.pretrained, base_precision="fp8"))
    assert model_settings(config) != model_settings(changed)


def test_unscored_images_of_another_candidate_do_not_fail_the_command(session):
    results = session.finish()
    _report(results, ["good"], session.out, 0.5)
    with pytest.raises(RewardOutage):
        _report(results, ["bad"], session.out, 0.5)


def test_a_file_system_error_is_one_line(tmp_path):
    with (
        raises_user_error("No space left", field="--out", value=str(tmp_path)),
        explain_write_errors(tmp_path),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_output_directory_has_one_writer(tmp_path):
    lock = lock_output(tmp_path / "out")
    with raises_user_error("another --out", tmp_path / "out"):
        lock_output(tmp_path / "out")
    lock.release()
    with raises_user_error(field="--out", value="/proc/absent"):
        lock_output(Path("/proc/absent"))
