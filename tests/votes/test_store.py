"""Durability of the logs: what was acknowledged is kept, whatever a power failure left behind."""

import os
import subprocess
import sys

import pytest
from user_errors import raises_user_error

from flow_grpo.votes.store import AppendLog, read_log, writer_lock

WHOLE = b'{"id": "1"}\n{"id": "2"}\n'


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        (b"", 2),
        (b'{"id": "3", "pro', 2),  # truncated
        (b'{"id": "3"', 2),
        (b"\0\0\0\0\0\0", 2),  # the size reached the disk before the data
        (b'{"id"\0\0\0\0\n', 2),
        (b'{"id": "\xc3', 2),  # half of a character
        (b'{"id": "3"}', 3),  # only the newline is missing
    ],
)
def test_a_damaged_last_line_is_repaired_without_losing_others(tmp_path, tail, kept):
    path = tmp_path / "votes.jsonl"
    path.write_bytes(WHOLE + tail)
    log = AppendLog(path)
    assert [each["id"] for each in read_log(path)] == ["1", "2", "3"][:kept]
    log.append({"id": "new"})
    log.close()
    assert [each["id"] for each in read_log(path)] == [*["1", "2", "3"][:kept], "new"]
    assert path.read_bytes().count(b"\n") == kept + 1


def test_a_damaged_line_in_the_middle_is_reported_and_kept(tmp_path):
    path = tmp_path / "votes.jsonl"
    path.write_bytes(b'{"id": "1"}\nnot json\n{"id": "2"}\n')
    with raises_user_error(field=f"{path}:2"):
        AppendLog(path)
    assert path.read_bytes().count(b"\n") == 3


def test_a_full_disk_leaves_the_log_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "votes.jsonl"
    log = AppendLog(path)
    log.append({"id": "1"})

    def fail(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="space"):
            log.append({"id": "2"})
    log.append({"id": "3"})
    assert [each["id"] for each in read_log(path)] == ["1", "3"]


def test_one_process_writes_a_directory(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom flow_grpo.votes.store import writer_lock\n"
        "with writer_lock(Path(sys.argv[1])):\n    print('locked', flush=True)\n    input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with raises_user_error(field="--out"), writer_lock(tmp_path):
            pass
        other.kill()
        other.wait()
        with writer_lock(tmp_path):  # the kernel has released it
            pass
