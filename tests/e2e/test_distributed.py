"""Runs of scripts/train.py in two processes."""

import json

import numpy as np
import pytest
import torch
from brightness_reward import CONSTANT_FOR_SOME_GROUPS
from PIL import Image
from runner import torchrun
from safetensors.torch import load_file


def relative_distance(lora: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the distance of two LoRAs relative to what was learned (B is initialized to zero)."""
    assert lora.keys() == other.keys()
    moved = torch.stack([lora[k].norm() for k in lora if "lora_B" in k]).norm()
    return float(torch.stack([(lora[k] - other[k]).norm() for k in lora]).norm() / moved)


@pytest.mark.slow
def test_two_processes_with_batch_four_equal_one_with_batch_eight(train):
    """Training batches are slices of the sampling batches, and some samples are skipped.

    The runs are in float32, so weights agree up to a fraction of what was learned.
    test_float64_equivalence.py and test_algorithm_invariants.py compare weights in float64.
    """
    settings = {
        **CONSTANT_FOR_SOME_GROUPS,
        "num_epochs": 2,
        "device": "cpu",
        "log_images": 3,
        "sample__test_batch_size": 3,
        "train__gradient_accumulation_steps": 2,
        "train__ema_update_interval": 1,
    }
    one = train(run_name="one", sample__train_batch_size=8, train__batch_size=4, **settings)
    two = train(run_name="two", launcher=torchrun(), train__batch_size=2, **settings)
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("epoch 2/2") == 1  # only the main process logs
    assert "16 = 4 per batch x 2 batches x 2 processes" in two.stdout
    assert "Warning" not in two.stderr

    for a, b in zip(train.metrics("one"), train.metrics("two"), strict=True):
        for name in a:
            if name.startswith(("reward/", "eval/", "epoch", "step")):
                assert a[name] == pytest.approx(b[name], abs=1e-4), name
            if name in ("train/loss", "train/kl", "train/grad_norm"):
                assert a[name] == pytest.approx(b[name], rel=1e-2, abs=1e-6), name
    name = "checkpoints/checkpoint-4/{}/pytorch_lora_weights.safetensors"
    for weights in ("lora", "ema_lora"):
        first, second = (
            load_file(train.logdir / run / name.format(weights)) for run in ("one", "two")
        )
        assert relative_distance(first, second) < 1e-2
    # training samples are those of the main process, evaluation samples are the same in both runs
    folders = [train.logdir / run / "samples/eval-00002" for run in ("one", "two")]
    tables = [[json.loads(line) for line in (f / "samples.jsonl").open()] for f in folders]
    assert len(tables[0]) == 3
    for a, b in zip(*tables, strict=True):
        assert a["prompt"] == b["prompt"]
        assert a["avg"] == pytest.approx(b["avg"], abs=1e-5)
        images = [np.asarray(Image.open(f / a["file"])).astype(int) for f in folders]
        assert np.abs(images[0] - images[1]).max() <= 1  # a rounding difference
