"""Import this before all else, which takes seconds: until `command_line` takes over, Ctrl-C and
SIGTERM end the process at once, in one line. Nothing has begun yet that needs an orderly end."""

import os
import signal
from types import FrameType

from flow_grpo.errors import Stopped


def _leave(number: int, _: FrameType | None) -> None:
    # not by an exception: libraries catch those of what they try to import
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"stopped before it started; start it again with the same command\n")
    os._exit(Stopped.exit_code)


for _number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(_number, _leave)
