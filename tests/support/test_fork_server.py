"""Scripts run by the fork server end like scripts run in a new process."""

import signal
import subprocess
import tempfile

import fork_server
import pytest
from runner import FORK_SERVER, environment, run_script
from server_process import is_running, wait_until


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import atexit, os, sys, threading, time\n"
        "print(os.getpid(), os.environ.get('RANK'), *sys.argv[1:], flush=True)\n"
        "time.sleep(100 * (sys.argv[1] == 'stay'))\n"
        "atexit.register(print, 'last')\n"
        "threading.Timer(0.2, print, ['late']).start()\n"
        "sys.exit(3)\n"
    )
    return path


@pytest.fixture(scope="module")
def new_server():
    """Start a server for the current environment, which other tests may have changed."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_folder", lambda: folder)
        yield
    folder.cleanup()


def test_the_exit_code_is_that_of_the_script(script):
    """It is returned after the script's threads and exit handlers have ended."""
    done = run_script(script, "leave")
    assert done.returncode == 3
    assert done.stdout.split()[1:] == ["None", "leave", "late", "last"]


@pytest.mark.usefixtures("new_server")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_script(script, number):
    command, env = [*FORK_SERVER, script, "stay"], {**environment(warmed=True), "RANK": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    pid, *rest = process.stdout.readline().split()
    assert rest == ["1", "stay"]
    assert int(pid) != process.pid  # forked
    process.send_signal(number)
    assert process.wait(60) == -number
    wait_until(lambda: not is_running(int(pid)), 60)
    process.stdout.close()


def test_a_variable_that_libraries_read_at_import_starts_a_new_process(script):
    env = {**environment(warmed=True), "HF_HUB_OFFLINE": "other"}
    command = [*FORK_SERVER, script, "leave"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    stdout, _ = process.communicate(timeout=60)
    assert int(stdout.split()[0]) == process.pid
    assert process.returncode == 3
