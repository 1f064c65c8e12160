"""A simulated disk that reconstructs its state after a power loss.

The state depends on the file system:

lazy   only what was synced, the minimum that POSIX guarantees
hasty  names immediately, contents once synced, which is how ext4 leaves empty files
image  what a real ext4 has written, if it can be mounted
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# system calls that change names or sync data
CALLS = ("fsync", "rename", "replace", "symlink", "unlink", "rmdir")
Entry = tuple[str, os.stat_result, str]  # name, status, target of a symbolic link or ""


class Disk:
    """Directory whose synced contents are recorded; with `mount` on an ext4 image."""

    def __init__(self, folder: Path, *, mount: bool) -> None:
        self.folder = folder
        self.resources = ExitStack()  # open files and the mount, released by its `close`
        self.contents: dict[int, bytes] = {}  # synced contents of files, by inode
        self.names: dict[int, list[Entry]] = {}  # synced entries of directories, by inode
        folder.mkdir()
        self.image = folder.with_suffix(".ext4")
        if mount:
            with self.image.open("wb") as file:
                file.truncate(16 << 20)
            run("mkfs.ext4", "-q", self.image)
            self.resources.enter_context(mounted(self.image, folder))

    @contextmanager
    def recording(self, look: Callable[[str], None] | None = None) -> Iterator[None]:
        """Record synced data, and pass the name of each finished call to `look`.

        Calls that `look` makes itself are not reported.
        """
        real = {name: getattr(os, name) for name in CALLS}
        is_looking = False

        def wrap(name: str) -> Callable:
            def call(*args, **kwargs):
                nonlocal is_looking
                real[name](*args, **kwargs)
                if not is_looking:
                    is_looking = True
                    try:
                        if name == "fsync":
                            self._remember(*args)
                        if look is not None:
                            look(name)
                    finally:
                        is_looking = False

            return call

        try:
            for name in CALLS:
                setattr(os, name, wrap(name))
            yield
        finally:
            for name in CALLS:
                setattr(os, name, real[name])

    @contextmanager
    def after_power_loss(self, way: str) -> Iterator[Path]:
        """Yield a copy of the directory as a power loss would leave it now."""
        with tempfile.TemporaryDirectory() as temporary:
            target_folder = Path(temporary) / "disk"
            if way != "image":
                self._rebuild(way, self.folder, self.folder.stat().st_ino, target_folder)
                yield target_folder
                return
            target_folder.mkdir()
            shutil.copyfile(self.image, target_folder.with_suffix(".ext4"))
            with mounted(target_folder.with_suffix(".ext4"), target_folder):
                yield target_folder

    def _remember(self, descriptor: int) -> None:
        file = os.dup(descriptor)
        self.resources.callback(os.close, file)  # an open inode is not reused for another file
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
def mounted(image: Path, target_folder: Path) -> Iterator[None]:
    # a long commit interval makes the copy consistent: by default the kernel commits every 5 s
    run("mount", "-o", "loop,commit=600", image, target_folder)
    try:
        yield
    finally:
        run("umount", target_folder)


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


def can_mount() -> bool:
    """Return whether an image can be mounted; most containers and some machines do not allow it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            Disk(Path(folder) / "disk", mount=True).resources.close()
        except (OSError, subprocess.CalledProcessError):
            return False
    return True
