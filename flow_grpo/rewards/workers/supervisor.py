"""Run a worker such that no process it starts outlives it.

Rewards and environments may start processes: shells, servers, daemons in their own sessions.
Killing the worker or its process group would leave some of them running. The worker is therefore
forked from a supervisor that is the subreaper of its descendants (Linux reparents a process whose
parent dies to the nearest subreaper). When the worker exits, the pool requests it (`KILL_SIGNAL`)
or the trainer dies, the supervisor kills all descendants and exits with the worker's exit code.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
START_REPLY = -1  # number of the reply that reports whether the worker started
KILL_SIGNAL = signal.SIGUSR1  # SIGINT and SIGTERM reach whole process groups, and are ignored here


def supervise(descriptor: int, parent: int | None = None) -> None:
    """Fork a worker and supervise it: when it ends, kill its descendants and exit as it did.

    It returns in the child only, which is the worker. On systems other than Linux it does nothing.

    Args:
        descriptor: The worker's end of the pipe, which the supervisor must not keep open.
        parent: Process id of the trainer. If it has ended already, this process exits: the kernel
            reports only later deaths.
    """
    if not sys.platform.startswith("linux"):
        return
    waited_for = {KILL_SIGNAL, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_PDEATHSIG, KILL_SIGNAL)
    if parent is not None and os.getppid() != parent:
        os._exit(0)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        # kills the worker even while its engine never releases the interpreter lock
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(0)
        # a signal that the engine sends to its own process group must not reach the trainer
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)
        return
    os.close(descriptor)
    status = None
    while status is None and signal.sigwait(waited_for) != KILL_SIGNAL:
        status = _reap(worker)
    _kill_descendants()
    _exit_with_status(status)


def _reap(worker: int) -> int | None:
    """Collect exited children; return the worker's wait status if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
            if reaped[0] == worker:
                status = reaped[1]
    return status


def _kill_descendants() -> None:
    """Kill all descendants of this process and collect the children."""
    import psutil  # imported late: most workers live as long as the run

    me = psutil.Process()
    while descendants := me.children(recursive=True):
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)  # its children are reparented to this process before this returns


def _exit_with_status(status: int | None) -> None:
    """Exit with the exit code or the signal of a wait status."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.WEXITSTATUS(status))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
