"""The directory of a run while it trains: what happens when it can no longer be written."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from flow_grpo import disk
from flow_grpo.config.saved import CONFIG
from flow_grpo.errors import UserError
from flow_grpo.run import checkpoint, distributed, session
from flow_grpo.run.checkpoint import Progress, list_checkpoints, save_checkpoint
from flow_grpo.run.lock import RunLock
from flow_grpo.run.resume import Start, prepare_folder
from flow_grpo.run.stopping import StopSignals

FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints/.partial-checkpoint-2")


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def write(folder: Path) -> None:
    Progress(epoch=1, step=1).write(folder)


@pytest.fixture
def going(tmp_path, accelerator, monkeypatch):
    """A session as far as its directory is concerned."""
    monkeypatch.setattr(session, "RETRY", 0.0)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CONFIG).write_text("{}")
    reward = SimpleNamespace(
        weights={}, scorers={}, expect_no_more=lambda: None, end_threads=lambda: None
    )
    going = session.BaseSession(
        config=SimpleNamespace(num_epochs=1),
        accelerator=accelerator,
        reward=reward,
        eval_reward=reward,
        plan=SimpleNamespace(describe=lambda: ""),
        policy=None,
        optimizer=None,
        learning_rate=None,
        ema=None,
        folder=folder,
        progress=Progress(),
        stop=StopSignals(accelerator),
        lock=RunLock(folder),
    )
    yield going
    going.close()


def test_a_run_whose_directory_was_removed_does_not_finish(going):
    with pytest.raises(UserError, match=f"{going.folder} was removed"):
        session.carry_out(going, lambda _: shutil.rmtree(going.folder), [])


def test_a_run_whose_directory_is_there_finishes(going):
    session.carry_out(going, lambda _: None, [])


def test_a_directory_that_was_removed_is_not_made_again_by_what_is_written(going):
    shutil.rmtree(going.folder)
    with pytest.raises(UserError, match="was removed"):
        session.write_samples(going, "eval", 1, [None], prompt=["a"])
    root = going.folder / "checkpoints"
    with pytest.raises(UserError, match="cannot save"):
        save_checkpoint(going.accelerator, root, 1, write, keep=0)
    assert not going.folder.exists()


def not_main() -> SimpleNamespace:
    """The accelerator of another process than the first."""
    return SimpleNamespace(
        is_main_process=False, num_processes=2, trackers=[], wait_for_everyone=lambda: None
    )


def test_what_the_first_process_cannot_write_ends_all(going, monkeypatch):
    """Metrics and samples: the others would wait for it in the next epoch."""
    told = (UserError, "cannot write metrics.jsonl: Read-only file system")
    going.accelerator = not_main()
    answers = iter([[told], [None], [told]])  # log; the check of the folder, then samples
    monkeypatch.setattr(distributed, "gather_object", lambda _: next(answers))
    with pytest.raises(UserError, match="Read-only file system"):
        session.log(going, {"epoch": 1, "step": 1})
    with pytest.raises(UserError, match="Read-only file system"):
        session.write_samples(going, "eval", 1, [None], prompt=["a"])


@pytest.mark.parametrize("what", ["metrics.jsonl", "samples", "checkpoint-1"])
def test_a_log_folder_that_became_read_only_is_one_line(going, monkeypatch, what):
    writes = {
        "metrics.jsonl": lambda: session.log(going, {"epoch": 1, "step": 1}),
        "samples": lambda: session.write_samples(going, "eval", 1, [None], prompt=["a"]),
        "checkpoint-1": lambda: save_checkpoint(
            going.accelerator, going.folder / "checkpoints", 1, write, keep=0
        ),
    }
    opened = Path.open

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def read_only(path, mode="r", **kwargs):
        return opened(path, mode, **kwargs) if mode in ("r", "rb") else refuse()

    def train(_):
        for name, change in {"open": read_only, "mkdir": refuse, "unlink": refuse}.items():
            monkeypatch.setattr(Path, name, change)
        writes[what]()

    with pytest.raises(UserError, match=f"{what}.*: .*Read-only file system"):
        session.carry_out(going, train, [])
    monkeypatch.undo()
    going.lock.path.unlink()


def test_no_inode_for_a_checkpoint_is_one_line(accelerator, tmp_path, monkeypatch):
    root = tmp_path / "checkpoints"
    save_checkpoint(accelerator, root, 1, write, keep=0)

    mkdir = Path.mkdir

    def refuse(path, *args, **kwargs):
        if ".partial" in str(path):
            raise FULL_DISK
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"checkpoint-2: .*No space left.*checkpoint-1 is intact"):
        save_checkpoint(accelerator, root, 2, write, keep=0)
    assert [p.name for p in list_checkpoints(root)] == ["checkpoint-1"]


def test_a_file_in_the_place_of_the_checkpoints_is_one_line(accelerator, tmp_path):
    root = tmp_path / "checkpoints"
    root.touch()
    with pytest.raises(UserError, match=f"cannot save {root}/checkpoint-1: .*File exists"):
        save_checkpoint(accelerator, root, 1, write, keep=0)
    assert root.is_file()


def test_a_folder_that_the_first_process_cannot_make_ends_all(tmp_path, monkeypatch):
    """The others are told before they write, and do not wait at a barrier."""
    answers = iter([[False], [str(FULL_DISK)], [str(FULL_DISK)], ["checkpoint-1 is intact"]])
    monkeypatch.setattr(checkpoint, "gather_object", lambda _: next(answers))
    written = []
    with pytest.raises(UserError, match="No space left"):
        save_checkpoint(not_main(), tmp_path, 2, written.append, keep=0)
    assert not written
    assert next(answers, None) is None


def test_a_full_disk_leaves_no_empty_run_directory(tmp_path, monkeypatch):
    """It would be in the way when the same command is given again."""

    def refuse(path, text):
        raise FULL_DISK

    folder = tmp_path / "logs/run"
    monkeypatch.setattr(disk, "write_text", refuse)
    with pytest.raises(UserError, match=f"cannot write to {folder}: No space left"):
        prepare_folder(Start(folder, None, is_new=True), {"dataset": "dataset/ocr"})
    assert not folder.exists()
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 0}))
    with pytest.raises(UserError, match="No space left"):
        prepare_folder(Start(folder, None, is_new=False), {"dataset": "dataset/ocr"})
    assert (folder / "metrics.jsonl").exists()
