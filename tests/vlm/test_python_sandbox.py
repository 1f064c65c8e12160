"""The Python tool: hostile code ends within its limits, and the episode continues."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import small_vlm
from user_errors import raises_user_error

from flow_grpo.errors import UserError
from flow_grpo.vlm.environment import EnvironmentPool, StepRequest
from flow_grpo.vlm.environments import python_sandbox, sandbox_launcher
from flow_grpo.vlm.environments.python_sandbox import PythonSandbox, check_isolation

CLASS = "flow_grpo.vlm.environments.python_sandbox:PythonSandbox"
SECRET = "the answer is 42"

try:
    check_isolation(False)
except UserError as missing:  # such as in a container without user namespaces
    pytestmark = pytest.mark.skip(str(missing))


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


@pytest.fixture(scope="module")
def sandbox() -> PythonSandbox:
    """Return a sandbox for code that terminates."""
    sandbox = PythonSandbox(timeout=60.0, error_reward=-0.5)
    sandbox.reset({"answer": SECRET})
    return sandbox


@pytest.fixture(scope="module")
def hurried() -> PythonSandbox:
    """Return a sandbox with a short timeout for code that does not terminate."""
    return PythonSandbox(timeout=1.0, error_reward=-0.5)


def children() -> set[psutil.Process]:
    """Return this process's children; those of other tests, such as fork servers, may be alive."""
    return set(psutil.Process().children(recursive=True))


def observe(sandbox: PythonSandbox, code: str) -> str:
    """Run the code and return the text of the observation; the episode must continue."""
    before = children()
    (text, images), reward, done = sandbox.step(call(code))
    assert (images, done) == ([], False)
    inner = text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    assert reward == (-0.5 if inner.startswith("Error: ") else 0.0)
    assert len(inner) <= 1000 + len("Error: ")
    assert children() <= before
    return inner


def test_the_model_sees_what_its_code_prints(sandbox):
    assert observe(sandbox, "import math\nprint(math.comb(10, 3), 'ü<image>')") == "120 ü(image)"
    assert observe(sandbox, "x = 1") == "(no output)"
    failed = observe(sandbox, "print('before')\n1 / 0")
    assert failed.startswith("Error: the code ended with exit 1")
    assert "before" in failed
    assert failed.endswith("ZeroDivisionError: division by zero")


def test_calls_do_not_share_files(sandbox):
    assert observe(sandbox, "open('notes', 'w').write('x'); print('ok')") == "ok"
    assert observe(sandbox, "import os; print(os.listdir(), dict(os.environ))") == (
        "['main.py'] {'PYTHONHASHSEED': '0', 'LC_CTYPE': 'C.UTF-8'}"
    )


MEMORY = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
# hostile code, and the observation that the model gets
HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "subprocess": ("import subprocess\nsubprocess.run(['/bin/sh'])", "Error"),
    "daemon": ("import os\nos.posix_spawn('/bin/sleep', ['sleep', '99'], {})", "Error"),
    "10 GB": ("bytearray(10 * 2**30)", "MemoryError"),
    "10 GB in parts": ("x = []\nwhile True: x.append(bytearray(2**24))", "MemoryError"),
    "infinite output": ("while True: print('x' * 1000)", "printed too much"),
    "infinite output of a survivor": (
        "import os\nwhile True:\n try: os.write(1, b'x' * 1000)\n except OSError: pass",
        "printed too much",
    ),
    "threads": (
        "import os, threading, time\nthreading.stack_size(2**16)\ntry:\n"
        " while True: threading.Thread(target=time.sleep, args=[999]).start()\n"
        "except RuntimeError as error: print(error, flush=True); os._exit(0)",
        "can't start new thread",
    ),
    "fills the disk": (
        "for i in range(99): open(str(i), 'wb').write(bytes(8 * 2**20))",
        "No space left",
    ),
    "one large file": ("open('x', 'wb').truncate(2**30)", "File too large"),
    "proc": ("open('/proc/1/environ').read()", "FileNotFoundError"),
    "crash": ("import ctypes\nctypes.string_at(0)", "signal 11"),
    "kills all": ("import os\nos.kill(-1, 9)", "PermissionError"),
    "kills the parent": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "system files": ("open('/etc/passwd').read()", "FileNotFoundError"),
    "symbolic link": (
        "import os\nos.symlink('/etc/passwd', 'x')\nopen('x').read()",
        "FileNotFoundError",
    ),
    "writes to the root": ("open('/x', 'w')", "Read-only file system"),
    "writes to the library": ("import os\nopen(os.__file__, 'a')", "Errno"),
    "installed packages": ("import torch", "No module named 'torch'"),
    "new namespace": (
        MEMORY + "print(libc.unshare(0x10000000), ctypes.get_errno())",
        "-1 1",
    ),
    "mount": (MEMORY + "print(libc.umount2(b'/tmp', 2), ctypes.get_errno())", "-1 1"),
    "memory of others": (
        MEMORY + "print(libc.process_vm_readv(2, None, 0, None, 0, 0), ctypes.get_errno())",
        "-1 1",
    ),
    "traces others": (MEMORY + "print(libc.ptrace(16, 2, 0, 0), ctypes.get_errno())", "-1 1"),
    "shared memory": (MEMORY + "print(libc.shmget(0, 2**30, 0o1600), ctypes.get_errno())", "-1 1"),
    "memory in pipes": (MEMORY + "print(libc.vmsplice(1, None, 0, 0), ctypes.get_errno())", "-1 1"),
    "signals to others": (
        MEMORY + "print(libc.tgkill(99, 99, 9), ctypes.get_errno())\nlibc.abort()",
        "-1 1",
    ),
    "limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "ValueError",
    ),
    "sees processes": ("import os\nprint(os.getpid(), os.getppid())", "1 0"),
    "capabilities": (  # capget(2), version 3
        MEMORY + "sets = (ctypes.c_uint32 * 6)(*[7] * 6)\n"
        "libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets); print(list(sets))",
        "[0, 0, 0, 0, 0, 0]",
    ),
    "descriptors": (
        "import os\nopen_ones = []\nfor i in range(1000):\n try: os.fstat(i); open_ones.append(i)\n"
        " except OSError: pass\nprint(open_ones)",
        "[0, 1, 2]",
    ),
    "reads the code's input": ("print(repr(input()))", "EOFError"),
}
ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(999)",
    "ignores signals and the parent's death": (
        MEMORY + "import signal\nfor i in range(1, 65):\n try: signal.signal(i, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nlibc.prctl(1, 0)\nwhile True: pass"
    ),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_code_ends_within_its_limits(sandbox, attack):
    code, shown = HOSTILE[attack]
    assert shown in observe(sandbox, code)


@pytest.mark.parametrize("attack", ENDLESS)
def test_endless_code_is_killed(hurried, attack):
    shown = observe(hurried, f"print('partial result')\n{ENDLESS[attack]}")
    assert "the code took more than 1 s" in shown
    assert "partial result" in shown


def test_code_is_killed_at_its_limit_of_cpu_time():
    """This includes process 1 of a PID namespace, which ignores most signals."""
    code = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass"
    _, ending = python_sandbox.run_isolated(code, timeout=60.0, memory=2**29, namespaces=True)
    assert ending == "signal 9"


def test_hostile_code_reaches_neither_the_network_nor_files(sandbox, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = server.getsockname()
        code = f"import socket\nsocket.create_connection({address}, 1)"
        assert "PermissionError" in observe(sandbox, code)
        with pytest.raises(TimeoutError):
            server.accept()
    for path in (secret, Path(__file__), Path.home() / ".ssh"):
        assert "FileNotFoundError" in observe(sandbox, f"open({str(path)!r}).read()")
        link = f"import os\nos.symlink({str(path)!r}, 'x')\nprint(os.path.exists('x'))"
        assert observe(sandbox, link) == "False"
    assert "Error" in observe(sandbox, f"open({str(tmp_path / 'new')!r}, 'w')")
    assert os.listdir(tmp_path) == ["id_rsa"]


def test_hostile_code_finds_no_copy_of_the_answer(sandbox):
    """It searches its own memory, the only memory it can read."""
    code = (
        "import gc, sys\n"
        "found = [x for x in gc.get_objects() if isinstance(x, dict) and 'answer' in x]\n"
        "print(found, sys.argv, sys.orig_argv[1:])"
    )
    flags = ["-P", "-s", "-u", "-B", "-X", "utf8", "main.py"]
    assert observe(sandbox, code) == f"[] ['main.py'] {flags}"


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ("<tool_call>{</tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 50_000 + "</tool_call>", "not valid JSON"),
        ("a <tool_call>?</think>" + call("print('</tool_call>')"), ">\n</tool_call>\n<"),
        (call("1\n2").replace("\\n", "\n"), "(no output)"),
        ("<tool_call>{}", "does not end with </tool_call>"),
        ("<tool_call>" + "x" * 10**6 + "</tool_call>", "more than 100,000 characters"),
        ("<tool_call>[]</tool_call>", 'the name "python"'),
        ('<tool_call>{"name": "python", "arguments": []}</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": "python"}</tool_call>', '"code" must be a text'),
        (2 * call("1"), "once per turn"),
        (call("print('\ud800')"), "\n?\n"),
        (call("print('\0')"), "null bytes"),
        (call("print('\\udcff')"), "\n\ufffd\n"),
        (call("import sys; sys.stdout.buffer.write(b'\\xff')"), "\ufffd"),
    ],
)
def test_a_malformed_call_is_an_observation(sandbox, response, shown):
    (text, _), _, done = sandbox.step(response)
    assert shown in text
    assert not done


def test_a_response_without_a_call_is_the_answer(sandbox):
    assert sandbox.step("<answer>42</answer>") == ("", 0.0, True)


def test_episodes_of_hostile_models_go_on_in_a_worker(tmp_path):
    [question, *_] = small_vlm.questions(tmp_path)
    before = children()
    pool = EnvironmentPool(CLASS, {"timeout": 1.0}, timeout=30, workers=1)
    pool.smoke_test(question)
    turns = [
        "import os\nwhile True: os.fork()",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "while True: print('x')",
        "print(7 + 8)",
    ]
    responses = []
    for code in turns:
        responses.append(call(code))
        [step] = pool.step([StepRequest.from_question((9, 0), question, responses)])
        assert not step.done
    assert step.text == "<tool_response>\n15\n</tool_response>"
    pool.close()
    assert children() <= before


def test_code_ends_with_its_launcher(tmp_path):
    """The trainer may be killed while code runs: the launcher's standard input closes."""
    script = (
        "from flow_grpo.vlm.environments.python_sandbox import run_isolated\n"
        "code = 'import time\\nprint(1, flush=True)\\ntime.sleep(99)'\n"
        "settings = dict(timeout=99.0, memory=2**29, namespaces=True)\n"
        "run_isolated(code, **settings)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as trainer:
        seen: list[psutil.Process] = []
        while len(seen) < 2:  # launcher and code
            assert trainer.poll() is None
            seen = psutil.Process(trainer.pid).children(recursive=True)
        trainer.kill()
    _, alive = psutil.wait_procs(seen, timeout=60)
    assert not alive
    assert not [*tmp_path.iterdir()]


def test_a_missing_protection_is_an_error_unless_it_is_waived(monkeypatch, capsys, tmp_path):
    """A launcher that requests invalid namespaces simulates a system without namespaces."""
    text = Path(sandbox_launcher.__file__).read_text()
    assert "unshare(NAMESPACES)" in text
    broken = text.replace("unshare(NAMESPACES)", "unshare(NAMESPACES | 1)")
    (tmp_path / "launcher.py").write_text(broken)
    monkeypatch.setattr(python_sandbox, "LAUNCHER", tmp_path / "launcher.py")
    check_isolation.cache_clear()
    with raises_user_error("unprivileged namespaces", "Invalid argument", field="environment"):
        PythonSandbox()
    weak = PythonSandbox(timeout=60.0, allow_weak_isolation=True)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "no file isolation" in warning
    for attack in ("10 GB", "fork bomb", "kills the parent"):
        code, shown = HOSTILE[attack]
        (text, _), _, _ = weak.step(call(code))
        assert shown in text
    (text, _), _, _ = weak.step(call("print(open('/etc/passwd').read() != '')"))
    assert "True" in text
    check_isolation.cache_clear()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout": 0}, "environment_options.timeout"),
        ({"timeout": float("nan")}, "environment_options.timeout"),
        ({"memory_mb": "1"}, "environment_options.memory_mb"),
        ({"max_characters": True}, "environment_options.max_characters"),
        ({"error_reward": float("inf")}, "environment_options.error_reward"),
    ],
)
def test_invalid_options_are_rejected(options, field):
    with raises_user_error(field=field):
        PythonSandbox(**options)
