"""Isolated environments of rewards whose packages are incompatible with those of the trainer.

An environment is a virtual environment with the pinned packages of a lock file in this directory.
`flow-grpo reward-env NAME` creates it (create.py); with `reward_servers={'deqa': 'env:deqa'}` a run
starts a reward server in it (workers/environment.py).

The first comment lines of a lock file name its rewards and the versions of Python that it supports:

    # rewards: deqa
    # python: >=3.11,<3.13
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flow_grpo.errors import UserError, did_you_mean

SCHEME = "env:"  # of a URL in reward_servers
FOLDER_VARIABLE = "FLOW_GRPO_REWARD_ENVS"
RECORD = "flow_grpo_env.json"  # written last: an environment without it is incomplete
LOCK_FILES = Path(__file__).parent
HEADER = re.compile(r"^# (\w+): (.+)$", re.M)


@dataclass(frozen=True)
class Environment:
    """An environment that can be created.

    Args:
        name: Name of the environment and of its lock file.
        lock: Path of the lock file, pip's requirements with exact versions.
        rewards: Rewards that it is meant for.
        python: Supported versions of Python, as a version specifier.
    """

    name: str
    lock: Path
    rewards: tuple[str, ...]
    python: str

    @property
    def folder(self) -> Path:
        """Return where the environment is, or will be."""
        return environments_folder() / self.name

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin/python"

    def checksum(self) -> str:
        """Return the SHA-256 of the lock file."""
        return hashlib.sha256(self.lock.read_bytes()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return how the environment was created; {} if it is incomplete."""
        try:
            record = json.loads((self.folder / RECORD).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def is_complete(self) -> bool:
        """Return whether it was made from this lock file, passed its health check and can run."""
        return self.record().get("lock") == self.checksum() and self.interpreter.is_file()


def environments_folder() -> Path:
    """Return the directory of all environments: FLOW_GRPO_REWARD_ENVS, or one in ~/.cache."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flow_grpo" / "reward-envs"


def environment_names() -> list[str]:
    """Return the names of the environments that can be created."""
    return sorted(path.stem for path in LOCK_FILES.glob("*.txt"))


def get_environment(name: str, field: str = "environment") -> Environment:
    """Return an environment by name; raise a UserError for an unknown one.

    Args:
        name: Its name.
        field: Setting or argument that names it, for the message.
    """
    names = environment_names()
    if name not in names:
        raise UserError(
            f"is not an environment; choose from {', '.join(names)}",
            field=field,
            value=name,
            hint=did_you_mean(name, names),
        )
    lock = LOCK_FILES / f"{name}.txt"
    header = dict(HEADER.findall(lock.read_text("utf-8")))
    rewards = tuple(re.split(r",\s*", header["rewards"]))
    return Environment(name, lock, rewards, header["python"])


def is_environment(url: str) -> bool:
    """Return whether a value of reward_servers names an environment instead of servers."""
    return url.strip().startswith(SCHEME)


def require_environment(url: str, reward: str) -> Environment:
    """Return the environment that a value of reward_servers names.

    Args:
        url: "env:NAME".
        reward: Reward that it serves, for the message.

    Raises:
        UserError: It is unknown, not made yet, damaged, or was made from another lock file.
    """
    field = f"reward_servers.{reward}"
    found = get_environment(url.strip().removeprefix(SCHEME), field)
    if not found.is_complete():
        state = "was made from another lock file or is incomplete"
        if not found.folder.exists():
            state = "does not exist yet"
        elif not found.interpreter.is_file():  # a link to an interpreter that was removed
            state = f"has no interpreter {found.interpreter}"
        raise UserError(
            state, field=field, value=url, hint=f"create it: flow-grpo reward-env {found.name}"
        )
    return found
