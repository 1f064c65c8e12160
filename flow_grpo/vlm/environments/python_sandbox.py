"""Environment whose tool runs Python code that the model writes, in an isolated process.

    <tool_call>{"name": "python", "arguments": {"code": "print(7 + 8)"}}</tool_call>

The result is what the code prints, including the traceback of an exception. Every call starts a new
interpreter with the standard library only; `sandbox_launcher.py` describes its isolation.
"""

import functools
import json
import math
import os
import platform
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError
from flow_grpo.vlm.environments.sandbox_launcher import AUDIT_ARCH
from flow_grpo.vlm.environments.tool_calls import (
    ToolEnvironment,
    ToolError,
    check_option,
    shorten,
    text_argument,
)

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
MAX_OUTPUT_BYTES = 2**18  # the code is killed when it prints more
STARTUP_SECONDS = 10.0  # for the start of the launcher, in addition to the time limit
MEBIBYTE = 2**20
PROBE = "print('ready')"
ENDINGS = {
    "timeout": "the code took more than {timeout:g} s",
    "signal 9": "the code was killed, because its threads took more than {timeout:g} s of CPU time",
    "output": "the code was stopped, because it printed too much",
}


class SandboxError(Exception):
    """The isolated process could not be started."""


class PythonSandbox(ToolEnvironment):
    """Environment with the tool `python`.

    Args:
        timeout: Seconds per call, of both wall-clock and CPU time.
        memory_mb: Address space of the interpreter in MiB.
        max_characters: Maximum length of an observation.
        allow_weak_isolation: Whether to run on systems without support for namespaces. Code can
            then read and change all files of the trainer's user.
        error_reward: Reward of a turn whose call fails or raises an exception.
    """

    name = "python"

    def __init__(
        self,
        timeout: float = 5.0,
        memory_mb: int = 512,
        max_characters: int = 1000,
        allow_weak_isolation: bool = False,
        error_reward: float = 0.0,
    ) -> None:
        super().__init__(error_reward)
        self.timeout = check_option("timeout", timeout, 0.1, 3600)
        self.memory = check_option("memory_mb", memory_mb, 64, 2**20, whole=True) * MEBIBYTE
        self.max_characters = check_option("max_characters", max_characters, 50, 10**5, whole=True)
        self.namespaces = check_isolation(bool(allow_weak_isolation))
        self.longest_step = self.timeout + 2 * STARTUP_SECONDS

    def call(self, arguments: dict[str, Any]) -> str:
        """Run the code; raise a ToolError with the output so far if it fails."""
        code = text_argument(arguments, "code")
        try:
            output, ending = run_isolated(
                code, timeout=self.timeout, memory=self.memory, namespaces=self.namespaces
            )
        except SandboxError as error:  # such as too many processes on the machine
            raise ToolError("the code could not be started") from error
        output = output.rstrip("\n")
        if ending == "exit 0":
            return shorten(output, self.max_characters) or "(no output)"
        reason = ENDINGS.get(ending, f"the code ended with {ending}").format(timeout=self.timeout)
        raise ToolError(shorten(f"{reason}\n{output}".rstrip("\n"), self.max_characters))


def run_isolated(code: str, *, timeout: float, memory: int, namespaces: bool) -> tuple[str, str]:
    """Run code in a new isolated process.

    Args:
        code: Python code.
        timeout: Seconds of wall-clock and of CPU time.
        memory: Address space in bytes.
        namespaces: Whether to use namespaces.

    Returns:
        The output, and how the code ended: "exit N", "signal N", "timeout", or "output" if it
        printed too much.

    Raises:
        SandboxError: If the process cannot be started.
    """
    content = code.encode("utf-8", "replace")
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        settings = {
            "folder": os.path.realpath(folder),
            "python": os.path.realpath(sys.executable),
            "folders": [os.path.join(os.path.realpath(sys.base_prefix), "lib")],
            "length": len(content),
            "timeout": timeout,
            "cpu_seconds": math.ceil(timeout) + 1,  # more than `timeout` with several threads only
            "memory": memory,
            "namespaces": namespaces,
        }
        status_read, status_write = os.pipe()
        try:
            process = _start_launcher({**settings, "status": status_write})
        except OSError as error:
            os.close(status_read)
            raise SandboxError(str(error)) from error
        finally:
            os.close(status_write)
        with process, open(status_read, "rb") as status_file:
            with suppress(BrokenPipeError):  # the launcher reports why it ended
                process.stdin.write(content)
                process.stdin.flush()
            output, complete = _read_output(process, time.monotonic() + timeout + STARTUP_SECONDS)
            with suppress(BrokenPipeError):
                process.stdin.close()  # the launcher kills code that is still running
            process.stdout.close()
            try:
                process.wait(STARTUP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            status = status_file.read().decode(errors="replace")
    if status.startswith("error") or not status:
        raise SandboxError(status.removeprefix("error ") or "the launcher was killed")
    return output.decode(errors="replace"), status if complete else "output"


def _start_launcher(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    python = os.path.realpath(sys.executable)
    return subprocess.Popen(
        [python, "-I", "-S", "-B", str(LAUNCHER), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[settings["status"]],
        cwd="/",
        env={},
        start_new_session=True,
    )


def _read_output(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
    """Read output up to its end, the limit or the deadline; return it and whether it is whole."""
    output, descriptor = b"", process.stdout.fileno()
    while len(output) <= MAX_OUTPUT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return output, True  # the launcher reports the timeout
        part = os.read(descriptor, 2**16)
        if not part:
            return output, True
        output += part
    return output[:MAX_OUTPUT_BYTES], False


@functools.cache
def check_isolation(allow_weak: bool) -> bool:
    """Check which protections the system supports by running a test program.

    Args:
        allow_weak: Whether to accept missing namespaces.

    Returns:
        Whether namespaces are supported.

    Raises:
        UserError: If a protection is missing and not waived.
    """
    if platform.machine() not in AUDIT_ARCH or not sys.platform.startswith("linux"):
        raise UserError(
            f"needs Linux on {' or '.join(AUDIT_ARCH)} for its system call filter",
            field="environment",
            value=PythonSandbox.__name__,
        )
    limits = {"timeout": 20.0, "memory": 512 * MEBIBYTE}
    try:
        _probe(namespaces=True, **limits)
        return True
    except SandboxError as error:
        reason = str(error)
    if not allow_weak:
        raise UserError(
            f"has no file, process and network isolation, because this system does not support "
            f"unprivileged namespaces ({reason})",
            field="environment",
            value=PythonSandbox.__name__,
            hint="allow user namespaces (docs/vlm/environments.md), or accept that code can read "
            "and change all your files with environment_options.allow_weak_isolation=True",
        )
    try:
        _probe(namespaces=False, **limits)
    except SandboxError as error:
        raise UserError(
            f"cannot run code ({error})", field="environment", value=PythonSandbox.__name__
        ) from error
    print(
        f"warning: no file isolation ({reason}): the model's code can read and change all files "
        "of this user",
        file=sys.stderr,
    )
    return False


def _probe(*, namespaces: bool, timeout: float, memory: int) -> None:
    """Run a test program; raise SandboxError if its output is not as expected."""
    output, ending = run_isolated(PROBE, timeout=timeout, memory=memory, namespaces=namespaces)
    if (output.strip(), ending) != ("ready", "exit 0"):
        raise SandboxError(f"a test program ended with {ending}: {output.strip()[-200:]!r}")
