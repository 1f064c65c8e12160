"""Write checkpoints atomically, in the background, and remove superseded ones.

Problem: writing, hashing and flushing a checkpoint takes seconds, in which nothing is trained. But
a run that is killed, loses power or fills the disk meanwhile must keep the previous checkpoint.

Invariants:

- A directory named `checkpoint-<step>` was written completely: it is written to
  `.partial-checkpoint-<step>`, every file is flushed to disk (fsync), and only then is the
  directory renamed, which is atomic. An older checkpoint is removed only after a newer one has its
  final name.
- At most one checkpoint is being written. A new one waits until the previous one is complete.
- An error in the background ends the run at the next save, or at the end of training.

The loop waits only while the state is copied (`state_copies.py`). After that, a single thread of
the main process writes the copies, checks that the run still owns its directory, hashes and flushes
all files, renames the directory, updates the links and removes old checkpoints. The thread does
not communicate with other processes: files that these write are complete before it starts.

Trade-off: a run that is killed while a checkpoint is written loses that epoch too.
"""

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from flow_grpo import atomic_io
from flow_grpo.errors import UserError, first_line
from flow_grpo.training.checkpoint import (
    BEST,
    CHECKPOINT_PREFIX,
    LATEST,
    MANIFEST_FILE,
    STATE_DIR,
    Progress,
    describe_latest_intact,
    dump_json,
    file_checksum,
    is_intact,
    list_checkpoints,
    step_of,
    update_link,
)
from flow_grpo.training.distributed import call_on_main

log = logging.getLogger(__name__)

MIN_FREE_BYTES = 2**20  # a disk with less free space counts as full
Write = Callable[[], None]


class BackgroundWriter:
    """Runs one task at a time in a thread and keeps its error until `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self.seconds = 0.0  # duration of the last task that has ended

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, task: Callable[[], str | None]) -> None:
        """Run `task`, which returns an error message or None; `wait` has been called before."""

        def run() -> None:
            start = time.perf_counter()
            self._problem = task()
            self.seconds = time.perf_counter() - start

        # A daemon, as a process that ends without `wait` should not hang on an unavailable disk.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the task has ended."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> str | None:
        """Wait until the task has ended and return its error message, once."""
        self.join()
        problem, self._problem = self._problem, None
        return problem


def save_checkpoint(
    accelerator: Accelerator,
    root: Path,
    step: int,
    write: Callable[[Path], Write | None],
    *,
    keep: int,
    best: bool = False,
    writer: BackgroundWriter | None = None,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint atomically and update the links `latest` and `best`.

    Call it on all processes. An error on any of them is raised on all.

    Args:
        root: The `checkpoints` directory of the run.
        step: Optimizer step, the number in the checkpoint's name.
        write: Called on all processes with a temporary directory to write to. It may return a
            function that writes further files there from copies of the state; the main process
            calls that of its own.
        keep: Number of most recent checkpoints to keep, 0 for all. Those that `latest` and `best`
            point to always stay.
        best: Whether `best` points to this checkpoint afterwards.
        writer: Completes the checkpoint in the background, after the previous one. Without it, the
            checkpoint is complete when this function returns.
        check: Raises a UserError if the run directory may no longer be written to.

    Returns:
        The directory of the checkpoint. If an intact one exists for `step`, nothing is written.

    Raises:
        UserError: If this checkpoint or the previous one of `writer` could not be written.
    """
    name = f"{CHECKPOINT_PREFIX}{step}"
    final, partial = root / name, root / f".partial-{name}"
    own_writer = writer or BackgroundWriter()

    def prepare() -> tuple[bool, str | None]:
        """Return whether the checkpoint exists, and why it cannot be written if it does not."""
        if problem := own_writer.wait():
            return False, problem
        if is_intact(final):
            return True, None
        return False, _try_and_describe(lambda: _create_partial(partial), final)

    remaining: list[Write | None] = []
    # Each failure is shared before any process continues, so that no process waits for another.
    exists, problem = call_on_main(accelerator, prepare)
    if exists:
        return final
    if problem is None:
        problem = _try_and_describe(lambda: remaining.append(write(partial)), final)
        problem = next(filter(None, gather_object([problem])), None)
    if problem is not None:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        raise _saving_error(accelerator, root, problem)
    if accelerator.is_main_process:
        [rest] = remaining
        own_writer.start(lambda: _complete(partial, final, rest, check, best=best, keep=keep))
    if writer is None:
        finish_checkpoint(accelerator, root, own_writer)
    return final


def finish_checkpoint(accelerator: Accelerator, root: Path, writer: BackgroundWriter) -> None:
    """Wait until the last checkpoint of `writer` is complete. Call it on all processes.

    Raises:
        UserError: If it could not be written.
    """
    if problem := call_on_main(accelerator, writer.wait):
        raise _saving_error(accelerator, root, problem)


def _saving_error(accelerator: Accelerator, root: Path, problem: str) -> UserError:
    return UserError(problem, hint=describe_latest_intact(accelerator, root))


def _complete(
    partial: Path,
    final: Path,
    write: Write | None,
    check: Callable[[], None],
    *,
    best: bool,
    keep: int,
) -> str | None:
    """Write the remaining files, publish the checkpoint and remove superseded ones.

    Returns:
        Why the checkpoint could not be written, or None.
    """

    def complete() -> None:
        if write is not None:
            write()
        check()
        _publish(partial, final, best)
        _remove_superseded(final.parent, step_of(final), keep)

    problem = _try_and_describe(complete, final)
    if problem is not None:
        shutil.rmtree(partial, ignore_errors=True)
    return problem


def _try_and_describe(call: Callable[[], None], final: Path) -> str | None:
    """Return why `final` cannot be saved, or None if `call` succeeds; mention a full disk."""
    try:
        call()
    except Exception as error:  # not every library reports a full disk as such
        log.debug("saving failed", exc_info=True)
        reason = first_line(error)
        full = os.strerror(errno.ENOSPC)
        if full not in reason and _is_full(final.parent):
            reason = f"{full} ({reason})"
        return f"cannot save {final}: {reason}"
    return None


def _is_full(root: Path) -> bool:
    """Return whether the disk of `root` has less than `MIN_FREE_BYTES` available."""
    try:
        return shutil.disk_usage(root).free < MIN_FREE_BYTES
    except OSError:  # the directory was removed
        return False


def _create_partial(partial: Path) -> None:
    """Create an empty directory to write to.

    The run directory itself is not recreated: if it was removed, so were its config and metrics.
    """
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(exist_ok=True)
    (partial / STATE_DIR).mkdir(parents=True)


def _publish(partial: Path, final: Path, best: bool) -> None:
    """Write the manifest, give the checkpoint its final name and update the links."""
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    manifest = {
        str(path.relative_to(partial)): [path.stat().st_size, file_checksum(path)] for path in files
    }
    atomic_io.write_text_atomic(partial / STATE_DIR / MANIFEST_FILE, dump_json(manifest))
    atomic_io.fsync_tree(partial)  # before it gets the name of a complete checkpoint
    damaged = final.with_name(f".damaged-{final.name}")
    if final.exists() or final.is_symlink():
        _remove(damaged)
        final.rename(damaged)
    partial.rename(final)
    atomic_io.fsync_path(final.parent)
    atomic_io.fsync_path(final.parents[1])  # the directory entry of checkpoints/
    for link in (LATEST, BEST) if best else (LATEST,):
        update_link(final.parent / link, final.name)
    _remove(damaged)  # now that its replacement is in place


def _remove(path: Path) -> None:
    """Remove a directory, or a link to one; warn if that fails."""
    try:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error.strerror or error)


def _remove_superseded(root: Path, step: int, keep: int) -> None:
    """Remove old checkpoints, except the last `keep` and those that `latest` and `best` point to.

    Checkpoints with `Progress.kept` False do not count as one of the last `keep`, and are removed
    unless linked. Checkpoints after `step`, which exist if a run fell back, stay.
    """
    checkpoints = [p for p in list_checkpoints(root) if step_of(p) <= step]
    linked = {(root / link).resolve() for link in (LATEST, BEST)}
    kept = [p for p in checkpoints if _is_kept(p)]
    stay = {p.resolve() for p in (kept[-keep:] if keep else kept)} | linked
    for folder in checkpoints:
        if folder.resolve() not in stay:
            _remove(folder)


def _is_kept(checkpoint: Path) -> bool:
    """Return `Progress.kept` of a checkpoint, or True if its progress cannot be read."""
    try:
        return Progress.read(checkpoint).kept
    except (OSError, ValueError, TypeError):
        return True  # its state is damaged, but its weights may be intact
