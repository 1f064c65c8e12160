import pytest
import torch

from flow_grpo.checkpoint import list_checkpoints, save_checkpoint, weights_in
from flow_grpo.ema import Ema
from flow_grpo.errors import UserError


def write(folder):
    (folder / "weights").write_text("x")


def names(root):
    return [p.name for p in list_checkpoints(root)]


def test_the_newest_are_kept_by_number_not_by_name(tmp_path):
    for step in (9, 10, 100, 99):
        save_checkpoint(tmp_path, step, write, keep=2)
    assert names(tmp_path) == ["checkpoint-99", "checkpoint-100"]


def test_zero_keeps_all(tmp_path):
    for step in range(5):
        save_checkpoint(tmp_path, step, write, keep=0)
    assert len(names(tmp_path)) == 5


def test_a_failed_save_leaves_no_checkpoint_and_no_loss(tmp_path):
    save_checkpoint(tmp_path, 1, write, keep=1)

    def broken(folder):
        write(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 2, broken, keep=1)
    assert names(tmp_path) == ["checkpoint-1"]
    save_checkpoint(tmp_path, 2, write, keep=1)
    assert names(tmp_path) == ["checkpoint-2"]
    assert not list(tmp_path.glob(".partial*"))


def test_the_average_follows_and_steps_aside():
    """Decay min(.9, (1 + n)/(10 + n)) at the n-th update, after a first one that copies."""
    weight = torch.nn.Parameter(torch.zeros(1))
    ema = Ema([weight], decay=0.9, every=2)
    expected, n = 0.0, -1
    for step in range(1, 41):
        weight.data.fill_(float(step))
        ema.update(step)
        if step % 2 == 0:
            n += 1
            decay = min(0.9, (1 + n) / (10 + n)) if n > 0 else 0.0
            expected = decay * expected + (1 - decay) * step
    with ema.applied():
        inside = weight.item()
    assert inside == pytest.approx(expected, rel=1e-5)
    assert weight.item() == 40


def test_weights_are_found_in_runs_checkpoints_and_folders(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10"):
        for kind in ("lora", "ema_lora"):
            folder = tmp_path / "checkpoints" / name / kind
            folder.mkdir(parents=True)
            (folder / "weights.safetensors").touch()
    newest = tmp_path / "checkpoints" / "checkpoint-10"
    assert weights_in(tmp_path) == weights_in(newest) == newest / "ema_lora"
    assert weights_in(newest / "lora") == newest / "lora"
    with pytest.raises(UserError, match="no checkpoint at"):
        weights_in(tmp_path / "checkpoints")
