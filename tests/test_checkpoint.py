import pytest
import torch

from flow_grpo.checkpoint import list_checkpoints, save_checkpoint
from flow_grpo.ema import Ema


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
    weight = torch.nn.Parameter(torch.zeros(1))
    ema = Ema([weight], decay=0.9, every=2)
    for step in range(1, 41):
        weight.data.fill_(float(step))
        ema.update(step)
    with ema.applied():
        inside = weight.item()
    assert weight.item() == 40
    assert 20 < inside < 40
