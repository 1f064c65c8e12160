"""Atomic and durable file operations; test_power_loss.py simulates power failures."""

import errno
import json

import pytest
from simulated_disk import Disk

from flow_grpo.atomic_io import (
    fsync_and_rename,
    fsync_path,
    make_directories,
    read_json_limited,
    write_text_atomic,
)


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk", mount=False)
    with disk.resources, disk.recording():
        yield disk


def test_written_and_renamed_files_are_durable(disk):
    """They survive a power failure on a file system that keeps only what was synced."""
    inner = disk.folder / "a/b"
    assert make_directories(inner) == [disk.folder / "a", inner]
    assert make_directories(inner) == []
    with disk.after_power_loss("lazy") as copy:
        assert (copy / "a/b").is_dir()
    write_text_atomic(disk.folder / "file", "\u00e9")
    (inner / "c").mkdir()
    for path in (inner / "one", inner / "c/two"):
        path.write_text("whole")
    fsync_and_rename(inner, disk.folder / "final")
    with disk.after_power_loss("lazy") as copy:
        assert (copy / "file").read_bytes() == b"\xc3\xa9"
        assert [(copy / "final" / name).read_text() for name in ("one", "c/two")] == ["whole"] * 2


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text_atomic(path, "before")
    monkeypatch.setattr("os.fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_text_atomic(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_unsupported_directory_syncs_are_ignored_and_disk_errors_raised(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    numbers = iter([errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EINVAL, errno.EIO])

    def fails(descriptor: int) -> None:
        raise OSError(next(numbers), "fails")

    monkeypatch.setattr("os.fsync", fails)
    for _ in range(3):
        fsync_path(tmp_path)
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(OSError, match="fails"):
            fsync_path(path)


def test_json_that_is_large_empty_or_invalid_is_rejected(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1]")
    assert read_json_limited(path, max_bytes=3) == [1]
    for content, message in [
        (b"[12]", "3 bytes"),
        (b"", "empty"),
        (b"\0\0", "empty"),
        (b"[1", "Expecting"),
        (b"X", "Expecting"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^a\.json .*{message}"):
            read_json_limited(path, max_bytes=3)
    path.write_text(json.dumps("x" * (2**24 - 2)))
    assert len(read_json_limited(path)) == 2**24 - 2
    with path.open("r+b") as file:  # sparse on disk, but not in memory
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"a\.json .*16777216 bytes"):
        read_json_limited(path)
