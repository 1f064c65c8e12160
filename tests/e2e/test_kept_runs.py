"""A run with gradients kept from the rollout trains the weights of one without."""

import json
import subprocess
from pathlib import Path
from typing import Any

import exact_run
import pytest
import torch
from PIL import Image
from runner import ROOT, environment, torchrun
from safetensors.torch import load_file


def assert_equal_runs(kept: Path, plain: Path) -> None:
    """In weights, and in what they say of their epochs."""
    found, expected = (
        load_file(run / "checkpoints/latest/state/trained.safetensors") for run in (kept, plain)
    )
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)
    told, others = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
        for run in (kept, plain)
    )
    for name in ("train/loss", "train/kl", "train/grad_norm", "train/velocity_norm"):
        values = [epoch[name] for epoch in others]
        assert [epoch[name] for epoch in told] == pytest.approx(values, rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_two_processes_then_one_train_what_the_plain_loop_trains(prompt_folder, tmp_path):
    """The second epoch after a resume, as the first has no KL yet; and pictures beside samples,
    whose backward pass is the one that shares gradients."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.new("RGB", (16, 16), "teal").save(pictures / "a.png")
    (pictures / "a.txt").write_text("a teal square")

    def fields(name: str, *, processes: int = 1, epochs: int = 1) -> dict[str, Any]:
        own = 4 // processes
        return {
            "logdir": str(tmp_path),
            "dataset": str(prompt_folder),
            "run_name": name,
            "num_epochs": epochs,
            "sample.train_batch_size": 1,
            "sample.num_image_per_prompt": 2,
            "sample.num_batches_per_epoch": own,
            "train.batch_size": 1,
            "train.gradient_accumulation_steps": own,
            "train.keep_gradients": "kept" in name,
            "grpo.beta": 0.1,
            "anchors.data": str(pictures) if "beside" in name else "",
        }

    together = [fields(name, processes=2) for name in ("kept", "kept-beside")]
    done = subprocess.run(
        [*torchrun(2), exact_run.__file__, json.dumps(together)],
        cwd=ROOT,
        env=environment(warmed=True),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    exact_run.run(**fields("kept", epochs=2), resume="auto")
    exact_run.run(**fields("plain", epochs=2))
    exact_run.run(**fields("plain-beside"))
    for name in ("", "-beside"):
        assert_equal_runs(tmp_path / f"kept{name}", tmp_path / f"plain{name}")
