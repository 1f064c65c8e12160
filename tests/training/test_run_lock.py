"""A run directory has one writer; other processes and a fake host simulate a cluster."""

import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
from user_errors import raises_user_error

from flow_grpo.errors import UserError
from flow_grpo.training import lock as lock_module
from flow_grpo.training.lock import LockHolder, RunLock, find_writer

HOLD = """
import sys, time
from pathlib import Path
from flow_grpo.training.lock import RunLock
RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "logs" / "run"


@pytest.fixture
def lock_file(folder):
    folder.parent.mkdir()
    return folder.parent / ".run.lock"


def test_the_lock_exists_while_held_and_leaves_nothing_behind(folder):
    lock = RunLock(folder)
    held = json.loads((folder.parent / ".run.lock").read_text())
    assert (held["host"], held["pid"]) == (socket.gethostname(), os.getpid())
    lock.check()
    lock.release()
    lock.release()
    assert not folder.parent.exists()  # the run ended before it wrote anything


def test_other_files_next_to_the_lock_stay(folder):
    lock = RunLock(folder)
    (folder.parent / "other").touch()
    lock.release()
    assert [p.name for p in folder.parent.iterdir()] == ["other"]


def test_a_live_holder_is_named_and_a_killed_one_is_replaced(folder, caplog):
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        name = f"process {process.pid} on {socket.gethostname()}"
        with raises_user_error(name, field=str(folder)):
            RunLock(folder)
    finally:
        process.send_signal(signal.SIGKILL)
    # not yet reaped: it is a zombie, as under a launcher that has not noticed
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    RunLock(folder).release()
    assert name in caplog.text
    process.wait()


def test_a_process_cannot_take_its_own_lock_twice(folder):
    lock = RunLock(folder)
    with raises_user_error(f"process {os.getpid()} on"):
        RunLock(folder)
    lock.release()
    RunLock(folder).release()


def test_setting_the_clock_does_not_make_a_holder_look_dead(folder, monkeypatch):
    lock = RunLock(folder, heartbeat=600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 1e9)
    with raises_user_error(f"process {os.getpid()} on"):
        RunLock(folder, patience=0.2)
    lock.release()


def test_without_procfs_a_changed_clock_does_not_cost_the_lock(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(lock_module, "PROC_DIR", tmp_path / "no")
    lock = RunLock(folder, heartbeat=0.01)
    for _ in range(2):
        with raises_user_error(f"process {os.getpid()} on"):
            RunLock(folder)
        monkeypatch.setattr(psutil.Process, "create_time", lambda _: 1e9)
    lock.release()


@pytest.mark.parametrize("content", ["elsewhere", "container", "same name", "number", "old", ""])
def test_a_holder_that_cannot_be_looked_up_needs_a_heartbeat(folder, lock_file, content):
    mine = LockHolder.this_process()
    holder = {
        "elsewhere": replace(mine, host="node-b"),
        "container": replace(mine, namespace="pid:[1]"),
        "same name": replace(mine, boot="that of another machine"),
        "number": replace(mine, started=mine.started - 1000),  # the PID may have been reused
        "old": mine,
    }.get(content)
    text = holder.dumps() if holder else ""
    if content == "old":
        text = json.dumps({k: v for k, v in json.loads(text).items() if k != "boot"})
    lock_file.write_text(text)
    RunLock(folder, patience=0.2).release()  # there is none

    lock_file.write_text(text)
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while not stop.wait(0.01):
            number += 1
            os.utime(lock_file, ns=(number, number))

    thread = threading.Thread(target=beat)
    thread.start()
    name = f"process {mine.pid} on {holder.host}" if holder else "another process"
    try:
        with raises_user_error(name, lock_file, field=str(folder)):
            RunLock(folder, patience=60)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("content", ["", "\0" * 300, "[" * 4000, "[" * 100_000, '{"host": "a"}'])
def test_a_lock_left_empty_or_damaged_by_a_power_cut_is_soon_taken_over(
    folder, lock_file, monkeypatch, caplog, content
):
    """Within seconds of a simulated clock, not after the 90 seconds of `patience`."""
    now = [0.0]
    monkeypatch.setattr(lock_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lock_module.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    lock_file.write_text(content)
    RunLock(folder).release()
    assert now[0] <= 6
    assert [str(lock_file) in message for message in caplog.messages] == [True, False]


@pytest.mark.parametrize("pid", ["1", -1, 10**30, None, [1], 1e300])
def test_a_lock_with_an_invalid_pid_is_taken_over(folder, lock_file, pid):
    lock_file.write_text(replace(LockHolder.this_process(), pid=pid).dumps())
    RunLock(folder, patience=0.2).release()


def test_a_huge_lock_file_is_not_read_completely(folder, lock_file):
    with lock_file.open("w") as file:
        file.truncate(1 << 40)
    RunLock(folder, patience=0.2).release()


@pytest.mark.parametrize("kind", ["dangling link", "link", "folder", "pipe"])
def test_a_lock_path_that_is_no_regular_file_is_rejected(folder, lock_file, kind):
    """A dangling link can be neither created nor opened."""
    if kind == "folder":
        lock_file.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock_file)
    else:
        lock_file.symlink_to("elsewhere")
        if kind == "link":
            (lock_file.parent / "elsewhere").touch()
    with raises_user_error(field=str(lock_file)):
        RunLock(folder)


def test_the_holder_sends_heartbeats(folder):
    lock = RunLock(folder, heartbeat=0.01)
    os.utime(lock.path, ns=(1, 1))
    changed = threading.Event()
    for _ in range(1000):
        if lock.path.stat().st_mtime_ns != 1:
            changed.set()
            break
        threading.Event().wait(0.01)
    assert changed.is_set()
    lock.release()


def test_a_writer_on_another_machine_is_found_by_its_heartbeat(folder, lock_file):
    assert find_writer(folder) is None
    lock = RunLock(folder, heartbeat=0.02)
    elsewhere = replace(lock.holder, host="node-b")
    lock.holder = elsewhere  # its heartbeat continues
    lock_file.write_text(elsewhere.dumps())
    assert find_writer(folder) == elsewhere
    lock._released.set()
    lock._heartbeat_thread.join()
    assert find_writer(folder, patience=0.1) is None
    lock_file.unlink()


def test_a_holder_that_was_replaced_stops_writing(folder, lock_file):
    lock = RunLock(folder)
    other = replace(LockHolder.this_process(), host="node-b")
    lock_file.write_text(other.dumps())
    with raises_user_error(other, field=str(folder)):
        lock.check()
    lock.release()
    assert lock_file.exists()  # it belongs to the other process


def test_a_removed_lock_is_created_again(folder, caplog):
    lock = RunLock(folder, patience=0.2)
    lock.path.unlink()
    lock.check()
    assert str(lock.path) in caplog.text
    assert json.loads(lock.path.read_text())["token"] == lock.holder.token
    lock.release()


def test_a_disk_that_is_briefly_unavailable_does_not_end_the_run(folder, monkeypatch):
    monkeypatch.setattr(lock_module, "RETRY_SECONDS", 60.0)
    lock = RunLock(folder)
    away = lock.path.with_name("away")
    lock.path.rename(away)
    lock.path.mkdir()  # cannot be read, and is not created again

    def back() -> None:
        lock.path.rmdir()
        away.rename(lock.path)

    timer = threading.Timer(0.2, back)
    timer.start()
    lock.check()
    timer.join()
    lock.release()


def test_an_unreadable_lock_counts_as_taken_over(folder):
    lock = RunLock(folder, patience=0.2)
    lock.path.write_text("")
    with raises_user_error(lock.path, field=str(folder)):
        lock.check()
    lock.release()


@contextmanager
def limit(what: int, value: int):
    before = resource.getrlimit(what)
    resource.setrlimit(what, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_an_unopenable_lock_stays_and_a_half_written_one_is_removed(folder):
    lock = RunLock(folder)
    with limit(resource.RLIMIT_NOFILE, 0), pytest.raises(OSError, match="Too many open files"):
        lock._create()
    assert lock.path.exists()  # it could belong to another process
    lock.release()
    with limit(resource.RLIMIT_FSIZE, 10), pytest.raises(OSError, match="File too large"):
        RunLock(folder)
    assert not folder.parent.exists()


def take(folder, patience, barrier, results) -> None:
    barrier.wait()
    try:
        lock = RunLock(folder, patience=patience)
        results.put(True)
        barrier.wait()
        lock.release()
    except UserError:
        results.put(False)
        barrier.wait()


@pytest.mark.parametrize("stale", ["", "killed", "silent"])
def test_one_of_many_concurrent_processes_gets_the_lock(folder, lock_file, stale):
    if stale == "killed":
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        lock_file.write_text(replace(LockHolder.this_process(), pid=process.pid).dumps())
    elif stale == "silent":
        lock_file.write_text(replace(LockHolder.this_process(), host="node-b").dumps())
    many = multiprocessing.get_context("spawn")
    barrier, results = many.Barrier(8), many.Queue()
    args = (folder, 1.0 if stale == "silent" else 90.0, barrier, results)
    processes = [many.Process(target=take, args=args) for _ in range(8)]
    for process in processes:
        process.start()
    taken = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(taken) == 1
    assert list(folder.parent.iterdir()) == []
