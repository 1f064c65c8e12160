"""One writer for a run folder, also where several machines share the disk.

The lock is a file beside the folder that says who holds it. It is made with O_EXCL, which is
atomic on NFS too, where flock may be missing or local to a machine. A killed run leaves it behind.
On the same machine, since it was booted, its process is looked for. Of any other only a sign of
life can tell: the file's time, which the holder renews.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from flow_grpo import disk
from flow_grpo.errors import UserError
from flow_grpo.run.plan import lock_of

log = logging.getLogger(__name__)

HEARTBEAT = 15.0  # seconds between two signs of life
PATIENCE = 90.0  # seconds without one after which a holder that cannot be seen counts as dead
RETRY = 5.0  # seconds for which a lock that cannot be read is read again
MOST = 4096  # bytes of a lock: names are short
PROC = Path("/proc")


@dataclass(frozen=True)
class Holder:
    host: str
    pid: int
    started: float  # when the process did, see `_started`: numbers of processes come again
    namespace: str  # numbers of processes mean something within one only, a container's say
    boot: str = ""  # tells machines of one name apart; older locks lack it
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def this_process(cls) -> "Holder":
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _started(pid), _namespace(), _boot())

    def can_be_seen(self) -> bool:
        here = (socket.gethostname(), _namespace(), _boot())
        return (self.host, self.namespace, self.boot) == here

    def is_alive(self) -> bool | None:
        """Whether the process that wrote the lock still runs; None if another may have its
        number."""
        try:
            if psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE:
                return False  # killed, its parent has yet to notice
            return True if _started(self.pid) == self.started else None
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:  # somebody else's
            return True
        except (TypeError, ValueError, OverflowError):  # no number of a process
            return None

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """Holds the run in `folder`, which need not exist yet, until `release`."""

    def __init__(self, folder: Path, *, heartbeat: float = HEARTBEAT, patience: float = PATIENCE):
        folder = folder.resolve()
        self.folder = folder
        self.path = lock_of(folder)
        self.patience = patience
        self.holder = Holder.this_process()
        self._made = disk.make_folders(folder.parent)
        self._released = threading.Event()
        try:
            while not (self._create() or self._take_over()):
                pass  # it changed hands while we looked
        except BaseException:
            self._remove_made()
            raise
        self._heart = threading.Thread(target=self._show_life, args=(heartbeat,), daemon=True)
        self._heart.start()

    def check(self) -> None:
        """Before something is written: a process that hung may have been taken for dead."""
        until = time.monotonic() + min(RETRY, self.patience)
        while (holder := _read(self.path)) is None and time.monotonic() < until:
            time.sleep(0.1)  # the disk may be away for a moment
        if holder is None:
            try:
                made = self._create()
            except OSError as error:
                raise UserError(f"cannot write {self.path}: {error.strerror}") from error
            if made:
                log.warning("%s was removed; made it again", self.path)
                return
        holder = holder or _read(self.path)  # somebody may have been quicker
        if holder != self.holder:
            name = holder or f"a process that {self.path} does not name"
            raise UserError(f"{self.folder} was taken over by {name}")

    def release(self) -> None:
        """Give the folder back. Where it was never made, what the lock itself needed goes too."""
        if not self._released.is_set():
            self._released.set()
            self._heart.join(RETRY)  # it may hang in a disk that is away
            if _read(self.path) == self.holder:
                try:
                    self.path.unlink(missing_ok=True)
                except OSError as error:  # the disk became read-only; this process ends anyway
                    log.warning("cannot remove %s: %s", self.path, error.strerror)
            self._remove_made()

    def _create(self) -> bool:
        try:
            file = self.path.open("x", encoding="utf-8")  # O_EXCL
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self.holder.dumps())
        except OSError:  # the disk is full
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _take_over(self) -> bool:
        """From a holder that is dead; one that lives is named."""
        try:
            if not stat.S_ISREG(self.path.lstat().st_mode):
                raise UserError(
                    f"cannot lock {self.folder}: {self.path} is a link, a folder or the like where "
                    "a file belongs; remove it"
                )
        except FileNotFoundError:
            return False
        holder = _read(self.path)
        alive = holder.is_alive() if holder is not None and holder.can_be_seen() else None
        if alive is None:  # on another machine, about to be written, or perhaps another process
            alive = self._shows_life(holder)
        if alive:
            raise UserError(
                f"{self.folder} is in use by {holder or 'another process'}; wait for its end, "
                f"choose another run_name, or remove {self.path} if you are sure it is gone"
            )
        try:
            with self.path.open("r+", encoding="utf-8") as file:
                # of several who find it dead, one; on NFS without locks almost surely
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                if _read(self.path) != holder or not os.path.samestat(
                    os.fstat(file.fileno()), self.path.stat()
                ):
                    return False
                file.truncate()
                file.write(self.holder.dumps())
        except FileNotFoundError:
            return False
        log.warning("took over from %s, which is gone", holder or "an unknown process")
        return True

    def _shows_life(self, holder: Holder | None) -> bool:
        """Whether the file changes while we look at it; clocks of machines need not agree."""
        # one that names nobody is about to be written, or was not to the end: the power failed
        patience = self.patience if holder else min(RETRY, self.patience)
        first, until = _last_sign(self.path), time.monotonic() + patience
        name = holder or f"{self.path}, which names nobody"
        log.warning("%s is locked by %s; waiting for a sign of life", self.folder, name)
        while _read(self.path) == holder and time.monotonic() < until:
            if _last_sign(self.path) not in (first, None):
                return True
            time.sleep(min(1.0, patience / 10))
        return False

    def _show_life(self, every: float) -> None:
        while not self._released.wait(every):
            with contextlib.suppress(OSError):
                if _read(self.path) == self.holder:
                    os.utime(self.path)

    def _remove_made(self) -> None:
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # it is in use
                folder.rmdir()


def find_writer(folder: Path, patience: float = 2 * HEARTBEAT) -> Holder | None:
    """Return the process that currently writes to the run in `folder`; None if there is none, or
    if it was killed and left its lock behind.

    A process on another machine is detected by its heartbeat, for which this waits up to
    `patience` seconds.
    """
    path = lock_of(folder.resolve())
    holder = _read(path)
    if holder is None:
        return None
    if holder.can_be_seen() and (alive := holder.is_alive()) is not None:
        return holder if alive else None
    first, until = _last_sign(path), time.monotonic() + patience
    while time.monotonic() < until and _read(path) == holder:
        if _last_sign(path) not in (first, None):
            return holder
        time.sleep(min(1.0, patience / 10))
    return None


def _read(path: Path) -> Holder | None:
    """None: there is none, it is being written, or it is damaged."""
    try:
        return Holder(**disk.read_json(path, MOST))
    except (OSError, ValueError, TypeError):
        return None


def _last_sign(path: Path) -> int | None:
    try:
        with path.open("rb") as file:  # opened, NFS asks the server
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot() -> str:
    """Another on each machine and after each start of it."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _started(pid: int) -> float:
    """In clock ticks since the boot; setting the clock moves the time that psutil gives."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:  # no Linux
        return psutil.Process(pid).create_time()
    return int(stat.rpartition(b")")[2].split()[19])  # the name before it may hold anything
