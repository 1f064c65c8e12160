"""Start-up errors are one line, and shutdown completes accepted requests."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from server_process import ROOT, Server, body, wait_until

from reward_server.__main__ import main

JPEG = "jpeg_compressibility"


@pytest.mark.parametrize("package", ["fastapi", "prometheus_client", "uvicorn"])
def test_a_missing_package_is_one_line(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("reward_server.")]:
        if name != "reward_server.__main__":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["--rewards", JPEG]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert repr(package) in line
    assert "[server]" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--rewards is missing"),
        ("--rewards beauty", "--rewards .*'beauty'.*jpeg.* --custom beauty="),
        ("--rewards a --custom a=nowhere.to:be", "'a'.*'nowhere.to:be'"),
        ("--rewards a --custom nothing", "'nothing' .*name=package.module:attribute"),
        (f"--rewards {JPEG} --options {{", "'{'.* JSON"),
        (f"--rewards {JPEG} --options [1]", "'\\[1\\]' must be"),
        (f'--rewards {JPEG} --options {{"ocr":{{}}}}', "--options .*'ocr'.*--rewards"),
        (f'--rewards {JPEG} --options {{"{JPEG}":{{"a":1}}}}', JPEG),
        ('--rewards ocr --options {"ocr":{"engine":"eyes"}}', "'eyes'"),
        ('--rewards ocr --options {"ocr":{"timeout":"1"}}', "timeout='1' must be a finite number"),
        (f"--rewards {JPEG} --port 99999", "'99999' must be a port"),
        (f"--rewards {JPEG} --workers 0", "--workers.*'0' .*at least 1"),
        (f"--rewards {JPEG} --max-wait-ms nan", "'nan' must be milliseconds"),
        (f"--rewards {JPEG} --color", "unrecognized arguments: --color"),
        (f"--rewards {JPEG} --host 0.0.0.0", "--host='0.0.0.0' .*--token-env"),
        (f"--rewards {JPEG} --host ::", "--host='::' .*--token-env"),
        (f"--rewards {JPEG} --host no.such.invalid", "--host='no.such.invalid' .*resolved"),
        (f"--rewards {JPEG} --token-env NOT_SET", "--token-env='NOT_SET' .*not set or empty"),
        (f"--rewards {JPEG} --token-env BLANK", "--token-env='BLANK' .*not set or empty"),
    ],
)
def test_a_start_up_error_is_one_line(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLANK", " ")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert main(arguments.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line


def test_a_port_in_use_is_one_line_and_its_server_keeps_running(
    start: Callable[..., Server],
) -> None:
    server = start(JPEG)
    port = server.url.rpartition(":")[2]
    second = subprocess.run(
        [sys.executable, "-m", "reward_server", "--rewards", JPEG, "--port", port],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 2
    assert second.stdout == ""
    [line] = second.stderr.splitlines()
    assert line.startswith(f"error: --port={port} on 127.0.0.1 ")
    assert server.get("/healthz").json() == {"status": "ok"}


def test_it_needs_no_torch(stub_folder: Path) -> None:
    code = f"""if True:
        import sys
        from flow_grpo.rewards import build_scorers
        from reward_server import serve
        from reward_server.limits import Limits
        build_scorers(["{JPEG}"])
        serve.create_app(serve.Service({{}}, limits=Limits()))
        print({{"torch", "diffusers", "transformers", "accelerate"}} & set(sys.modules))
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_all_routes_but_health_checks_require_the_token(start: Callable[..., Server]) -> None:
    token = "correct horse"
    server = start(JPEG, "--host", "0.0.0.0", "--token-env", "SECRET", SECRET=f"{token}\n")
    assert server.banner == f"serving {JPEG} on {server.url}"
    server.url = server.url.replace("0.0.0.0", "127.0.0.1")
    assert server.get("/healthz").status_code == 200
    assert server.get("/readyz").status_code == 200
    wrong = (None, "Bearer", "Bearer ", "Bearer wrong", f"Basic {token}", f"Bearer {token}x", token)
    for header in wrong:
        headers = {"Authorization": header} if header else {}
        for response in (
            server.get("/v1/rewards", headers=headers),
            server.get("/v1/nothing", headers=headers),
            server.get("/metrics", headers=headers),
            server.score(body(JPEG, "a"), headers=headers),
            server.post(b" " * 5_000_000, **headers),
        ):
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "unauthorized"
            assert token not in response.text
    for header in (f"Bearer {token}", f"bearer {token}"):
        headers = {"Authorization": header}
        assert server.get("/v1/rewards", headers=headers).status_code == 200
        assert server.get("/metrics", headers=headers).status_code == 200
        assert server.score(body(JPEG, "a"), headers=headers).status_code == 200


def test_the_server_responds_while_a_reward_is_starting(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    options = f'{{"slow": {{"until": "{tmp_path / "warm"}"}}}}'
    custom = ("--custom", "slow=obedient:SlowToStart", "--options", options)
    server = start(f"{JPEG},slow", *custom, wait=False)
    assert server.banner == f"serving {JPEG}, slow on {server.url}"
    assert server.get("/healthz").json() == {"status": "ok"}
    wait_until(lambda: server.get("/v1/rewards").json()["rewards"][0]["ready"])
    for response in (server.get("/readyz"), server.score(body("slow", "a"))):
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert response.json()["error"]["code"] == "starting"
        assert "'slow'" in response.json()["error"]["message"]
    assert server.score(body(JPEG, "a")).status_code == 200
    assert server.get("/v1/rewards").json()["rewards"][1] == {"name": "slow", "ready": False}
    (tmp_path / "warm").touch()
    server.wait_until_ready()
    assert server.score(body("slow", "a")).json()["scores"] == [1.0]


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("Unusable", "the weights are gone"),
        ("wrong_count", "it returned scores of shape (2,) for 1 images; it must return one number"),
    ],
)
def test_a_user_error_in_the_warm_up_stops_the_server(
    start: Callable[..., Server], scorer: str, message: str
) -> None:
    server = start("mine", "--custom", f"mine=obedient:{scorer}", wait=False)
    code, stderr = server.end()
    assert code == 2
    assert stderr.startswith(f"error: reward 'mine': {message}")
    assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_accepted_requests_are_completed_before_exit(
    start: Callable[..., Server], tmp_path: Path, number: int
) -> None:
    server = start("obey")
    go = tmp_path / "go"
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(server.score, body("obey", f"wait {go}"))
        wait_until((tmp_path / "go.started").exists)
        waiting = threads.submit(server.score, body("obey", "abc", "de"))
        wait_until(lambda: server.metric("queue_images") == 3)
        server.signal(number)
        wait_until(lambda: server.get("/readyz").status_code == 503)
        time.sleep(0.5)  # long enough to close the socket, which it must not do
        for response in (server.get("/readyz"), server.score(body("obey", "a"))):
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert response.json()["error"]["code"] == "shutting_down"
        assert server.get("/healthz").status_code == 200
        go.touch()
        assert running.result().status_code == 200
        assert waiting.result().json()["scores"] == [3.0, 2.0]
    code, stderr = server.end()
    assert code == 0, stderr
    assert "Traceback" not in stderr
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/healthz", timeout=5)


def test_a_second_signal_exits_at_once(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start("obey")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.score, body("obey", f"wait {tmp_path / 'never'}"))
        wait_until((tmp_path / "never.started").exists)
        server.signal()
        wait_until(lambda: server.get("/readyz").status_code == 503)
        server.signal()
        code, _ = server.end()
        assert code == 130  # not 0: requests were pending
        assert running.exception() or running.result().status_code == 500


def test_worker_processes_exit_with_the_server(start: Callable[..., Server]) -> None:
    server = start("ocr", "--workers", "2")
    workers = server.children()
    assert len(workers) == 2  # both were started before the first request
    server.signal()
    code, stderr = server.end()
    assert code == 0, stderr
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
