"""A disk that tells what a power cut would leave of it, in the ways in which disks differ:

lazy   what was synced and nothing else, the least that POSIX allows
hasty  names at once, contents when they are synced: where ext4 leaves empty files
image  what an ext4 has really written, where we may mount one
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# whatever changes names, or brings something to the disk
CALLS = ("fsync", "rename", "replace", "symlink", "unlink", "rmdir")
Entry = tuple[str, os.stat_result, str]  # name, what it is, where it points if it is a link


class Disk:
    def __init__(self, folder: Path, *, mount: bool) -> None:
        self.folder = folder
        self.held = ExitStack()  # to be closed at the end
        self.contents: dict[int, bytes] = {}  # of what was synced, by inode
        self.names: dict[int, list[Entry]] = {}
        folder.mkdir()
        self.image = folder.with_suffix(".ext4")
        if mount:
            with self.image.open("wb") as file:
                file.truncate(16 << 20)
            run("mkfs.ext4", "-q", self.image)
            self.held.enter_context(mounted(self.image, folder))

    @contextmanager
    def watched(self, look: Callable[[str], None] | None = None) -> Iterator[None]:
        """`look` is told the name of each call that has returned, but not of its own."""
        real, looking = {name: getattr(os, name) for name in CALLS}, False

        def telling(name: str) -> Callable:
            def call(*args, **kwargs):
                nonlocal looking
                real[name](*args, **kwargs)
                if not looking:
                    looking = True
                    try:
                        if name == "fsync":
                            self._remember(*args)
                        if look is not None:
                            look(name)
                    finally:
                        looking = False

            return call

        try:
            for name in CALLS:
                setattr(os, name, telling(name))
            yield
        finally:
            for name in CALLS:
                setattr(os, name, real[name])

    @contextmanager
    def left(self, way: str) -> Iterator[Path]:
        """The folder as a power cut would leave it now."""
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary) / "disk"
            if way != "image":
                self._rebuild(way, self.folder, self.folder.stat().st_ino, place)
                yield place
                return
            place.mkdir()
            shutil.copyfile(self.image, place.with_suffix(".ext4"))
            with mounted(place.with_suffix(".ext4"), place):
                yield place

    def _remember(self, descriptor: int) -> None:
        file = os.dup(descriptor)
        self.held.callback(os.close, file)  # an inode that is open is not given to another file
        found = os.fstat(file)
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = list_entries(Path(f"/proc/self/fd/{file}").readlink())
        else:
            self.contents[found.st_ino] = os.pread(file, found.st_size, 0)

    def _rebuild(self, way: str, source: Path, inode: int, target: Path) -> None:
        target.mkdir()
        entries = list_entries(source) if way == "hasty" else self.names.get(inode, [])
        for name, found, link in entries:
            if link:
                (target / name).symlink_to(link)
            elif stat.S_ISDIR(found.st_mode):
                self._rebuild(way, source / name, found.st_ino, target / name)
            else:
                (target / name).write_bytes(self.contents.get(found.st_ino, b""))


def list_entries(folder: Path) -> list[Entry]:
    paths = sorted(folder.iterdir())
    return [(p.name, p.lstat(), str(p.readlink()) if p.is_symlink() else "") for p in paths]


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[None]:
    # without the kernel's own commits every few seconds a copy is of one moment
    run("mount", "-o", "loop,commit=600", image, place)
    try:
        yield
    finally:
        run("umount", place)


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


def can_mount() -> bool:
    """Root may not in most containers, and not every machine has loop devices."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            Disk(Path(folder) / "disk", mount=True).held.close()
        except (OSError, subprocess.CalledProcessError):
            return False
    return True
