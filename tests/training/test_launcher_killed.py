"""Workers end if their launcher is killed."""

import os
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from server_process import is_running, wait_until

WORKER = "import flow_grpo.config.early_exit, time; print('started', flush=True); time.sleep(600)"
# like torchrun
LAUNCHER = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE, text=True)
print(worker.stdout.readline().strip(), worker.pid, flush=True)
worker.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="uses a Linux parent-death signal")
@pytest.mark.parametrize("launched", [True, False])
def test_a_worker_ends_when_its_launcher_is_killed(launched):
    """A process started in the background of a shell outlives the shell, like any program."""
    environment = {n: v for n, v in os.environ.items() if n != "TORCHELASTIC_RUN_ID"}
    if launched:
        environment["TORCHELASTIC_RUN_ID"] = "none"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    started, pid = launcher.stdout.readline().split()
    assert started == "started"
    try:
        launcher.kill()
        launcher.wait()
        if launched:
            wait_until(lambda: not is_running(int(pid)), seconds=60)
        else:
            assert is_running(int(pid))
    finally:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid)).kill()
        launcher.stdout.close()
