"""Two real processes."""

import sys

import numpy as np
import pytest
from safetensors.torch import load_file

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")


@pytest.mark.slow
@pytest.mark.parametrize("slices", [1, 2])
def test_two_processes_of_four_equal_one_of_eight(train, slices):
    """Also when training works on slices of the sampling batches."""
    settings = {
        "num_epochs": 2,
        "device": "cpu",
        "log_images": 3,
        "sample__test_batch_size": 3,
        "train__gradient_accumulation_steps": slices,
    }
    one = train(
        run_name="one", sample__train_batch_size=8, train__batch_size=8 // slices, **settings
    )
    two = train(run_name="two", launcher=TORCHRUN, train__batch_size=4 // slices, **settings)
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("epoch 2/2") == 1  # one process speaks
    assert "16 = 4 per batch x 2 batches x 2 processes" in two.stdout
    assert "Warning" not in two.stderr

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


def test_a_mistake_of_all_is_told_once(train):
    done = train(launcher=TORCHRUN, dataset="no/such/folder")
    assert done.returncode != 0
    assert done.stderr.count("no dataset at no/such/folder") == 1


def test_a_mistake_of_one_process_is_told_too(train, tmp_path, monkeypatch):
    (tmp_path / "second_fails.py").write_text(
        "import os\n"
        "def score(images, prompts, metadata):\n"
        "    return [1.0] * (len(images) - int(os.environ['RANK']))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    custom = "{'second': 'second_fails:score'}"
    done = train(launcher=TORCHRUN, reward_fn="{'second': 1.0}", custom_rewards=custom)
    assert done.returncode != 0
    assert "error (process 1): reward 'second' returned scores of shape (3,)" in done.stderr
