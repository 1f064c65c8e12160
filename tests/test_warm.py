"""Scripts that are forked end as those of a process of their own."""

import signal
import subprocess
import tempfile

import pytest
import warm
from runner import WARM, environment, run_script
from serving import is_running, wait_until


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
def own_server():
    """For the environment as it is now: other tests may have changed it since theirs started."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "_folder", lambda: folder)
        yield
    folder.cleanup()


def test_the_exit_code_is_the_scripts(script):
    """Once its threads and exit handlers have ended."""
    done = run_script(script, "leave")
    assert done.returncode == 3
    assert done.stdout.split()[1:] == ["None", "leave", "late", "last"]


@pytest.mark.usefixtures("own_server")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_script(script, number):
    command, env = [*WARM, script, "stay"], {**environment(warmed=True), "RANK": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    pid, *rest = process.stdout.readline().split()
    assert rest == ["1", "stay"]
    assert int(pid) != process.pid  # forked
    process.send_signal(number)
    assert process.wait(60) == -number
    wait_until(lambda: not is_running(int(pid)), 60)
    process.stdout.close()


def test_what_libraries_read_first_gets_a_process_of_its_own(script):
    env = {**environment(warmed=True), "HF_HUB_OFFLINE": "other"}
    command = [*WARM, script, "leave"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    stdout, _ = process.communicate(timeout=60)
    assert int(stdout.split()[0]) == process.pid
    assert process.returncode == 3
