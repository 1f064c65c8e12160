"""Files that a run depends on: a power cut leaves them whole, and none is read without a limit."""

import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """On the disk, whole, when this returns; until then the file is as it was. Several processes
    may write it at once."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk, whichever process wrote them. What other
    machines wrote over NFS reached the server when they closed it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # a folder that we may not list, or on a network file system that syncs none
        if not path.is_dir() or error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):
            raise


def sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)


def publish(partial: Path, final: Path) -> None:
    """Give a folder its name once all that is in it is on the disk."""
    sync_all(partial)
    partial.rename(final)
    sync(final.parent)


def make_folders(folder: Path) -> list[Path]:
    """Those that were not there, the outermost first."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)
    return missing


def read_json(path: Path, most: int = 1 << 24) -> Any:
    """A ValueError where it is damaged in whatever way, or has more than `most` bytes."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most} bytes")
    if not content.strip(b"\0"):
        raise ValueError(f"{path.name} is empty")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON that we wrote: {error}") from error
