"""Create an isolated environment for a reward whose packages are incompatible with the trainer's.

    python scripts/reward_env.py                 # list the environments
    python scripts/reward_env.py deqa

The environment is a venv with the pinned packages of a lock file that ships with flow_grpo. A run
with --config.reward_servers="{'deqa': 'env:deqa'}" starts and stops a reward server in it.
Repeating the command checks the environment, and recreates it if the lock file has changed.
"""

import time

from flow_grpo.config import command_line
from flow_grpo.config.error_reporting import ScriptParser, print_text
from flow_grpo.rewards.environments import (
    FOLDER_VARIABLE,
    environment_names,
    environments_folder,
    get_environment,
)


def main() -> None:
    """Parse the command line, and list the environments or create one."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(environment_names()))
    parser.add_argument("--python", help="interpreter; default: this one")
    parser.add_argument(
        "--inherit",
        action="store_true",
        help="install nothing: isolate the process, but use the packages of this environment",
    )
    args = parser.parse_args()
    if args.name is None:
        print_text(list_environments())
        return
    command_line.call_and_exit(lambda: make(args.name, args.python, args.inherit), debug=False)


def list_environments() -> str:
    """Return a line per environment."""
    lines = []
    for name in environment_names():
        found = get_environment(name)
        state = "ready" if found.is_complete() else "missing"
        lines.append(
            f"{name:12}  {state:8}  rewards {', '.join(found.rewards)}; Python {found.python}"
        )
    folder = f"They are in {environments_folder()} ({FOLDER_VARIABLE})."
    return "\n".join([*lines, "", folder])


def make(name: str, python: str | None, inherit: bool) -> None:
    """Make and check an environment, and print how a run uses it."""
    from flow_grpo.rewards.environments.create import make_environment

    environment = get_environment(name, "NAME")
    start = time.monotonic()
    make_environment(environment, python=python, inherit=inherit, log=print_text)
    print_text(f"{environment.folder} works ({time.monotonic() - start:.0f} s)")
    for reward in environment.rewards:
        print_text(f"use it with --config.reward_servers=\"{{'{reward}': 'env:{name}'}}\"")


if __name__ == "__main__":
    main()
