"""Exit immediately on Ctrl-C and SIGTERM during imports, which take seconds.

Import this module first. `command_line` replaces the handlers later; until then nothing has started
that needs an orderly shutdown. A process started by torchrun or accelerate also asks for SIGTERM
when its launcher dies, even by `kill -9`: otherwise it would continue to occupy its GPU.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

from flow_grpo.errors import StoppedBySignal


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    # not an exception: libraries catch those around optional imports
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted at startup; start it again with the same command\n")
    os._exit(StoppedBySignal.exit_code)


def _terminate_with_launcher() -> None:
    """Ask Linux to send SIGTERM to this process when its parent exits (prctl(2))."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


_terminate_with_launcher()
for _number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(_number, _exit_on_signal)
