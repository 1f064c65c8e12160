import importlib.util

import pytest

from config import base
from config.check import check
from flow_grpo.errors import UserError


def test_the_defaults_are_allowed():
    check(base.get_config())


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    """accelerate itself would go on without it."""
    config = base.get_config()
    config.log_with = "wandb"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="log_with='wandb' needs: pip install wandb"):
        check(config)
