"""Graceful shutdown on SIGTERM and SIGINT: finish the current step, then stop."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.config.error_reporting import STOP_SIGNALS
from flow_grpo.perf.transfer import start_copy_to_cpu, to_device


class StopRequested(Exception):
    """Raised between two steps, at the same step on all processes."""


class StopSignals:
    """Context manager that records stop signals.

    It works in the main thread only, where Python runs signal handlers. A second Ctrl-C interrupts
    immediately; a second SIGTERM does not, because schedulers and torchrun both send one.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.received = False
        self._previous_flag: Callable[[], Tensor] | None = None  # sum over ranks at the last check
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self, *, now: bool = False) -> None:
        """Raise StopRequested if any process received a signal. Call it on all, between steps.

        With several processes the flag of the previous check decides, because reading the current
        one would wait for the device; `now` reads it nevertheless.
        """
        received = self.received
        if self._accelerator.num_processes > 1:
            flag = to_device(torch.tensor(float(received)), self._accelerator.device)
            current = start_copy_to_cpu(self._accelerator.reduce(flag, "sum"))
            decisive = current if now else self._previous_flag
            self._previous_flag = current
            received = decisive is not None and decisive().item() > 0
        if received:
            raise StopRequested

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
