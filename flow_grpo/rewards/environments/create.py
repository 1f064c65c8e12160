"""Create an isolated environment: venv, pinned packages, health check."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.errors import UserError, first_line
from flow_grpo.rewards.environments import FOLDER_VARIABLE, RECORD, Environment
from flow_grpo.rewards.registry import REWARDS
from flow_grpo.rewards.reward_check import check_reward
from flow_grpo.rewards.workers.environment import EnvironmentServer, clean_variables

PACKAGES = ("flow_grpo", "reward_server")  # linked into the environment
PACKAGE_ROOT = Path(__file__).parents[3]
VENV_FILE = "pyvenv.cfg"
IMPORT_SCORER = "from flow_grpo.rewards.custom import import_scorer; import_scorer({!r}, {!r})"
PROBE = "jpeg_compressibility"  # a reward that needs no model
Log = Callable[[str], None]


def make_environment(
    environment: Environment, *, python: str | None = None, inherit: bool = False, log: Log
) -> None:
    """Create an environment and check that a reward server works in it.

    Args:
        environment: What to make. One that is complete is only checked.
        python: Interpreter of the environment; None for that of a complete one, or this one.
        inherit: Install nothing: the environment sees the packages of this one. It isolates the
            process, but not the versions.
        log: Called with each step.

    Raises:
        UserError: The interpreter is unsupported, or pip or the health check fails.
    """
    with _lock(environment):
        kept = environment.record() if environment.is_complete() else {}
        python = python or kept.get("python") or sys.executable
        record = {
            "lock": environment.checksum(),
            "inherit": inherit,
            "python": os.path.realpath(shutil.which(python) or python),
        }
        if kept == record:
            log(f"{environment.folder} is up to date")
            (environment.folder / RECORD).unlink()  # incomplete unless the check succeeds
        else:
            _check_interpreter(environment, python)
            _make(environment, python, inherit, log)
        log("health check: importing the scorers, and scoring with a reward server")
        _check_imports(environment)
        _check_server(environment)
        write_text_atomic(environment.folder / RECORD, json.dumps(record, indent=2))


@contextmanager
def _lock(environment: Environment) -> Iterator[None]:
    """Keep two processes from creating the same environment at the same time."""
    path = environment.folder.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        rule = f"cannot be made: {first_line(error)}"
        hint = f"choose another directory with {FOLDER_VARIABLE}"
        raise UserError(rule, field=environment.folder, hint=hint) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                "is being created by another process", field=environment.folder, hint="wait for it"
            ) from error
        yield


def _check_interpreter(environment: Environment, python: str) -> None:
    """Reject an interpreter whose version the lock file does not support."""
    # not platform.python_version(), such as 3.13.0a5+, which is no valid version of a package
    code = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        version = Version(done.stdout.strip())
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise UserError("is not a Python interpreter", field="--python", value=python) from error
    if version not in SpecifierSet(environment.python):
        raise UserError(
            f"is Python {version}, but the environment {environment.name} needs Python "
            f"{environment.python}",
            field="--python",
            value=python,
            hint="pass another interpreter",
        )


def _make(environment: Environment, python: str, inherit: bool, log: Log) -> None:
    """Create the virtual environment and install its packages; replace an incomplete one."""
    folder = environment.folder
    if folder.exists() and not (folder / VENV_FILE).is_file():
        raise UserError("exists and is not a virtual environment", field=folder, hint="remove it")
    shutil.rmtree(folder, ignore_errors=True)
    log(f"creating {folder} with {python}")
    pip = ["--without-pip"] if inherit else []
    _run([python, "-m", "venv", *pip, str(folder)], "venv")
    site = _site_packages(environment)
    for name in PACKAGES:
        (site / name).symlink_to(PACKAGE_ROOT / name)
    if inherit:
        (site / "inherited.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        return
    log(f"installing {environment.lock.name} (this may take minutes)")
    pip = [str(environment.interpreter), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "-r", str(environment.lock)], "pip")
    _run([*pip, "check"], "pip check")


def _site_packages(environment: Environment) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(_run([str(environment.interpreter), "-c", code], "python").strip())


def _run(command: list[str], what: str) -> str:
    """Run a command and return its output; raise a UserError with its last error if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_variables(), stdin=subprocess.DEVNULL
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines or ["?"]
        raise UserError(f"{what} failed: {errors[-1]}", hint=f"the command was {' '.join(command)}")
    return done.stdout


def _check_imports(environment: Environment) -> None:
    """Import the classes of the environment's rewards in it."""
    for reward in environment.rewards:
        code = IMPORT_SCORER.format(reward, REWARDS.paths[reward])
        _run([str(environment.interpreter), "-c", code], f"importing reward {reward!r}")


def _check_server(environment: Environment) -> None:
    """Score example pairs with a reward server in the environment."""
    server = EnvironmentServer(environment, PROBE, options={}, device="cpu")
    try:
        server.wait_until_ready()
        result = check_reward(PROBE, options={}, server=server.url)
    finally:
        server.close()
    if not result.is_right:
        raise UserError(f"scores wrongly: {result.verdict()}", field=environment.folder)
