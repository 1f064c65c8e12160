import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flow_grpo.models import load_adapter
from flow_grpo.models.tiny_sd3 import build_tiny_sd3

ROOT = Path(__file__).parents[1]
torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory) -> Path:
    """A random SD3 pipeline folder, all three text encoders."""
    folder = tmp_path_factory.mktemp("models") / "tiny-sd3"
    build_tiny_sd3(seed=0).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(tiny_sd3):
    return load_adapter(str(tiny_sd3), max_sequence_length=8)


@pytest.fixture(scope="session")
def prompt_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    for split in ("train", "test"):
        lines = [f"{split} prompt number {i}" for i in range(8)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


class Runner:
    """Runs scripts/train.py as a user does, on the random model unless told otherwise."""

    def __init__(self, model: Path, dataset: Path, logdir: Path) -> None:
        self.logdir = logdir
        self.defaults = {
            "pretrained.model": model,
            "dataset": dataset,
            "logdir": logdir,
            "run_name": "run",
            "resolution": 32,
            "max_sequence_length": 8,
            "num_epochs": 1,
            "sample.num_steps": 3,
            "sample.eval_num_steps": 3,
            "sample.train_batch_size": 4,
            "sample.num_image_per_prompt": 4,
            "sample.num_batches_per_epoch": 2,
            "train.batch_size": 4,
            "train.gradient_accumulation_steps": 1,
        }

    def __call__(
        self, *extra: str, config: str = "config/base.py", launcher=(sys.executable,), **overrides
    ) -> subprocess.CompletedProcess:
        """Overrides are config fields, with __ for the dot."""
        fields = {**self.defaults, **{k.replace("__", "."): v for k, v in overrides.items()}}
        arguments = [f"--config.{k}={v}" for k, v in fields.items()]
        return subprocess.run(
            [*launcher, "scripts/train.py", f"--config={config}", *arguments, *extra],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def metrics(self, run_name: str = "run") -> list[dict]:
        lines = (self.logdir / run_name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def train(tiny_sd3, prompt_folder, tmp_path) -> Runner:
    return Runner(tiny_sd3, prompt_folder, tmp_path / "logs")
