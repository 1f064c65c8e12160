"""Files that are whole, and where they should be; tests/test_power_cut.py cuts the power."""

import errno
import json

import pytest
from power import Disk

from flow_grpo.disk import make_folders, publish, read_json, sync, write_text


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk", mount=False)
    with disk.held, disk.watched():
        yield disk


def test_what_is_written_and_published_is_on_the_disk(disk):
    """The least that a power cut may leave, with all that is in a folder once it has its name."""
    inner = disk.folder / "a/b"
    assert make_folders(inner) == [disk.folder / "a", inner]
    assert make_folders(inner) == []
    with disk.left("lazy") as left:
        assert (left / "a/b").is_dir()
    write_text(disk.folder / "file", "\u00e9")
    (inner / "c").mkdir()
    for path in (inner / "one", inner / "c/two"):
        path.write_text("whole")
    publish(inner, disk.folder / "final")
    with disk.left("lazy") as left:
        assert (left / "file").read_bytes() == b"\xc3\xa9"
        assert [(left / "final" / name).read_text() for name in ("one", "c/two")] == ["whole"] * 2


def test_of_a_file_that_could_not_be_written_nothing_is_left(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_text(path, "before")
    monkeypatch.setattr("os.fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_text(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_synced_is_no_error_and_a_broken_disk_is(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    numbers = iter([errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EINVAL, errno.EIO])

    def fails(descriptor: int) -> None:
        raise OSError(next(numbers), "fails")

    monkeypatch.setattr("os.fsync", fails)
    for _ in range(3):
        sync(tmp_path)
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(OSError, match="fails"):
            sync(path)


def test_json_that_is_large_empty_or_broken_is_told(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1]")
    assert read_json(path, most=3) == [1]
    for content, message in [
        (b"[12]", "a.json has more than 3 bytes"),
        (b"", "a.json is empty"),
        (b"\0\0", "a.json is empty"),
        (b"[1", "a.json is no JSON that we wrote: Expecting"),
        (b"X", "a.json is no JSON that we wrote: Expecting"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{message}"):
            read_json(path, most=3)
    path.write_text(json.dumps("x" * (2**24 - 2)))
    assert len(read_json(path)) == 2**24 - 2
    with path.open("r+b") as file:  # takes no room on the disk, but in memory
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="has more than 16777216 bytes"):
        read_json(path)
