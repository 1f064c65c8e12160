"""Run torchrun or `accelerate launch` and exit with the code of the training processes.

    python scripts/multi_node/launch.py torchrun|accelerate ARGUMENTS...

Both launchers always exit with 1 and a report of thirty lines. A scheduler has to distinguish a run
that was stopped (75) from one that lost a node (4) or was configured incorrectly (2).
"""

import logging
import os
import signal
import sys

# No C++ stack traces of torch, which reads this on import. Unset again in main, so that the
# training processes can show theirs.
os.environ["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from flow_grpo.errors import LostPeer, RewardOutage, StoppedBySignal, UserError

# scripts/train.py has already printed the reason
REPORTED_EXIT_CODES = {
    UserError.exit_code,
    RewardOutage.exit_code,
    StoppedBySignal.exit_code,
    LostPeer.exit_code,
}
# exit codes of the other processes when one fails
SECONDARY_EXIT_CODES = {-signal.SIGTERM, StoppedBySignal.exit_code, LostPeer.exit_code}


def main(launcher: str, arguments: list[str]) -> int:
    """Launch the training processes and return the exit code of this script."""
    if os.environ["TORCH_CPP_LOG_LEVEL"] == "FATAL":
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    logging.disable(logging.ERROR)  # the launchers log the report that this script replaces
    try:
        launch(launcher, arguments)
    except ChildFailedError as error:
        return report_failure(error)
    except SignalException:  # forwarded to the processes, which had time to save a checkpoint
        return StoppedBySignal.exit_code
    except DistError as error:
        print_error(
            f"the nodes could not connect ({first_line(error)}); start all of them with the same "
            "--nodes, --master-addr and --master-port, a port that is free on node 0"
        )
        return LostPeer.exit_code
    except (ImportError, OSError, ValueError) as error:  # invalid launcher arguments
        print_error(first_line(error))
        return UserError.exit_code
    return 0


def launch(launcher: str, arguments: list[str]) -> None:
    """Run the launcher in this process; it returns when the training processes have ended."""
    if launcher == "torchrun":
        from torch.distributed.run import parse_args, run

        run(parse_args(arguments))
    else:
        from accelerate.commands.launch import launch_command, launch_command_parser

        launch_command(launch_command_parser().parse_args(arguments))


def report_failure(error: ChildFailedError) -> int:
    """Print which process failed first, unless it printed the reason; return the exit code."""
    failures = sorted(error.failures.values(), key=lambda f: f.timestamp)
    failure = next((f for f in failures if f.exitcode not in SECONDARY_EXIT_CODES), failures[0])
    code, process = failure.exitcode, f"process {failure.local_rank} of this node"
    if code in REPORTED_EXIT_CODES:
        return code
    if code > 0:
        print_error(f"{process} exited with code {code}")
        return code
    name = signal.Signals(-code).name
    hints = {
        "SIGKILL": "; it may have run out of host memory",
        "SIGABRT": "; NCCL aborts when it loses contact with another process",
    }
    print_error(f"{process} was killed by {name}{hints.get(name, '')}")
    return 128 - code


def print_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
