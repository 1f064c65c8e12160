"""Reward that is computed by a server in an isolated environment, which the run starts and stops.

The run opens the listening socket and passes it to the server. Requests that arrive while the
server loads its model, or is restarted after a crash, wait in the socket's backlog: the port never
changes, and no other process can take it.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import requests

from flow_grpo.errors import UserError, first_line
from flow_grpo.rewards.environments import Environment
from flow_grpo.rewards.failure import FailurePolicy
from flow_grpo.rewards.workers.remote import RemoteScorer
from flow_grpo.rewards.workers.supervisor import KILL_SIGNAL

log = logging.getLogger(__name__)

START_TIMEOUT = 1800.0  # seconds; the server may download weights
POLL_SECONDS = 1.0  # timeout of one request for readiness, and the pause after it
LOG_SECONDS = 30.0  # between two lines about a server that is not ready
MIN_RESTART_DELAY, MAX_RESTART_DELAY = 1.0, 60.0  # seconds; doubles while the server keeps dying
STOP_TIMEOUT = 10.0  # seconds for the supervisor to kill the server
BACKLOG = 128
# Set by launchers and shells for this interpreter.
FOREIGN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def clean_variables() -> dict[str, str]:
    """Return the environment variables of processes in an isolated environment."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    return {**kept, "PYTHONSAFEPATH": "1"}  # the current directory is not on the path


class EnvironmentServer:
    """A reward server in an environment; it is restarted when it dies, and ends with this process.

    Args:
        environment: A complete environment.
        reward: The reward that it serves.
        options: Options of the reward.
        device: Device of its model.
    """

    def __init__(
        self, environment: Environment, reward: str, *, options: Mapping[str, Any], device: str
    ) -> None:
        self._name = f"the server of reward {reward!r} in the environment {environment.name}"
        self._command = [str(environment.interpreter), "-m", "reward_server"]
        self._command += ["--rewards", reward, "--device", device]
        self._command += ["--options", json.dumps({reward: dict(options)} if options else {})]
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closed = threading.Event()
        self._ready = False
        self._start_error = ""
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()
        # The server is killed when the thread that started it ends (PR_SET_PDEATHSIG).
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Return the process id of the supervisor of the running server, if there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def wait_until_ready(self) -> None:
        """Wait until the server has built its scorer.

        Raises:
            UserError: The server ended before it was ready, or takes too long.
        """
        deadline = time.monotonic() + START_TIMEOUT
        next_line = time.monotonic() + LOG_SECONDS
        with requests.Session() as session:
            session.trust_env = False  # proxies are not for this machine
            while not self._ready:
                if self._start_error:
                    raise UserError(self._start_error)
                state = self._query(session)
                if time.monotonic() > deadline:
                    raise UserError(f"{self._name} is not ready after {START_TIMEOUT:g} s: {state}")
                if time.monotonic() > next_line:
                    log.info("waiting for %s: %s", self._name, state)
                    next_line += LOG_SECONDS

    def _query(self, session: requests.Session) -> str:
        """Ask the server once whether it can score now; return why not."""
        try:
            response = session.get(f"{self.url}/readyz", timeout=POLL_SECONDS)
        except requests.RequestException:
            return "it is loading"
        self._ready = response.status_code == requests.codes.ok
        if not self._ready:
            self._closed.wait(POLL_SECONDS)
        return response.text[:200]

    def close(self) -> None:
        """Stop the server."""
        with self._lock:
            self._closed.set()
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(KILL_SIGNAL)
        self._thread.join()
        self._listener.close()

    def _keep_running(self) -> None:
        """Restart the server whenever it ends, until `close` or a failure of the first start."""
        delay = MIN_RESTART_DELAY
        while not self._closed.is_set():
            started = time.monotonic()
            reason = self._run()
            if self._closed.is_set():
                return
            if not self._ready:
                self._start_error = f"{self._name} failed: {reason}"
                return
            if time.monotonic() - started > MAX_RESTART_DELAY:
                delay = MIN_RESTART_DELAY
            log.warning("%s ended (%s); restarting it in %g s", self._name, reason, delay)
            self._closed.wait(delay)
            delay = min(2 * delay, MAX_RESTART_DELAY)

    def _run(self) -> str:
        """Run the server until it ends, and return why it ended or could not start."""
        with self._lock:
            if self._closed.is_set():
                return ""
            try:
                self._process = self._start()
            except OSError as error:  # no interpreter, or no memory for a process
                return first_line(error)
        error = self._forward_errors(self._process)
        code = self._wait(self._process)
        return error or f"exit code {code}"

    def _start(self) -> subprocess.Popen:
        descriptor = self._listener.fileno()
        return subprocess.Popen(
            [*self._command, "--fd", str(descriptor), "--parent-pid", str(os.getpid())],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=clean_variables(),
        )

    def _forward_errors(self, process: subprocess.Popen) -> str:
        """Copy the server's log until it ends; return its user error, if it reported one."""
        error = ""
        for line in process.stderr:
            if line.startswith("error: "):
                error = line.removeprefix("error: ").strip()
            elif not line.startswith("INFO "):
                sys.stderr.write(line)
        process.stderr.close()
        return error

    def _wait(self, process: subprocess.Popen) -> int:
        """Return the exit code; the supervisor ends once it has killed all processes."""
        try:
            return process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:  # stopped by a signal, or in an uninterruptible call
            process.kill()
            return process.wait()


class EnvironmentScorer(RemoteScorer):
    """Scores samples on an `EnvironmentServer`, which `close` stops.

    Args:
        name: Name of the reward.
        environment: Where it is computed.
        options: Options of the reward.
        device: Device of its model.
        policy: Attempts and timeout.
        frames: Frame rule, as for `RemoteScorer`.
    """

    def __init__(
        self,
        name: str,
        environment: Environment,
        *,
        options: Mapping[str, Any],
        device: str,
        policy: FailurePolicy,
        frames: str | None = None,
    ) -> None:
        self.server = EnvironmentServer(environment, name, options=options, device=device)
        try:
            self.server.wait_until_ready()
            super().__init__(name, self.server.url, policy=policy, frames=frames)
        except BaseException:
            self.server.close()
            raise

    def close(self) -> None:
        self.server.close()
