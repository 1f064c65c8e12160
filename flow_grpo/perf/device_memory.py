"""Measure the free memory of a device."""

import torch

from flow_grpo.host_memory import available_memory


def free_memory(device: torch.device) -> int:
    """Return how many bytes torch can allocate on a device, including its cached memory."""
    if device.type != "cuda":
        return available_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
