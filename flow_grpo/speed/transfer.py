"""Tensors to the device and back, without waiting for what it is doing."""

from collections.abc import Callable

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On `device`; only from pinned memory does the host not wait for the copy."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def fetch(tensor: Tensor) -> Callable[[], Tensor]:
    """A function that gives it on the CPU. From a GPU it is on its way when this returns, ahead of
    what the GPU is asked to do next."""
    if not tensor.is_cuda:
        return lambda: tensor
    copy = tensor.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(tensor.device))

    def arrive() -> Tensor:
        arrived.synchronize()
        return copy

    return arrive
