"""A server process and the requests that tests send to it."""

import base64
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import requests
from PIL import Image

ROOT = Path(__file__).parents[2]
TIMEOUT = 60


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def error(response: requests.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return base64.b64encode(buffer.getvalue()).decode()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


GOOD = encoded(Image.new("RGB", (8, 8), "red"))


def body(reward: str, *prompts: str, image: str = GOOD, **fields: Any) -> dict[str, Any]:
    images = [image] * len(prompts)
    return {"reward": reward, "images": images, "prompts": list(prompts), **fields}


class Server:
    """`python -m reward_server` on a free port; `path` holds modules for --custom."""

    def __init__(self, rewards: str, *arguments: str, path: Path, **environment: str) -> None:
        self.session = requests.Session()
        self._command = [sys.executable, "-m", "reward_server", "--rewards", rewards, *arguments]
        self._environment = {**os.environ, "PYTHONPATH": str(path), **environment}
        self.start(port=0)

    def start(self, port: int) -> None:
        self.process = subprocess.Popen(
            [*self._command, "--port", str(port)],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.banner = self.process.stdout.readline().strip()
        self.url = self.banner.rpartition(" ")[2]

    def restart(self) -> None:
        """Start a killed server again on the same port."""
        self.start(port=int(self.url.rpartition(":")[2]))

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.get("/readyz").status_code == 200, TIMEOUT)

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.session.get(self.url + path, timeout=TIMEOUT, **options)

    def score(self, content: dict[str, Any], **options: Any) -> requests.Response:
        """Post to /v1/score outside the session, so that several threads can do so."""
        return requests.post(f"{self.url}/v1/score", json=content, timeout=TIMEOUT, **options)

    def post(self, data: Any, **headers: str) -> requests.Response:
        headers = {"Content-Type": "application/json", **headers}
        return requests.post(f"{self.url}/v1/score", data=data, headers=headers, timeout=TIMEOUT)

    def metric(self, name: str, **labels: str) -> float:
        """Return a `reward_server_` metric, summed over the labels that are not given."""
        lines = self.get("/metrics").text.splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        pattern = rf"reward_server_{name}({{.*}})? "
        found = [line for line in lines if re.match(pattern, line)]
        return sum(float(line.split()[-1]) for line in found if all(w in line for w in wanted))

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Return the resident memory: VmRSS is the current value, VmHWM the peak."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{field}:\s+(\d+)", status).group(1)) / 1024

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def kill_children(self) -> None:
        """Kill the workers, as the kernel does when the machine runs out of memory."""
        children = self.children()
        for child in children:
            os.kill(child, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, children)))

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=TIMEOUT)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the process to end; return its exit code and stderr."""
        _, stderr = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, stderr

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.session.close()
        self.process.kill()
        # the pipes are closed if it has already ended, and open as long as its children live
        with contextlib.suppress(ValueError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=TIMEOUT)
