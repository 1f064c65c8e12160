"""torchrun or `accelerate launch`, ending as the training processes did.

    python scripts/multi_node/launch.py torchrun|accelerate ARGUMENTS...

On their own both end with code 1 and a report of thirty lines, whatever happened. A scheduler has
to tell a run that was asked to stop (75) from one that lost a node (4) or was set up wrong (2).
"""

import logging
import os
import signal
import sys

# No stack traces of torch's C++ side, which reads this when imported. Taken back in main: the
# training processes may show theirs.
os.environ["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from flow_grpo.errors import LostPeer, RewardOutage, Stopped, UserError

# scripts/train.py has said why, in one line
TOLD = {UserError.exit_code, RewardOutage.exit_code, Stopped.exit_code, LostPeer.exit_code}
# what happens to the others when one process fails
CONSEQUENCES = {-signal.SIGTERM, Stopped.exit_code, LostPeer.exit_code}


def main(launcher: str, arguments: list[str]) -> int:
    if os.environ["TORCH_CPP_LOG_LEVEL"] == "FATAL":
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    logging.disable(logging.ERROR)  # what they log is in the report that this file replaces
    try:
        launch(launcher, arguments)
    except ChildFailedError as error:
        return tell_failure(error)
    except SignalException:  # passed on to the processes, which had time to leave in good order
        return Stopped.exit_code
    except DistError as error:
        tell(
            f"the nodes did not find each other ({first_line(error)}); start all of them, with "
            "the same --nodes, --master-addr and --master-port, a port that is free on node 0"
        )
        return LostPeer.exit_code
    except (ImportError, OSError, ValueError) as error:  # the launcher refuses its arguments
        tell(first_line(error))
        return UserError.exit_code
    return 0


def launch(launcher: str, arguments: list[str]) -> None:
    if launcher == "torchrun":
        from torch.distributed.run import parse_args, run

        run(parse_args(arguments))
    else:
        from accelerate.commands.launch import launch_command, launch_command_parser

        launch_command(launch_command_parser().parse_args(arguments))


def tell_failure(error: ChildFailedError) -> int:
    """Name the process that failed first, unless it has said why; returns the exit code."""
    failures = sorted(error.failures.values(), key=lambda f: f.timestamp)
    failure = next((f for f in failures if f.exitcode not in CONSEQUENCES), failures[0])
    code, process = failure.exitcode, f"process {failure.local_rank} of this node"
    if code in TOLD:
        return code
    if code > 0:
        tell(f"{process} ended with code {code}")
        return code
    name = signal.Signals(-code).name
    hints = {
        "SIGKILL": "; was there enough memory?",
        "SIGABRT": "; NCCL does that when it has lost another process",
    }
    tell(f"{process} was ended by {name}{hints.get(name, '')}")
    return 128 - code


def tell(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
