"""Append-only JSONL files that survive a kill or a power failure, and the lock of their writer.

A record is acknowledged only after `fsync`, and the next one is written only after that. Hence a
crash can damage the last line only, and that line was never acknowledged: it is repaired on open,
by completing its newline if the JSON is whole and by truncating it otherwise.
"""

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flow_grpo.atomic_io import fsync_path, make_directories
from flow_grpo.errors import UserError, first_line
from flow_grpo.untrusted_files import parse_json

logger = logging.getLogger("flow_grpo")
LOCK_FILE = ".lock"

Record = dict[str, Any]


class AppendLog:
    """A JSONL file that only grows; one process writes it, from any of its threads.

    Args:
        path: The file; created if missing. A damaged last line is repaired.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _repair(path)
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._file).st_size
        os.fsync(self._file)
        fsync_path(path.parent)

    def append(self, record: Record) -> None:
        """Write a record to disk; on return it survives a power failure.

        Raises:
            OSError: If the disk is full or fails; the file is then as before.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        data = memoryview(line.encode("utf-8"))
        with self._lock:
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._file, data[written:])
                os.fsync(self._file)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._size)
                raise
            self._size += len(data)

    def close(self) -> None:
        os.close(self._file)


def read_log(path: Path) -> list[Record]:
    """Return the complete records of a log without changing the file."""
    return [record for record, _ in _parse_lines(path)]


def _repair(path: Path) -> None:
    """Remove or complete a damaged last line."""
    if not path.exists():
        return
    end = max((end for _, end in _parse_lines(path)), default=0)
    size = path.stat().st_size
    if end == size + 1:  # only the newline is missing
        with path.open("ab") as file:
            file.write(b"\n")
    elif end < size:
        logger.warning("%s: removed an incomplete last line of %d bytes", path.name, size - end)
        with path.open("r+b") as file:
            file.truncate(end)


def _parse_lines(path: Path) -> Iterator[tuple[Record, int]]:
    """Yield each record and the offset after its newline; the damaged last line is left out."""
    data, start = path.read_bytes(), 0
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        end = start + len(line) + 1
        try:
            record = parse_json(line, "the line")
            if not isinstance(record, dict):
                raise UserError("is not a JSON object")
        except (UserError, ValueError) as error:
            if number == len(lines):
                return
            raise UserError(
                f"is damaged ({first_line(error)[:120]})",
                field=f"{path}:{number}",
                hint="restore the file from a copy, or correct this line",
            ) from error
        yield record, end
        start = end


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a directory, which the kernel releases even if the process is killed.

    Raises:
        UserError: If another process holds it.
    """
    make_directories(folder)
    file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                "is in use by another vote server",
                field="--out",
                value=str(folder),
                hint="stop that server or choose another directory",
            ) from error
        yield
    finally:
        os.close(file)
