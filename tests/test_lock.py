"""One writer for a run folder; other processes and a made-up machine stand in for a cluster."""

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

from flow_grpo.errors import UserError
from flow_grpo.run import lock as lock_module
from flow_grpo.run.lock import Holder, RunLock, find_writer

HOLD = """
import sys, time
from pathlib import Path
from flow_grpo.run.lock import RunLock
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


def test_it_is_there_while_it_is_held_and_leaves_nothing(folder):
    lock = RunLock(folder)
    held = json.loads((folder.parent / ".run.lock").read_text())
    assert (held["host"], held["pid"]) == (socket.gethostname(), os.getpid())
    lock.check()
    lock.release()
    lock.release()
    assert not folder.parent.exists()  # of a run that ended before it wrote anything


def test_what_others_put_beside_it_stays(folder):
    lock = RunLock(folder)
    (folder.parent / "other").touch()
    lock.release()
    assert [p.name for p in folder.parent.iterdir()] == ["other"]


def test_a_holder_that_lives_is_named_and_one_that_was_killed_is_replaced(folder, caplog):
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        message = f"is in use by process {process.pid} on {socket.gethostname()}; wait for its end"
        with pytest.raises(UserError, match=message):
            RunLock(folder)
    finally:
        process.send_signal(signal.SIGKILL)
    # not yet waited for: it is a zombie, as under a launcher that has not noticed
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    RunLock(folder).release()
    assert f"took over from process {process.pid} on" in caplog.text
    process.wait()


def test_this_process_too_can_hold_it_once_only(folder):
    lock = RunLock(folder)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        RunLock(folder)
    lock.release()
    RunLock(folder).release()


def test_setting_the_clock_does_not_make_a_holder_look_dead(folder, monkeypatch):
    lock = RunLock(folder, heartbeat=600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 1e9)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        RunLock(folder, patience=0.2)
    lock.release()


def test_without_proc_too_it_is_held_and_a_set_clock_costs_it_nothing(
    folder, monkeypatch, tmp_path
):
    monkeypatch.setattr(lock_module, "PROC", tmp_path / "no")
    lock = RunLock(folder, heartbeat=0.01)
    for _ in range(2):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            RunLock(folder)
        monkeypatch.setattr(psutil.Process, "create_time", lambda _: 1e9)
    lock.release()


@pytest.mark.parametrize("content", ["elsewhere", "container", "same name", "number", "old", ""])
def test_a_holder_that_cannot_be_seen_needs_to_show_signs_of_life(folder, lock_file, content):
    mine = Holder.this_process()
    holder = {
        "elsewhere": replace(mine, host="node-b"),
        "container": replace(mine, namespace="pid:[1]"),
        "same name": replace(mine, boot="that of another machine"),
        "number": replace(mine, started=mine.started - 1000),  # another process may have it now
        "old": mine,
    }.get(content)
    text = holder.dumps() if holder else ""
    if content == "old":
        text = json.dumps({k: v for k, v in json.loads(text).items() if k != "boot"})
    lock_file.write_text(text)
    RunLock(folder, patience=0.2).release()  # it shows none

    lock_file.write_text(text)
    stop = threading.Event()

    def live() -> None:
        number = 0
        while not stop.wait(0.01):
            number += 1
            os.utime(lock_file, ns=(number, number))

    thread = threading.Thread(target=live)
    thread.start()
    name = f"process {mine.pid} on {holder.host}" if holder else "another process"
    try:
        with pytest.raises(UserError, match=f"is in use by {name}; .* remove {lock_file}"):
            RunLock(folder, patience=60)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("content", ["", "\0" * 300, "[" * 4000, "[" * 100_000, '{"host": "a"}'])
def test_a_lock_that_a_power_cut_left_empty_or_damaged_is_soon_taken_over(
    folder, lock_file, monkeypatch, caplog, content
):
    """`patience` would be 90 seconds, and time is made up here."""
    now = [0.0]
    monkeypatch.setattr(lock_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lock_module.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    lock_file.write_text(content)
    RunLock(folder).release()
    assert now[0] <= 6
    assert caplog.messages == [
        f"{folder} is locked by {lock_file}, which names nobody; waiting for a sign of life",
        "took over from an unknown process, which is gone",
    ]


@pytest.mark.parametrize("pid", ["1", -1, 10**30, None, [1], 1e300])
def test_a_lock_with_what_is_no_process_is_taken_over(folder, lock_file, pid):
    lock_file.write_text(replace(Holder.this_process(), pid=pid).dumps())
    RunLock(folder, patience=0.2).release()


def test_a_lock_of_any_size_is_not_read_to_its_end(folder, lock_file):
    with lock_file.open("w") as file:
        file.truncate(1 << 40)
    RunLock(folder, patience=0.2).release()


@pytest.mark.parametrize("kind", ["dangling link", "link", "folder", "pipe"])
def test_what_is_no_file_is_no_lock(folder, lock_file, kind):
    """A link that leads nowhere can neither be made anew nor be opened."""
    if kind == "folder":
        lock_file.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock_file)
    else:
        lock_file.symlink_to("elsewhere")
        if kind == "link":
            (lock_file.parent / "elsewhere").touch()
    with pytest.raises(UserError) as told:
        RunLock(folder)
    assert str(told.value) == (
        f"cannot lock {folder}: {lock_file} is a link, a folder or the like where a file belongs; "
        "remove it"
    )


def test_the_holder_shows_signs_of_life(folder):
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


def test_a_writer_on_another_machine_is_told_by_its_heartbeat(folder, lock_file):
    assert find_writer(folder) is None
    lock = RunLock(folder, heartbeat=0.02)
    elsewhere = replace(lock.holder, host="node-b")
    lock.holder = elsewhere  # its heart goes on
    lock_file.write_text(elsewhere.dumps())
    assert find_writer(folder) == elsewhere
    lock._released.set()
    lock._heart.join()
    assert find_writer(folder, patience=0.1) is None
    lock_file.unlink()


def test_a_holder_that_was_taken_for_dead_stops_writing(folder, lock_file):
    lock = RunLock(folder)
    other = replace(Holder.this_process(), host="node-b")
    lock_file.write_text(other.dumps())
    with pytest.raises(UserError, match=r"run was taken over by process \d+ on node-b"):
        lock.check()
    lock.release()
    assert lock_file.exists()  # the other's


def test_a_lock_that_was_removed_is_made_again(folder, caplog):
    lock = RunLock(folder, patience=0.2)
    lock.path.unlink()
    lock.check()
    assert "was removed; made it again" in caplog.text
    assert json.loads(lock.path.read_text())["token"] == lock.holder.token
    lock.release()


def test_a_disk_that_is_away_for_a_moment_does_not_end_the_run(folder, monkeypatch):
    monkeypatch.setattr(lock_module, "RETRY", 60.0)
    lock = RunLock(folder)
    away = lock.path.with_name("away")
    lock.path.rename(away)
    lock.path.mkdir()  # reading it is an error of the system, and it is not made again

    def back() -> None:
        lock.path.rmdir()
        away.rename(lock.path)

    timer = threading.Timer(0.2, back)
    timer.start()
    lock.check()
    timer.join()
    lock.release()


def test_a_lock_that_names_nobody_is_not_ours(folder):
    lock = RunLock(folder, patience=0.2)
    lock.path.write_text("")
    with pytest.raises(UserError, match=f"taken over by a process that {lock.path} does not name"):
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


def test_a_lock_that_cannot_be_opened_stays_and_one_half_written_does_not(folder):
    lock = RunLock(folder)
    with limit(resource.RLIMIT_NOFILE, 0), pytest.raises(OSError, match="Too many open files"):
        lock._create()
    assert lock.path.exists()  # it could be somebody else's
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
def test_of_many_at_once_one_gets_it(folder, lock_file, stale):
    if stale == "killed":
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        lock_file.write_text(replace(Holder.this_process(), pid=process.pid).dumps())
    elif stale == "silent":
        lock_file.write_text(replace(Holder.this_process(), host="node-b").dumps())
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
