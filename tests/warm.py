"""Scripts in processes of their own that need not import torch and its like again.

A process that has imported them forks for each script: what runs there is the script, by its path
and with its arguments, as `python SCRIPT ARGUMENTS` would. It saves five seconds each time.
"""

import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

CHANGES = (  # of the environment, in every test or by accelerate, and of no matter to scripts
    *("PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)


def run(arguments: list[str], *, cwd: Path, env: dict[str, str], timeout: float):
    """As subprocess.run does it, of a script and its arguments; None where another environment is
    asked for, which libraries may have read when they were imported."""
    env = {name: value for name, value in env.items() if name not in CHANGES}
    channel = _start(json.dumps(env, sort_keys=True))
    if channel is None:
        return None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        request = json.dumps([arguments, str(cwd)]).encode()
        socket.send_fds(channel, [request], [out.fileno(), err.fileno()])
        pid = int(channel.recv(64))
        channel.settimeout(timeout)
        try:
            status = int(channel.recv(64))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            channel.settimeout(None)
            channel.recv(64)
            raise subprocess.TimeoutExpired(arguments, timeout) from None
        finally:
            channel.settimeout(None)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(status), *texts)


_environments: set[str] = set()


@functools.cache
def _start(environment: str) -> socket.socket | None:
    """Once, for the environment of the first script."""
    if _environments:
        return None
    _environments.add(environment)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # whole messages
    subprocess.Popen(
        [sys.executable, __file__, str(there.fileno())],
        pass_fds=[there.fileno()],
        env=json.loads(environment),
        stdin=subprocess.DEVNULL,
    )
    there.close()
    return here


def serve(channel: socket.socket) -> list[str]:
    """In a child, the arguments of its script; the parent goes on until nobody asks any more."""
    while True:
        request, files, _, _ = socket.recv_fds(channel, 2**20, 2)
        if not request:
            sys.exit()
        arguments, folder = json.loads(request)
        pid = os.fork()
        if pid == 0:
            channel.close()
            for file, number in zip(files, (1, 2), strict=True):
                os.dup2(file, number)
                os.close(file)
            os.chdir(folder)
            return arguments
        for file in files:
            os.close(file)
        channel.sendall(str(pid).encode())
        channel.sendall(str(os.waitpid(pid, 0)[1]).encode())


if __name__ == "__main__":
    import accelerate  # noqa: F401
    import diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3  # noqa: F401
    import ml_collections.config_flags  # noqa: F401
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers  # noqa: F401

    gc.freeze()  # else each child copies the memory of all that was imported, to look for garbage
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
