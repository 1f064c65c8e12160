"""Reusing gradients from the rollout gives the same weights as a second forward pass."""

import json
import subprocess
from pathlib import Path
from typing import Any

import float64_run
import pytest
import torch
from PIL import Image
from runner import ROOT, environment, torchrun
from safetensors.torch import load_file


def assert_equal_runs(kept: Path, plain: Path) -> None:
    """Compare the weights and metrics of two runs."""
    found, expected = (
        load_file(run / "checkpoints/latest/state/trained.safetensors") for run in (kept, plain)
    )
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)
    metrics, expected_metrics = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
        for run in (kept, plain)
    )
    for name in ("train/loss", "train/kl", "train/grad_norm", "train/velocity_norm"):
        values = [epoch[name] for epoch in expected_metrics]
        assert [epoch[name] for epoch in metrics] == pytest.approx(values, rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_rollout_gradients_equal_the_standard_loop(prompt_folder, tmp_path):
    """One run is resumed before its second epoch, because the KL is zero in the first.

    The other trains with anchor images, and only their backward pass synchronizes the gradients.
    """
    anchor_images = tmp_path / "anchor_images"
    anchor_images.mkdir()
    Image.new("RGB", (16, 16), "teal").save(anchor_images / "a.png")
    (anchor_images / "a.txt").write_text("a teal square")

    def fields(name: str, *, processes: int = 1, epochs: int = 1) -> dict[str, Any]:
        batches = 4 // processes
        return {
            "logdir": str(tmp_path),
            "dataset": str(prompt_folder),
            "run_name": name,
            "num_epochs": epochs,
            "eval_prompts": 2,
            "log_images": 2,
            "sample.train_batch_size": 1,
            "sample.num_image_per_prompt": 2,
            "sample.num_batches_per_epoch": batches,
            "train.batch_size": 1,
            "train.gradient_accumulation_steps": batches,
            "train.keep_gradients": "kept" in name,
            "grpo.beta": 0.1,
            "anchors.data": str(anchor_images) if "anchors" in name else "",
        }

    runs = [fields(name, processes=2) for name in ("kept", "kept-anchors")]
    done = subprocess.run(
        [*torchrun(2), float64_run.__file__, json.dumps(runs)],
        cwd=ROOT,
        env=environment(warmed=True),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # only the main process receives and converts logged images: before training, of training, after
    counts = [json.loads((tmp_path / f"kept/converted-{rank}.json").read_text()) for rank in (0, 1)]
    assert counts == [[2, 2, 2], [0, 0]]
    float64_run.run(**fields("kept", epochs=2), resume="auto")
    float64_run.run(**fields("plain", epochs=2))
    float64_run.run(**fields("plain-anchors"))
    for name in ("", "-anchors"):
        assert_equal_runs(tmp_path / f"kept{name}", tmp_path / f"plain{name}")
    for number in range(2):  # the second image was sampled by the other process
        file = f"samples/eval-00000/{number:04d}.png"
        two, one = ((tmp_path / run / file).read_bytes() for run in ("kept", "plain"))
        assert two == one
