"""One writer for a run folder; other processes and a made-up machine stand in for a cluster."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from flow_grpo.errors import UserError
from flow_grpo.lock import Holder, RunLock

HOLD = """
import sys, time
from pathlib import Path
from flow_grpo.lock import RunLock
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


def test_a_number_that_another_process_has_now_does_not_count(folder, lock_file, caplog):
    mine = Holder.this_process()
    lock_file.write_text(replace(mine, started=mine.started - 1000).dumps())
    RunLock(folder).release()
    assert "took over" in caplog.text


@pytest.mark.parametrize("content", ["elsewhere", "container", ""])
def test_a_holder_that_cannot_be_seen_needs_to_show_signs_of_life(folder, lock_file, content):
    mine = Holder.this_process()
    holder = {
        "elsewhere": replace(mine, host="node-b"),
        "container": replace(mine, namespace="pid:[1]"),
    }.get(content)
    lock_file.write_text(holder.dumps() if holder else "")
    RunLock(folder, patience=0.2).release()  # it shows none

    lock_file.write_text(holder.dumps() if holder else "")
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


def test_a_holder_that_was_taken_for_dead_stops_writing(folder, lock_file):
    lock = RunLock(folder)
    other = replace(Holder.this_process(), host="node-b")
    lock_file.write_text(other.dumps())
    with pytest.raises(UserError, match=r"run was taken over by process \d+ on node-b"):
        lock.check()
    lock.release()
    assert lock_file.exists()  # the other's


def take(folder, barrier, results) -> None:
    barrier.wait()
    try:
        lock = RunLock(folder)
        results.put(True)
        barrier.wait()
        lock.release()
    except UserError:
        results.put(False)
        barrier.wait()


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_at_once_one_gets_it(folder, lock_file, stale):
    if stale:
        mine = Holder.this_process()
        lock_file.write_text(replace(mine, started=0.0).dumps())
    many = multiprocessing.get_context("spawn")
    barrier, results = many.Barrier(8), many.Queue()
    processes = [many.Process(target=take, args=(folder, barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    taken = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(taken) == 1
    assert list(folder.parent.iterdir()) == []
