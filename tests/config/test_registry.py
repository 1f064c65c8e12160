"""The registry of algorithms, model families, losses and rewards."""

import sys

import pytest
from user_errors import raises_user_error

from flow_grpo.config.registry import Registry
from flow_grpo.diffusion.models import ADAPTERS
from flow_grpo.rewards import REWARDS
from flow_grpo.vlm.losses import LOSSES
from flow_grpo.vlm.losses.base import TrainLoss
from flow_grpo.vlm.models import FAMILIES


def test_entries_are_imported_when_they_are_looked_up(tmp_path, monkeypatch):
    (tmp_path / "lazily_imported.py").write_text("class Thing: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("thing", {"first": "lazily_imported:Thing"})
    assert [*registry] == ["first"]
    assert "first" in registry
    assert "lazily_imported" not in sys.modules
    assert registry["first"].__name__ == "Thing"
    assert registry["first"] is registry["first"]
    del sys.modules["lazily_imported"]


def test_custom_entries_are_added_and_removed():
    registry = Registry("thing", {"first": "math:pi"})
    registry["mine"] = int
    assert dict(registry) == {"first": 3.141592653589793, "mine": int}
    assert [*registry.paths] == ["first"]
    del registry["mine"]
    assert len(registry) == 1
    assert registry.get("mine") is None


def test_an_unknown_name_is_answered_with_the_nearest():
    registry = Registry("thing", {"first": "math:pi", "second": "math:e"})
    with raises_user_error("did you mean first?", "first, second", field="thing", value="frist"):
        registry.find("frist")
    with raises_user_error(field="train.thing", value="xyz"):
        registry.find("xyz", "train.thing")


def test_built_in_entries_are_registered_under_their_own_names():
    for name, adapter in ADAPTERS.items():
        own = adapter.pipeline_class.__name__
        variant = "LTX2ImageToVideoPipeline"  # has the adapter of LTX2Pipeline
        assert name == own or (name == variant and ADAPTERS[own] is adapter)
    for name, family in FAMILIES.items():
        assert name in family.names
    assert all(issubclass(loss, TrainLoss) for loss in LOSSES.values())


@pytest.mark.parametrize("path", REWARDS.paths.values())
def test_rewards_are_in_this_package(path):
    assert path.startswith("flow_grpo.rewards.")
