import json

import pytest
import torch
from accelerate import Accelerator

from flow_grpo.checkpoint import (
    STATE,
    Progress,
    is_intact,
    list_checkpoints,
    newest_intact,
    save_checkpoint,
    weights_in,
)
from flow_grpo.ema import Ema
from flow_grpo.errors import UserError


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def save(accelerator, tmp_path):
    def save(step, keep=0, kept=True, best=False, fails=False):
        def write(folder):
            (folder / "weights").write_text(f"of {step}")
            Progress(epoch=step, step=step, kept=kept).write(folder)
            if fails:
                raise OSError(28, "No space left on device")

        return save_checkpoint(accelerator, tmp_path, step, write, keep=keep, best=best)

    return save


def names(root):
    return [p.name for p in list_checkpoints(root)]


def test_the_newest_are_kept_by_number_not_by_name(save, tmp_path):
    for step in (9, 10, 99, 100):
        save(step, keep=2)
    assert names(tmp_path) == ["checkpoint-99", "checkpoint-100"]
    assert (tmp_path / "latest" / "weights").read_text() == "of 100"


def test_zero_keeps_all(save, tmp_path):
    for step in range(5):
        save(step)
    assert len(names(tmp_path)) == 5


def test_the_best_stays(save, tmp_path):
    for step in range(5):
        save(step, keep=1, best=step == 1)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-4"]
    assert (tmp_path / "best" / "weights").read_text() == "of 1"


def test_what_is_only_there_to_resume_from_goes_with_the_next(save, tmp_path):
    for step in range(6):
        save(step, keep=2, kept=step % 2 == 0)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_a_failed_save_leaves_no_checkpoint_and_no_loss(save, tmp_path):
    save(1, keep=1)
    message = "cannot save .*checkpoint-2: .*No space left on device; .*checkpoint-1 is intact"
    with pytest.raises(UserError, match=message):
        save(2, keep=1, fails=True)
    assert names(tmp_path) == ["checkpoint-1"]
    assert not list(tmp_path.glob(".partial*"))
    save(2, keep=1)
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "broken manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_replaced(save, tmp_path, caplog, damage):
    save(1)
    newest = save(2)
    if damage == "truncated":
        (newest / "weights").write_text("of")
    elif damage == "missing":
        (newest / "weights").unlink()
    elif damage == "no manifest":
        (newest / STATE / "files.json").unlink()
    else:
        (newest / STATE / "files.json").write_text('{"weights"')
    assert newest_intact(tmp_path).name == "checkpoint-1"
    assert "checkpoint-2 is incomplete or damaged" in caplog.text
    save(2)
    assert newest_intact(tmp_path) == newest


def test_a_checkpoint_that_is_there_is_not_written_again(save):
    folder = save(3)
    assert save(3, fails=True) == folder
    assert is_intact(folder)
    assert json.loads((folder / STATE / "files.json").read_text())["weights"] == 4


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
