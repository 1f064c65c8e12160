import importlib.util
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from config import base
from config.check import check
from config.gpu import can_compile, can_replay, missing_tool
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


def test_merging_needs_a_lora():
    config = base.get_config()
    config.sample.merge_lora, config.use_lora = True, False
    with pytest.raises(UserError, match=r"sample\.merge_lora=True needs use_lora=True"):
        check(config)


def on_gpu(**state) -> SimpleNamespace:
    """An accelerator, as far as it matters here."""
    return SimpleNamespace(
        **{"device": torch.device("cuda"), "distributed_type": DistributedType.NO, **state}
    )


def test_what_is_compiled_and_replayed(monkeypatch, caplog):
    monkeypatch.setattr("config.gpu.missing_tool", lambda: "")
    config = base.get_config()
    several = on_gpu(distributed_type=DistributedType.MULTI_GPU)
    assert can_compile(config, on_gpu())
    assert can_replay(config, on_gpu())
    assert can_compile(config, several)
    assert can_replay(config, several)
    on_cpu = on_gpu(device=torch.device("cpu"))
    assert not can_compile(config, on_cpu)
    assert not can_replay(config, on_cpu)
    for sharded in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        assert not can_replay(config, on_gpu(distributed_type=sharded))
    assert not can_compile(config, on_gpu(distributed_type=DistributedType.FSDP))
    config.train.gradient_checkpointing = True
    assert not can_replay(config, on_gpu())
    config.train.gradient_checkpointing, config.cuda_graphs = False, False
    assert not can_replay(config, on_gpu())
    config.cuda_graphs, config.use_lora = True, False
    assert not can_replay(config, on_gpu())
    monkeypatch.setattr("config.gpu.missing_tool", lambda: "Triton")
    with caplog.at_level("WARNING"):
        assert not can_compile(config, on_gpu())
    assert "Triton is missing" in caplog.text
    config.compile = False
    caplog.clear()
    assert not can_compile(config, on_gpu())
    assert not caplog.text


def test_what_the_compiler_needs(monkeypatch, tmp_path):
    monkeypatch.setattr("config.gpu.has_triton", lambda: False)
    assert missing_tool() == "Triton"
    monkeypatch.setattr("config.gpu.has_triton", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert missing_tool() == "a C compiler (gcc or clang)"
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    assert missing_tool() == f"{tmp_path / 'Python.h'} (python3-dev)"
    (tmp_path / "Python.h").touch()
    assert missing_tool() == ""
