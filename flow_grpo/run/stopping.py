"""SIGTERM and SIGINT: finish the step at hand, then leave in good order."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.config.mistakes import SIGNALS
from flow_grpo.speed.transfer import fetch, send


class StopRequested(Exception):
    """Raised between two steps, on all processes at the same one."""


class StopSignals:
    """Notes the signals while it is entered, in the main thread: Python lets no other handle them.
    A second Ctrl-C does what it always did; a second SIGTERM does not: schedulers and torchrun both
    send one."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.received = False
        self._told: Callable[[], Tensor] | None = None  # what all knew at the last check
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Between two steps, on all processes: raise if any of them was asked to stop.

        Several processes go by what they knew at the check before: to ask what they know now would
        be to wait for the device.
        """
        received = self.received
        if self._accelerator.num_processes > 1:
            flag = send(torch.tensor(float(received)), self._accelerator.device)
            told, self._told = self._told, fetch(self._accelerator.reduce(flag, "sum"))
            received = told is not None and told().item() > 0
        if received:
            raise StopRequested

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
