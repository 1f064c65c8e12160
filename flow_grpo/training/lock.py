"""Exclusive lock on a run directory, also on a file system shared by several machines.

Problem: two processes that write to one run directory corrupt its metrics and checkpoints. `flock`
cannot prevent that: on NFS it may be missing, or be local to one machine.

Invariant: of all processes that follow this protocol, at most one believes that it may write. It
calls `check` before each write, because a process that hangs for too long may lose its lock.

File: `<logdir>/.<run_name>.lock` is created with O_EXCL, which is atomic on NFS too, and contains
its `LockHolder` as JSON. A killed run leaves the file behind, so a later run has to find out
whether the holder is still alive:

- Same machine, boot and PID namespace: look up the process.
- Otherwise: watch the file's modification time, which the holder renews every `HEARTBEAT_SECONDS`,
  for up to `STALE_SECONDS`. Only a change counts, as the clocks of machines may disagree.

Trade-off: no server and no lock daemon is needed, but restarting a run that was killed on another
machine takes `STALE_SECONDS` longer, and without `flock` two processes that replace a dead holder
at the same moment could both succeed, until the slower one calls `check`.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from flow_grpo import atomic_io
from flow_grpo.errors import UserError
from flow_grpo.training.plan import lock_path

log = logging.getLogger(__name__)
Result = TypeVar("Result")

HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 90.0  # a holder without a heartbeat for this long counts as dead
RETRY_SECONDS = 5.0  # how long reading an unreadable file is retried
MAX_LOCK_BYTES = 4096
PROC_DIR = Path("/proc")


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock; the content of the lock file."""

    host: str
    pid: int
    started: float  # `_process_start_time`, because PIDs are reused
    namespace: str  # PIDs are unique within a PID namespace only (containers)
    boot: str = ""  # distinguishes machines with the same host name; missing in old lock files
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def this_process(cls) -> "LockHolder":
        host, namespace, boot = _machine_ids()
        return cls(host, os.getpid(), _process_start_time(os.getpid()), namespace, boot)

    def is_alive(self) -> bool | None:
        """Return whether the holder still runs; None if only its heartbeat can show it."""
        if (self.host, self.namespace, self.boot) != _machine_ids():
            return None
        try:
            if psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE:
                return False  # killed, but not yet reaped by its parent
            return True if _process_start_time(self.pid) == self.started else None
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:  # owned by another user
            return True
        except (TypeError, ValueError, OverflowError):  # not a PID
            return None

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """Exclusive lock on a run directory, held from construction until `release`.

    Args:
        folder: Run directory; it does not have to exist yet.
        heartbeat: Seconds between two heartbeats.
        patience: Seconds without a heartbeat after which another holder counts as dead.
        option: Option that names the directory, for messages.

    Raises:
        UserError: If another process holds the lock.
    """

    def __init__(
        self,
        folder: Path,
        *,
        heartbeat: float = HEARTBEAT_SECONDS,
        patience: float = STALE_SECONDS,
        option: str = "run_name",
    ):
        self.folder, self.option = folder.resolve(), option
        self.path = lock_path(self.folder)
        self.patience = patience
        self.holder = LockHolder.this_process()
        self._created_folders = atomic_io.make_directories(self.folder.parent)
        self._released = threading.Event()
        try:
            while not (self._create() or self._take_over()):
                pass  # the lock changed hands in between
        except BaseException:
            self._remove_created_folders()
            raise
        self._heartbeat_thread = threading.Thread(
            target=self._send_heartbeats, args=(heartbeat,), daemon=True
        )
        self._heartbeat_thread.start()

    def check(self) -> None:
        """Raise a UserError if another process took over the lock. Call it before each write."""
        holder = retry(lambda: _read_holder(self.path), min(RETRY_SECONDS, self.patience))
        if holder is None:
            try:
                if self._create():
                    log.warning("%s was removed; created it again", self.path)
                    return
            except OSError as error:
                raise UserError(f"cannot write {self.path}: {error.strerror}") from error
            holder = _read_holder(self.path)  # another process may have been faster
        if holder != self.holder:
            raise UserError(
                f"is now locked by {_describe(holder, self.path)}; this run stops, because a run "
                "directory has a single writer",
                field=self.folder,
            )

    def release(self) -> None:
        """Remove the lock, and directories created for it that are still empty. Idempotent."""
        if self._released.is_set():
            return
        self._released.set()
        self._heartbeat_thread.join(RETRY_SECONDS)  # it may hang on an unavailable disk
        if _read_holder(self.path) == self.holder:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:  # the disk became read-only; this process ends anyway
                log.warning("cannot remove %s: %s", self.path, error.strerror)
        self._remove_created_folders()

    def _create(self) -> bool:
        """Create the lock file; return False if it exists."""
        try:
            file = self.path.open("x", encoding="utf-8")  # O_EXCL
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self.holder.dumps())
        except OSError:  # disk full
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _take_over(self) -> bool:
        """Replace a dead holder; return False if the lock changed meanwhile.

        Raises:
            UserError: If the holder is alive, or the lock is not a regular file.
        """
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(mode):
            raise UserError(
                "must be a regular file", field=self.path, hint="remove it to unlock the run"
            )
        holder = _read_holder(self.path)
        # an unreadable lock is about to be written, or was cut off by a power failure
        patience = self.patience if holder else min(RETRY_SECONDS, self.patience)
        if _is_alive(self.path, holder, patience):
            raise UserError(
                f"is in use by {holder or 'another process'}",
                field=self.folder,
                hint=f"wait until it ends, choose another {self.option}, or remove "
                f"{self.path} if that process no longer exists",
            )
        try:
            with self.path.open("r+", encoding="utf-8") as file:
                # of several processes that replace the same dead holder, the first one wins
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                if _read_holder(self.path) != holder or not os.path.samestat(
                    os.fstat(file.fileno()), self.path.stat()
                ):
                    return False
                file.truncate()
                file.write(self.holder.dumps())
        except FileNotFoundError:
            return False
        log.warning("took over from %s, which is no longer running", holder or "an unknown process")
        return True

    def _send_heartbeats(self, every: float) -> None:
        """Update the lock file's modification time every `every` seconds until release."""
        while not self._released.wait(every):
            with contextlib.suppress(OSError):
                if _read_holder(self.path) == self.holder:
                    os.utime(self.path)

    def _remove_created_folders(self) -> None:
        for folder in reversed(self._created_folders):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def lock_output(out: Path) -> RunLock:
    """Lock the output directory of a command; raise a UserError if it cannot be written."""
    try:
        return RunLock(out, option="--out")
    except OSError as error:
        raise UserError(
            f"cannot be created: {error.strerror}", field="--out", value=str(out)
        ) from error


def find_writer(folder: Path, patience: float = 2 * HEARTBEAT_SECONDS) -> LockHolder | None:
    """Return the live process that writes to the run in `folder`, or None.

    For a process on another machine this waits up to `patience` seconds for a heartbeat.
    """
    path = lock_path(folder.resolve())
    holder = _read_holder(path)
    return holder if holder is not None and _is_alive(path, holder, patience) else None


def retry(read: Callable[[], Result], seconds: float) -> Result:
    """Return `read()`, repeated for up to `seconds` while it is false or None.

    A network disk may be unavailable for a moment.
    """
    deadline = time.monotonic() + seconds
    while not (result := read()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return result


def _is_alive(path: Path, holder: LockHolder | None, patience: float) -> bool:
    """Return whether the holder of a lock runs, or renews it within `patience` seconds."""
    alive = holder.is_alive() if holder is not None else None
    if alive is not None:
        return alive
    log.warning("%s is held by %s; waiting for its heartbeat", path, _describe(holder, path))
    first, deadline = _last_heartbeat(path), time.monotonic() + patience
    while _read_holder(path) == holder and time.monotonic() < deadline:
        if _last_heartbeat(path) not in (first, None):
            return True
        time.sleep(min(1.0, patience / 10))
    return False


def _describe(holder: LockHolder | None, path: Path) -> str:
    return str(holder or f"an unknown process ({path} is not readable)")


def _read_holder(path: Path) -> LockHolder | None:
    """Return the holder; None if the file is missing, being written or damaged."""
    try:
        return LockHolder(**atomic_io.read_json_limited(path, MAX_LOCK_BYTES))
    except (OSError, ValueError, TypeError):
        return None


def _last_heartbeat(path: Path) -> int | None:
    """Return the lock file's modification time in nanoseconds, or None if it cannot be read."""
    try:
        with path.open("rb") as file:  # opening it makes NFS revalidate its cache
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _machine_ids() -> tuple[str, str, str]:
    """Return host name, PID namespace and boot id, the last two "" where there are none."""
    namespace = boot = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        boot = (PROC_DIR / "sys/kernel/random/boot_id").read_text("ascii").strip()
    return socket.gethostname(), namespace, boot


def _process_start_time(pid: int) -> float:
    """Return clock ticks since boot; psutil's time would move when the clock is set."""
    try:
        content = (PROC_DIR / str(pid) / "stat").read_bytes()
    except OSError:  # not Linux
        return psutil.Process(pid).create_time()
    return int(content.rpartition(b")")[2].split()[19])  # the command name may contain spaces
