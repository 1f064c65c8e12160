"""Import this before all else, which takes seconds: until `command_line` takes over, Ctrl-C and
SIGTERM end the process at once, in one line. Nothing has begun yet that needs an orderly end.

A process that torchrun or accelerate started receives SIGTERM when the launcher dies, even of
`kill -9`: nothing else would end it, and it would continue to occupy its GPU.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

from flow_grpo.errors import Stopped


def _leave(number: int, _: FrameType | None) -> None:
    # not by an exception: libraries catch those of what they try to import
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"stopped before it started; start it again with the same command\n")
    os._exit(Stopped.exit_code)


def _end_with_launcher() -> None:
    """Ask Linux to send SIGTERM to this process when its parent ends (prctl(2))."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


_end_with_launcher()
for _number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(_number, _leave)
