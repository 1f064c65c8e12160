"""Copies between CPU and GPU that do not block the host."""

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy to `device`, through pinned memory so that the host does not wait for a GPU."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def start_copy_to_cpu(tensor: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the CPU, ahead of later work on the GPU.

    Returns:
        A function that waits for the copy and returns it.
    """
    if not tensor.is_cuda:
        return lambda: tensor
    copy = tensor.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        arrived.synchronize()
        return copy

    return wait
