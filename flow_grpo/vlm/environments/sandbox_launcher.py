"""Run untrusted Python code in an isolated process on Linux, without root privileges.

`python_sandbox.py` executes this file as a script with a plain interpreter; it imports nothing from
this package. There are three layers of protection, listed from outside to inside:

1. New user, mount, PID, network, IPC and UTS namespaces. The root directory becomes a small tmpfs
   with the interpreter and its libraries, mounted read-only, three devices and an empty working
   directory. There is no /proc, no home directory, and no process other than the code's own.
2. Resource limits on CPU time, address space, file size, open files, threads and core dumps.
3. A seccomp filter that rejects new processes, sockets, signals to other processes, tracing, memory
   that resource limits do not count (shared, or pinned in pipes), and the system calls for
   namespaces and mounts (which reduces the attack surface of the kernel).

`no_new_privs` is set, and no capability survives the start of the interpreter (see capabilities(7):
a process with a nonzero user id loses them on execve).

The launcher itself stays outside the PID namespace. It kills the code after a time limit or when
its standard input closes, which also happens when the trainer dies.
"""

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

# Constants of linux/sched.h, linux/mount.h, linux/prctl.h, linux/seccomp.h and linux/audit.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_THREAD = (
    0x10000000,
    0x20000000,
    0x40000000,
    0x10000,
)
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
KILL_PROCESS, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x50000
EPERM, ENOSYS = 1, 38
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # marks the system calls of another ABI of x86_64
MOUNT_SETATTR = 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
TGKILL = {"x86_64": 234, "aarch64": 131}
# Rejected system calls with their numbers (asm/unistd_64.h, asm-generic/unistd.h)
DENIED = {
    "x86_64": {
        "fork": 57, "vfork": 58, "kill": 62, "tkill": 200, "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "socket": 41, "shmget": 29, "msgget": 68,
        "semget": 64, "mq_open": 240, "memfd_create": 319, "unshare": 272, "setns": 308,
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "keyctl": 250,
        "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "open_by_handle_at": 304, "splice": 275, "tee": 276, "vmsplice": 278,
        "io_setup": 206,
    },
    "aarch64": {
        "kill": 129, "tkill": 130, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "socket": 198, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180,
        "memfd_create": 279, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39,
        "pivot_root": 41, "chroot": 51, "keyctl": 219, "add_key": 217, "request_key": 218,
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "open_by_handle_at": 265,
        "splice": 76, "tee": 77, "vmsplice": 75, "io_setup": 0,
    },
}  # fmt: skip
DENIED_EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "pidfd_open": 434, "pidfd_getfd": 438, "mount_setattr": 442,
    "memfd_secret": 447,
}  # fmt: skip
DEVICES = ("null", "zero", "urandom")
LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
LIBRARY_CACHE = "/etc/ld.so.cache"
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
WORKING_FOLDER, CODE_FILE = "/tmp", "main.py"
MAX_OPEN_FILES, MAX_THREADS, MAX_FILE_BYTES, MAX_INODES = 64, 64, 16 * 2**20, 1024
WORKING_FOLDER_BYTES = 64 * 2**20
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, call: str) -> None:
    """Raise an OSError that names the call if a C function has failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    result = libc.mount(
        source.encode(), target.encode(), kind and kind.encode(), flags, options.encode()
    )
    check(result, f"mount {target}")


def set_mount_attributes(target: str, attributes: int, flags: int = 0) -> None:
    """Call mount_setattr(2), which needs Linux 5.12."""
    values = struct.pack("QQQQ", attributes, 0, 0, 0)
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, values, len(values))
    check(result, f"mount_setattr {target}")


def enter_namespaces() -> bool:
    """Move this process, and later its children, into new namespaces.

    A helper process outside the namespaces maps the user ids. Root, whose own id has no limit on
    threads, needs two of them, which only a process outside may map.

    Returns:
        Whether the code has to switch to the user `NOBODY` (otherwise this process already has).
    """
    parent, user, group = os.getpid(), os.geteuid(), os.getegid()
    entered_read, entered_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        code = 2
        try:
            os.close(entered_write)
            if os.read(entered_read, 1):
                code = map_user(parent, user, group)
        finally:
            os._exit(code)
    try:
        check(libc.unshare(NAMESPACES), "unshare")
        os.write(entered_write, b"x")
    finally:
        os.close(entered_write)
        os.close(entered_read)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code > 1:
        raise OSError("the user id cannot be mapped")
    return code == 1


def map_user(process: int, user: int, group: int) -> int:
    """Map the ids of a process in a new user namespace; return 1 if root is mapped as well."""
    write_file(f"/proc/{process}/setgroups", "deny")
    if user == 0:
        try:
            both = f"0 {{}} 1\n{NOBODY} {NOBODY} 1\n"
            write_file(f"/proc/{process}/gid_map", both.format(group))
            write_file(f"/proc/{process}/uid_map", both.format(user))
            return 1
        except OSError:  # a container without the user `NOBODY`
            pass
    write_file(f"/proc/{process}/gid_map", f"{NOBODY} {group} 1\n")
    write_file(f"/proc/{process}/uid_map", f"{NOBODY} {user} 1\n")
    return 0


def write_file(path: str, text: str) -> None:
    """Write a text with a single system call, as the files of /proc require."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def build_root(root: str, folders: Sequence[str], files: Sequence[str]) -> None:
    """Mount a tmpfs on `root` with the given paths, read-only, and make it the root directory."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("none", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={MAX_INODES},mode=755")
    for path in dict.fromkeys(folders):
        inside = root + path
        if os.path.islink(path):  # such as /lib on systems where it links to /usr/lib
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.symlink(os.readlink(path), inside)
        elif os.path.isdir(path) and not os.path.exists(inside):
            os.makedirs(inside)
            bind(path, inside, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
            hide_packages(inside)
    for path in files:
        if os.path.isfile(path) and not os.path.exists(root + path):
            bind_file(path, root + path, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    for name in DEVICES:
        bind_file(f"/dev/{name}", f"{root}/dev/{name}", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    work = root + WORKING_FOLDER
    os.makedirs(work, exist_ok=True)
    options = f"size={WORKING_FOLDER_BYTES},nr_inodes={MAX_INODES},mode=1777"
    mount("none", work, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.mkdir(f"{root}/old")
    check(
        libc.syscall(PIVOT_ROOT[platform.machine()], root.encode(), f"{root}/old".encode()),
        "pivot_root",
    )
    os.chdir("/")
    with suppress(OSError):  # the trainer removes it as well, unless it is killed
        os.rmdir(f"/old{root}")  # no longer a mount point
    check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    set_mount_attributes("/", MOUNT_ATTR_RDONLY)


def bind(source: str, target: str, attributes: int) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    set_mount_attributes(target, attributes, AT_RECURSIVE)


def bind_file(source: str, target: str, attributes: int) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    open(target, "x").close()
    bind(source, target, attributes)


def hide_packages(folder: str) -> None:
    """Mount empty directories over the packages of Python installations in `folder`."""
    for python in os.listdir(folder):
        for name in PACKAGE_FOLDERS:
            path = f"{folder}/{python}/{name}"
            if python.startswith("python") and os.path.isdir(path) and not os.path.islink(path):
                mount("none", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,nr_inodes=2,mode=755")


def set_limits(cpu_seconds: int, memory: int) -> None:
    """Set the resource limits of this process and its threads."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_NPROC: MAX_THREADS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for name, value in limits.items():
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def seccomp_filter(machine: str, process: int) -> bytes:
    """Return the filter as a program of classic BPF (linux/filter.h, linux/seccomp.h).

    `clone` is allowed only for threads. `clone3`, whose flags a filter cannot read, returns ENOSYS,
    so that the C library falls back to `clone`. `tgkill`, which `abort` uses, is allowed only for
    the process itself.

    Args:
        machine: Architecture, a key of `AUDIT_ARCH`.
        process: Id of the process in its own PID namespace.
    """
    load, equal, above, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    number, arch, first_argument = 0, 4, 16  # offsets in struct seccomp_data
    program = [
        (load, 0, 0, arch),
        (equal, 1, 0, AUDIT_ARCH[machine]),
        (give, 0, 0, KILL_PROCESS),
        (load, 0, 0, number),
        (above, 0, 1, X32_BIT),
        (give, 0, 0, KILL_PROCESS),
        (equal, 0, 1, CLONE3),
        (give, 0, 0, ERRNO | ENOSYS),
    ]
    for denied in (*DENIED[machine].values(), *DENIED_EVERYWHERE.values()):
        program += [(equal, 0, 1, denied), (give, 0, 0, ERRNO | EPERM)]
    program += [
        (equal, 0, 4, TGKILL[machine]),
        (load, 0, 0, first_argument),
        (equal, 1, 0, process),
        (give, 0, 0, ERRNO | EPERM),
        (give, 0, 0, ALLOW),
        (equal, 0, 3, CLONE[machine]),
        (load, 0, 0, first_argument),
        (bits, 1, 0, CLONE_THREAD),
        (give, 0, 0, ERRNO | EPERM),
        (give, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *each) for each in program)


def install_filter() -> None:
    """Install the seccomp filter in this process."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    code = ctypes.create_string_buffer(program := seccomp_filter(platform.machine(), os.getpid()))
    description = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    )
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, description, 0, 0), "seccomp")


def run_code(settings: dict, code: bytes, work: str, *, becomes_nobody: bool) -> None:
    """Replace this process with an interpreter that runs the code; never return."""
    os.chdir(work)
    with open(CODE_FILE, "xb") as file:
        file.write(code)
    if becomes_nobody:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    set_limits(settings["cpu_seconds"], settings["memory"])
    install_filter()
    # unbuffered, to keep the output before a timeout; the hash seed makes set order reproducible
    flags = ["-P", "-s", "-u", "-B", "-X", "utf8"]
    os.execve(settings["python"], [settings["python"], *flags, CODE_FILE], {"PYTHONHASHSEED": "0"})


def wait(process: int, deadline: float) -> str:
    """Wait for the code and kill it at the deadline, or when standard input closes.

    Returns:
        "exit N", "signal N" or "timeout".
    """
    descriptor, timed_out = os.pidfd_open(process), False
    ready, _, _ = select.select([descriptor, 0], [], [], max(deadline - time.monotonic(), 0))
    if descriptor not in ready:
        timed_out = not ready
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if timed_out:
        return "timeout"
    return f"exit {status}" if status >= 0 else f"signal {-status}"


def main(settings: dict) -> str:
    """Read the code from standard input, run it and return how it ended."""
    code = b""
    while len(code) < settings["length"]:
        code += (part := os.read(0, settings["length"] - len(code)))
        if not part:
            raise OSError("the code is incomplete")
    becomes_nobody, work = False, settings["folder"]
    if settings["namespaces"]:
        becomes_nobody = enter_namespaces()
        build_root(
            settings["folder"],
            [*LIBRARY_FOLDERS, *settings["folders"]],
            [settings["python"], LIBRARY_CACHE],
        )
        work = WORKING_FOLDER
    started_read, started_write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            run_code(settings, code, work, becomes_nobody=becomes_nobody)
        except Exception as error:
            os.write(started_write, str(error).encode())
        finally:
            os._exit(1)
    os.close(started_write)
    error = os.read(started_read, 4096)  # the pipe closes on execve
    if error:
        raise OSError(error.decode())
    return wait(process, time.monotonic() + settings["timeout"])


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    os.set_inheritable(options["status"], False)
    try:
        report = main(options)
    except Exception as failure:
        report = f"error {failure}"
    os.write(options["status"], report.encode())
