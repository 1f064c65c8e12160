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
collect_ignore = ["paddleocr"]  # needs an environment of its own; .ci/run makes one


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
    """Runs scripts/train.py and its like as a user does, with some config fields set."""

    def __init__(self, logdir: Path, **fields) -> None:
        self.logdir = logdir
        self.fields = {"logdir": logdir, "run_name": "run", **_dotted(fields)}

    def __call__(
        self,
        *extra: str,
        script: str = "scripts/train.py",
        config: str = "config/base.py",
        launcher: tuple[str, ...] = (sys.executable,),
        **overrides,
    ) -> subprocess.CompletedProcess:
        """Overrides are config fields, with __ for the dot."""
        fields = {**self.fields, **_dotted(overrides)}
        arguments = [f"--config.{k}={v}" for k, v in fields.items()]
        return subprocess.run(
            [*launcher, script, f"--config={config}", *arguments, *extra],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def metrics(self, run_name: str = "run") -> list[dict]:
        lines = (self.logdir / run_name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def _dotted(fields: dict) -> dict:
    return {name.replace("__", "."): value for name, value in fields.items()}


@pytest.fixture
def train(tiny_sd3, prompt_folder, tmp_path) -> Runner:
    """Short runs on the random model."""
    return Runner(
        tmp_path / "logs",
        pretrained__model=tiny_sd3,
        dataset=prompt_folder,
        resolution=32,
        max_sequence_length=8,
        num_epochs=1,
        sample__num_steps=3,
        sample__eval_num_steps=3,
        sample__train_batch_size=4,
        sample__num_image_per_prompt=4,
        sample__num_batches_per_epoch=2,
        train__batch_size=4,
        train__gradient_accumulation_steps=1,
    )


@pytest.fixture
def run(tmp_path) -> Runner:
    """Presets as they are."""
    return Runner(tmp_path / "logs")
