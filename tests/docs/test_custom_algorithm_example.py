"""The example of docs/methods/custom.md is a single file that adds a working algorithm."""

import importlib
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from train import collect_rewards, sample_epoch, train_epoch

from flow_grpo.diffusion import algorithms
from flow_grpo.diffusion.algorithms import ALGORITHMS, Setup
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.fields import get_config
from flow_grpo.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "custom.md"
MODULE = "flow_grpo.diffusion.algorithms.positive"


def example() -> str:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return code


@pytest.fixture
def positive(tmp_path, monkeypatch):
    """The example, imported as if it were in the algorithms package, for the time of a test."""
    folder = tmp_path / "algorithms"
    folder.mkdir()
    (folder / "positive.py").write_text(example(), encoding="utf-8")
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(folder)])
    before = dict(ALGORITHMS)
    importlib.invalidate_caches()
    ALGORITHMS["positive"] = importlib.import_module(MODULE).Positive
    yield ALGORITHMS["positive"]
    ALGORITHMS.clear()
    ALGORITHMS.update(before)
    del sys.modules[MODULE], algorithms.positive


def test_the_example_is_short():
    assert len(example().splitlines()) <= 34


def test_the_settings_are_a_section_of_the_config(positive):
    assert ALGORITHMS["positive"] is positive
    assert get_config().positive.to_dict() == {
        "times": 6,
        "skip_first": 0,
        "skip_last": 0,
        "noise_per": "sample",
        "train_guidance": None,
        "kl_guidance": None,
        "kl_beta": 0.0,
        "kl_type": "velocity",
        "kl_target": 0.0,
        "adv_clip_max": 5.0,
    }
    config = get_config()
    config.algorithm = "positive"
    check_config(config)
    config.positive.adv_clip_max = -1.0
    with pytest.raises(UserError, match=r"^positive.adv_clip_max=-1.0 must be above 0$"):
        check_config(config)


def test_the_fixture_removes_the_example():
    assert "positive" not in ALGORITHMS
    assert "positive" not in get_config()


def test_samples_without_a_positive_advantage_are_skipped_without_a_kl(positive):
    credit = torch.tensor([-1.0, 0.0, 2.0])
    without_kl = positive(positive.Settings(), Setup())
    with_kl = positive(positive.Settings(kl_beta=0.1), Setup())
    assert without_kl.has_gradient(credit).tolist() == [False, False, True]
    assert with_kl.has_gradient(credit).all()


def test_the_example_trains_an_epoch(positive, make_session):
    session = make_session(algorithm="positive", **{"positive.times": 2})
    assert type(session.algorithm) is positive
    before = [p.detach().clone() for p in session.policy.parameters()]
    samples = sample_epoch(session, 0)
    credit = session.algorithm.credit(collect_rewards(session, 0, samples))
    metrics = train_epoch(session, 0, samples, credit)
    session.algorithm.after_epoch(session.policy, 1)
    assert math.isfinite(metrics["train/loss"])
    assert metrics["train/loss"] > 0  # an error with a positive weight
    assert metrics["train/matching_error"] > 0
    after = session.policy.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
