"""Run scripts in separate processes without importing torch and other large packages again.

A server process that has imported them, and our modules, forks for each script. The child runs the
script like `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS`, except that modules are not
torn down at exit. This saves seven seconds per script.

For launchers and tests that send signals, `fork_server.py SCRIPT ARGUMENTS` is a proxy process: it
passes on its environment, standard streams and signals, and ends like the script.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import re
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SOCKET = "FLOW_GRPO_WARM_SOCKET"
# interpreter with which a forked script starts other scripts; see `interpreter`
INTERPRETER = "FLOW_GRPO_WARM_PYTHON"
# a file to which a forked script writes the names of all imported modules when it ends
IMPORTS = "FLOW_GRPO_WARM_IMPORTS"
CHANGING_VARIABLES = re.compile(  # environment variables that no library reads at import
    r"PYTEST_CURRENT_TEST|FLOW_GRPO_.*|HF_MODULES_CACHE|REWARD_SERVER_TOKEN|PYTHONPATH|PYTORCH_NVML_BASED_CUDA_CHECK|(ACCELERATE|DS|FSDP)_.*"
    r"|(.*_)?RANK|(.*_)?WORLD_SIZE|ROLE_NAME|(MASTER|TORCHELASTIC|TORCH_NCCL|_MLFLOW)_.*"
    rf"|{SOCKET}|{INTERPRETER}|{IMPORTS}"
)


def run(
    arguments: list[str], *, cwd: Path, env: dict[str, str], timeout: float, light: bool = False
):
    """Run a script with arguments, like `subprocess.run`.

    Return None if the environment differs in a variable that libraries may have read at import.
    With `light`, the script is forked from a server that has imported the settings only.
    """
    with (
        _connect(address(env, light)[SOCKET]) as channel,
        open(os.devnull, "rb") as nothing,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        streams = [file.fileno() for file in (nothing, out, err)]
        if _ask(channel, arguments, str(cwd), env, streams) is None:
            return None
        channel.settimeout(timeout)
        try:
            status = int(channel.recv(64))
        except TimeoutError:  # closing the channel ends the script
            raise subprocess.TimeoutExpired(arguments, timeout) from None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(status), *texts)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="warm-")


def address(env: dict[str, str], light: bool = False) -> dict[str, str]:
    """Return the variables that a proxy process needs, and start the server if necessary."""
    path = Path(_folder().name, "light" if light else "socket")
    if not path.exists():
        kept = ("PYTHONPATH",)
        _start(
            path, {k: v for k, v in env.items() if k in kept or not CHANGING_VARIABLES.fullmatch(k)}
        )
    return {SOCKET: str(path)}


def interpreter(env: dict[str, str]) -> str:
    """Return a replacement for `sys.executable` that runs our scripts in the fork server.

    It runs everything else, such as reward workers, in a new process.
    """
    socket_path = address(env)[SOCKET]
    path = Path(socket_path).with_name("python")
    if not path.exists():
        scripts = Path(__file__).parents[2] / "scripts"
        python, proxy = shlex.quote(sys.executable), shlex.quote(__file__)
        path.write_text(
            "#!/bin/sh\n"
            f'case "$1" in {scripts}/*.py)\n'
            f'    {SOCKET}={socket_path} exec {python} {proxy} "$@" ;;\n'
            f'esac\nexec {python} "$@"\n'
        )
        path.chmod(0o755)
    return str(path)


def _start(path: Path, env: dict[str, str]) -> None:
    """Start a server with this environment; it ends with this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # SOCK_SEQPACKET preserves message boundaries
        listener.bind(str(path))
        listener.listen(64)
        _started.append(
            subprocess.Popen(
                [sys.executable, __file__, f"--serve-{path.name}", str(listener.fileno())],
                pass_fds=[listener.fileno()],
                env=env,
                stdin=subprocess.PIPE,
            )
        )


_started: list[subprocess.Popen] = []


def _connect(path: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(path)
    return channel


def _ask(channel: socket.socket, arguments, folder: str, env, files: list[int]) -> int | None:
    """Request a process for the script; return its id, or None if the environment is rejected."""
    request = json.dumps([arguments, folder, dict(env)]).encode()
    socket.send_fds(channel, [request], files)
    return int(channel.recv(64)) or None


def forward_signals(arguments: list[str]) -> None:
    """Run a script from the proxy process: forward signals to it, and end with its status."""
    with _connect(os.environ[SOCKET]) as channel:
        numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        pid = _ask(channel, arguments, os.getcwd(), os.environ, [0, 1, 2])
        if pid is None:
            os.execv(sys.executable, [sys.executable, *arguments])

        def send(number: int, _) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in numbers:
            signal.signal(number, send)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        code = os.waitstatus_to_exitcode(int(channel.recv(64)))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve(listener: socket.socket) -> list[str]:
    """Fork for each request until standard input is closed.

    A child has only the forking thread and would wait forever for locks held by other threads.
    Returns only in the process of a script, with its arguments. Its parent, a child of the server,
    waits for it.
    """
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            sys.exit()
        channel, _ = listener.accept()
        assert len(os.listdir("/proc/self/task")) == 1, "an imported package has started a thread"
        if os.fork() == 0:
            listener.close()
            return _follow(channel)
        channel.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _follow(channel: socket.socket) -> list[str]:
    request, files, _, _ = socket.recv_fds(channel, 2**20, 3)
    if not request:
        os._exit(0)
    arguments, folder, env = json.loads(request)
    other = {name for name, _ in env.items() ^ os.environ.items()}
    if not all(CHANGING_VARIABLES.fullmatch(name) for name in other):
        channel.sendall(b"0")
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        channel.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        sys.executable = env.get(INTERPRETER, sys.executable)
        paths = env.get("PYTHONPATH", "").split(os.pathsep)
        script = folder if arguments[0] == "-m" else str(Path(arguments[0]).resolve().parent)
        sys.path = [script, *paths, *(path for path in sys.path[1:] if path not in paths)]
        return arguments
    for file in files:
        os.close(file)
    channel.sendall(str(pid).encode())
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, channel], [], [])
    if ended not in ready:  # the client is gone
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        channel.sendall(str(status).encode())
    os._exit(0)


def run_and_exit(arguments: list[str]) -> None:
    """Run the script in this process and exit without tearing down modules.

    The teardown would copy all memory that is shared with the server, which takes half a second.
    """
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv, status = arguments, 0
    if IMPORTS in os.environ:
        _record_imports(Path(os.environ[IMPORTS]))
    try:
        if arguments[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _record_imports(file: Path) -> None:
    leave = os._exit  # our scripts call it too

    def record_and_leave(status: int) -> None:
        file.write_text("\n".join(sys.modules))
        leave(status)

    os._exit = record_and_leave


if __name__ == "__main__" and not sys.argv[1].startswith("--serve-"):
    forward_signals(sys.argv[1:])
elif __name__ == "__main__" and sys.argv[1] == "--serve-light":
    import flow_grpo.config.command_line
    import flow_grpo.diffusion.config_checks
    import flow_grpo.diffusion.presets
    import flow_grpo.vlm.config_checks
    import flow_grpo.vlm.presets

    run_and_exit(serve(socket.socket(fileno=int(sys.argv[2]))))
elif __name__ == "__main__":
    from unittest import mock  # not imported by proxy processes, as it imports asyncio

    import accelerate  # noqa: F401
    import diffusers.guiders  # noqa: F401
    import ml_collections.config_flags  # noqa: F401
    import peft  # noqa: F401
    import torch._dynamo.backends.debugging
    import torch.utils.flop_counter  # noqa: F401
    import transformers.optimization  # noqa: F401
    from diffusers import (  # noqa: F401
        AutoModel,
        Flux2KleinPipeline,
        Flux2Pipeline,
        FluxKontextPipeline,
        FluxPipeline,
        QwenImage21Pipeline,
        QwenImageEditPipeline,
        QwenImageEditPlusPipeline,
        QwenImagePipeline,
        StableDiffusion3Pipeline,
        WanImageToVideoPipeline,
        WanPipeline,
        ZImagePipeline,
    )
    from PIL import Image
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import flow_grpo.diffusion.dry_run
    import flow_grpo.diffusion.session
    import flow_grpo.vlm.dry_run
    import flow_grpo.vlm.session  # noqa: F401

    # imports pyarrow, whose allocator must start no thread
    with mock.patch.dict(
        os.environ, DS_ACCELERATOR="cpu", JE_ARROW_MALLOC_CONF="background_thread:false"
    ):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    Image.init()
    get_checkpoint_conversion_mapping("")  # compiles a thousand patterns
    gc.freeze()  # otherwise garbage collection in a child copies the memory of all imported modules
    run_and_exit(serve(socket.socket(fileno=int(sys.argv[2]))))
