"""A run with gradients kept from the rollout trains the weights of one without."""

import json
import subprocess
from pathlib import Path
from typing import Any

import exact_run
import pytest
import torch
from runner import ROOT, environment, torchrun
from safetensors.torch import load_file

COMMON = {
    "sample.train_batch_size": 1,
    "sample.num_image_per_prompt": 2,
    "train.batch_size": 1,
    "grpo.beta": 0.1,
}


def fields(logdir: Path, dataset: Path, name: str, processes: int, epochs: int) -> dict[str, Any]:
    own = 4 // processes
    return {
        **COMMON,
        "logdir": str(logdir),
        "dataset": str(dataset),
        "run_name": name,
        "num_epochs": epochs,
        "sample.num_batches_per_epoch": own,
        "train.gradient_accumulation_steps": own,
        "train.keep_gradients": name == "kept",
    }


def state(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/latest/state/trained.safetensors")


@pytest.mark.slow
def test_two_processes_then_one_train_what_the_plain_loop_trains(prompt_folder, tmp_path):
    """The second epoch after a resume; the first has no KL yet."""
    one = fields(tmp_path, prompt_folder, "kept", 2, 1)
    done = subprocess.run(
        [*torchrun(2), exact_run.__file__, json.dumps([one])],
        cwd=ROOT,
        env=environment(warmed=True),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    exact_run.run(**fields(tmp_path, prompt_folder, "kept", 1, 2), resume="auto")
    exact_run.run(**fields(tmp_path, prompt_folder, "plain", 1, 2))
    kept, plain = (state(tmp_path / name) for name in ("kept", "plain"))
    assert kept.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(kept[name], plain[name], rtol=0, atol=1e-10)
    found, expected = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()][1:]
        for name in ("kept", "plain")
    )
    for name in ("train/loss", "train/kl", "train/grad_norm", "train/velocity_norm"):
        values = [epoch[name] for epoch in expected]
        assert [epoch[name] for epoch in found] == pytest.approx(values, rel=1e-9, abs=1e-12)
