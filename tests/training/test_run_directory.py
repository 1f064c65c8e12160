"""The directory of a run while it trains: what happens when it can no longer be written."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from user_errors import raises_user_error

from flow_grpo import atomic_io
from flow_grpo.config.saved_config import CONFIG_FILE
from flow_grpo.errors import UserError
from flow_grpo.training import distributed, session
from flow_grpo.training.checkpoint import Progress, list_checkpoints
from flow_grpo.training.checkpoint_writer import save_checkpoint
from flow_grpo.training.lock import RunLock
from flow_grpo.training.resume import RunStart, prepare_run_directory
from flow_grpo.training.stop_signals import StopSignals

FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints/.partial-checkpoint-2")


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def write(folder: Path) -> None:
    Progress(epoch=1, step=1).write(folder)


@pytest.fixture
def running(tmp_path, accelerator, monkeypatch):
    """A session reduced to its run directory."""
    monkeypatch.setattr(session, "RETRY_SECONDS", 0.0)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text("{}")
    reward = SimpleNamespace(
        weights={}, scorers={}, silence_errors=lambda: None, close_threads=lambda: None
    )
    running = session.BaseSession(
        config=SimpleNamespace(num_epochs=1, seed=0),
        accelerator=accelerator,
        reward=reward,
        eval_reward=reward,
        plan=SimpleNamespace(describe=lambda: "", context_parallel=1),
        policy=None,
        optimizer=None,
        learning_rate=None,
        ema=None,
        folder=folder,
        progress=Progress(),
        stop=StopSignals(accelerator),
        lock=RunLock(folder),
    )
    yield running
    running.close()


def test_a_run_whose_directory_was_removed_does_not_finish(running):
    with raises_user_error(field=str(running.folder)):
        session.run_training(running, lambda _: shutil.rmtree(running.folder), [])


def test_a_run_whose_directory_exists_finishes(running):
    session.run_training(running, lambda _: None, [])


def test_metrics_are_read_once_and_not_in_every_epoch(running, monkeypatch, caplog):
    """A resumed run has rows already; checks see those of all epochs."""
    (running.folder / "metrics.jsonl").write_text('{"epoch": 1, "step": 1, "train/kl": 0.1}\n')
    calls, read = [], session.read_metrics
    monkeypatch.setattr(session, "read_metrics", lambda x: calls.append(x) or read(x))
    for epoch, kl in ((2, 0.2), (3, None), (4, 9.0)):
        session.log(running, {"epoch": epoch, "step": epoch, "train/kl": kl})
    assert calls == [running.folder]
    assert running.records == read(running.folder)
    assert [row["epoch"] for row in running.records] == [1, 2, 3, 4]
    assert [r.getMessage()[:16] for r in caplog.records if "health" in r.msg] == [
        "health, epoch 4:"
    ]


def test_a_removed_directory_is_not_created_again_by_writing(running):
    shutil.rmtree(running.folder)
    with raises_user_error(field=str(running.folder)):
        session.write_samples(running, "eval", 1, [None], prompt=["a"])
    root = running.folder / "checkpoints"
    with raises_user_error(root / "checkpoint-1"):
        save_checkpoint(running.accelerator, root, 1, write, keep=0)
    assert not running.folder.exists()


def not_main() -> SimpleNamespace:
    """Return the accelerator of a process that is not the main one."""
    return SimpleNamespace(
        is_main_process=False, num_processes=2, trackers=[], wait_for_everyone=lambda: None
    )


def test_a_write_error_of_the_main_process_is_raised_on_all_ranks(running, monkeypatch):
    """Otherwise the others would wait for it in the next epoch."""
    error = (UserError, "cannot write metrics.jsonl: Read-only file system")
    running.accelerator = not_main()
    gathered = iter([[error], [None], [error]])  # log; the check of the directory, then samples
    monkeypatch.setattr(distributed, "gather_object", lambda _: next(gathered))
    with raises_user_error("Read-only file system"):
        session.log(running, {"epoch": 1, "step": 1})
    with raises_user_error("Read-only file system"):
        session.log(running, {"epoch": 1, "step": 1})
        session.write_samples(running, "eval", 1, [None], prompt=["a"])


@pytest.mark.parametrize("what", ["metrics.jsonl", "samples", "checkpoint-1"])
def test_a_run_directory_that_became_read_only_is_a_one_line_error(running, monkeypatch, what):
    writes = {
        "metrics.jsonl": lambda: session.log(running, {"epoch": 1, "step": 1}),
        "samples": lambda: session.write_samples(running, "eval", 1, [None], prompt=["a"]),
        "checkpoint-1": lambda: save_checkpoint(
            running.accelerator, running.folder / "checkpoints", 1, write, keep=0
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

    with raises_user_error(what, "Read-only file system"):
        session.run_training(running, train, [])
    monkeypatch.undo()
    running.lock.path.unlink()


def test_a_disk_without_free_inodes_is_a_one_line_error(accelerator, tmp_path, monkeypatch):
    root = tmp_path / "checkpoints"
    save_checkpoint(accelerator, root, 1, write, keep=0)

    mkdir = Path.mkdir

    def refuse(path, *args, **kwargs):
        if ".partial" in str(path):
            raise FULL_DISK
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with raises_user_error("checkpoint-2", "No space left", root / "checkpoint-1"):
        save_checkpoint(accelerator, root, 2, write, keep=0)
    assert [p.name for p in list_checkpoints(root)] == ["checkpoint-1"]


def test_a_file_named_checkpoints_is_reported_in_one_line(accelerator, tmp_path):
    root = tmp_path / "checkpoints"
    root.touch()
    with raises_user_error(root / "checkpoint-1", "File exists"):
        save_checkpoint(accelerator, root, 1, write, keep=0)
    assert root.is_file()


def test_an_error_creating_the_directory_is_raised_on_all_ranks(tmp_path, monkeypatch):
    """The other processes receive the error before they write, instead of waiting at a barrier."""
    gathered = iter([[(False, str(FULL_DISK))], ["checkpoint-1"]])
    monkeypatch.setattr("flow_grpo.training.distributed.gather_object", lambda _: next(gathered))
    written = []
    with raises_user_error("No space left"):
        save_checkpoint(not_main(), tmp_path, 2, written.append, keep=0)
    assert not written
    assert next(gathered, None) is None


def test_a_full_disk_leaves_no_empty_run_directory(tmp_path, monkeypatch):
    """It would block repeating the same command."""

    def refuse(path, text):
        raise FULL_DISK

    folder = tmp_path / "logs/run"
    monkeypatch.setattr(atomic_io, "write_text_atomic", refuse)
    with raises_user_error(folder, "No space left"):
        prepare_run_directory(RunStart(folder, None, is_new=True), {"dataset": "dataset/ocr"})
    assert not folder.exists()
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 0}))
    with raises_user_error("No space left"):
        prepare_run_directory(RunStart(folder, None, is_new=False), {"dataset": "dataset/ocr"})
    assert (folder / "metrics.jsonl").exists()
