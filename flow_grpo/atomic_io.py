"""Durable file operations: files survive a power failure intact, and reads are bounded."""

import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file atomically and durably; several processes may write it concurrently."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Replace a file with bytes; see `write_text_atomic`."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content)
        fsync_path(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flush a file or a directory's entries to disk, whichever process wrote them.

    What other machines wrote over NFS reached the server when they closed it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some directories cannot be synced: without read permission, or on a network file system.
        if not path.is_dir() or error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):
            raise


def fsync_tree(folder: Path) -> None:
    """Flush a directory and everything in it to disk."""
    for path in (*folder.rglob("*"), folder):
        fsync_path(path)


def fsync_and_rename(partial: Path, final: Path) -> None:
    """Rename a directory once its content is on disk."""
    fsync_tree(partial)
    partial.rename(final)
    fsync_path(final.parent)


def check_output_folder(folder: Path, field: str, value: Path) -> None:
    """Raise a UserError if files cannot be written to a folder, which may not exist yet.

    Args:
        folder: The folder; it is not created.
        field: Option that names it or a file in it.
        value: Value of the option.
    """
    folder = folder.absolute()
    existing = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot be written because of {existing}",
            field=field,
            value=str(value),
            hint="choose another path",
        )


def make_directories(folder: Path) -> list[Path]:
    """Create a directory durably and return those that were missing, outermost first."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    for created in missing:
        fsync_path(created.parent)
    return missing


def read_json_limited(path: Path, max_bytes: int = 1 << 24) -> Any:
    """Read a JSON file; raise ValueError if it is damaged or has more than `max_bytes` bytes."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes} bytes")
    if not content.strip(b"\0"):
        raise ValueError(f"{path.name} is empty")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
