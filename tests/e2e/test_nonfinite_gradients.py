"""NaN gradients in the first and last update of a run: both trainers, one process and several."""

import json
import logging
import subprocess
from pathlib import Path

import nonfinite_runs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from runner import ROOT, environment, torchrun
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ONE_PROCESS = [("image", "alone"), ("vlm", "alone")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    nonfinite_runs.make_files(folder)
    return folder


@pytest.fixture(scope="module")
def two_process_stderr(folder) -> str:
    """Standard error of two processes that execute every run."""
    done = subprocess.run(
        [*torchrun(), nonfinite_runs.__file__, str(folder)],
        cwd=ROOT,
        env={**environment(warmed=True), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def tensors(value: object) -> list[Tensor]:
    """Return all tensors in a structure of dicts and lists."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [t for part in parts for t in tensors(part)] if isinstance(value, dict | list) else []


def saved_tensors(checkpoint: Path) -> dict[str, list[Tensor]]:
    """Return the tensors of each file, and of each sharded FSDP2 directory."""
    found = {p: [*load_file(p).values()] for p in checkpoint.rglob("*.safetensors")}
    for path in [*checkpoint.rglob("*.bin"), *checkpoint.rglob("*.pt")]:
        found[path] = tensors(torch.load(path, weights_only=False))
    for path in checkpoint.rglob(".metadata"):
        reader = FileSystemReader(path.parent)
        stored = reader.read_metadata().state_dict_metadata
        sharded = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(sharded, storage_reader=reader)
        found[path.parent] = [*sharded.values()]
    return {str(path.relative_to(checkpoint)): values for path, values in found.items()}


def assert_finite_run(run: Path) -> None:
    """Check that two updates were skipped and that all saved tensors are finite."""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["train/skipped_updates"] == 2
    assert last["step"] == nonfinite_runs.UPDATES
    assert last["train/grad_norm"] > 0
    latest = run / "checkpoints/latest"
    assert latest.resolve().name == f"checkpoint-{nonfinite_runs.UPDATES}"
    files = saved_tensors(latest)
    assert {name.split("/")[0] for name in files} >= {"lora", "ema_lora"}
    for name, values in files.items():
        assert all(v.isfinite().all() for v in values if v.is_floating_point()), name
    [lora] = [values for name, values in files.items() if name.startswith("lora/")]
    # lora_B, which is half of the tensors, was 0
    assert sum(bool(value.any()) for value in lora) > len(lora) / 2


@pytest.mark.parametrize(("trainer", "name"), ONE_PROCESS)
def test_a_run_by_one_process_ends_with_a_finite_checkpoint(folder, caplog, trainer, name):
    with caplog.at_level(logging.WARNING):
        nonfinite_runs.run(folder, trainer, name, 1, nonfinite_runs.UPDATES)
    assert_finite_run(folder / trainer / name)
    for update in (1, nonfinite_runs.UPDATES):
        assert f"update {update} was skipped" in caplog.text
    assert "health, epoch 1: 2 updates" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "engine"), nonfinite_runs.RUNS)
def test_a_run_by_two_processes_ends_with_a_finite_checkpoint(
    folder, two_process_stderr, trainer, engine
):
    assert_finite_run(folder / trainer / engine)
    warnings = two_process_stderr.count(f"update {nonfinite_runs.UPDATES} was skipped")
    assert warnings == len(nonfinite_runs.RUNS)  # only one process logs it
