"""Two real processes."""

import sys

import numpy as np
import pytest
from safetensors.torch import load_file

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")


@pytest.mark.slow
def test_two_processes_of_four_equal_one_of_eight(train):
    settings = {
        "num_epochs": 2,
        "device": "cpu",
        "log_images": 3,
        "sample__test_batch_size": 3,
    }
    one = train(run_name="one", sample__train_batch_size=8, train__batch_size=8, **settings)
    two = train(run_name="two", launcher=TORCHRUN, **settings)
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("epoch 2/2") == 1  # one process speaks
    assert "16 = 4 per batch x 2 batches x 2 processes" in two.stdout

    for a, b in zip(train.metrics("one"), train.metrics("two"), strict=True):
        for name in a:
            if name.startswith(("reward/", "eval/", "epoch", "step")):
                assert a[name] == pytest.approx(b[name], abs=1e-6), name
            if name in ("train/loss", "train/kl", "train/grad_norm"):
                assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-7), name
    name = "checkpoints/checkpoint-4/{}/pytorch_lora_weights.safetensors"
    for weights in ("lora", "ema_lora"):
        first, second = (
            load_file(train.logdir / run / name.format(weights)) for run in ("one", "two")
        )
        assert first.keys() == second.keys()
        off = [np.abs(first[k].numpy() - second[k].numpy()).max() for k in first]
        assert max(off) <= 1e-6
    assert len(list((train.logdir / "two/samples/eval-00002").glob("*.png"))) == 3


def test_a_mistake_is_told_once(train):
    done = train(launcher=TORCHRUN, dataset="no/such/folder")
    assert done.returncode != 0
    assert done.stderr.count("error: no dataset at no/such/folder") == 1
