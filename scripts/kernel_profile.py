"""Measure GPU time by kernel class, for `--profile` of the benchmark scripts."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from flow_grpo.training.metrics import synchronized_time

# The first pattern that occurs in a kernel's name decides its class.
CLASSES = {
    "attention": r"flash|sdpa|fmha|attention|flex",
    "FP8 matrix products": r"nvjet\w*_qq|e4m3|fp8",
    "convolutions": r"fprop|dgrad|wgrad|conv",
    "matrix products": r"nvjet|gemm|cutlass|splitK|gemv",
    "norms, quantization, elementwise": r"triton|elementwise|reduce|norm|softmax|copy_kernel",
    "copies": r"Memcpy|Memset",
}


def kernel_class(name: str) -> str:
    """Return the class of a kernel."""
    found = (title for title, words in CLASSES.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "others")


def profile_call(device: torch.device, call: Callable[[], Any]) -> dict[str, Any]:
    """Run `call` once under torch's profiler.

    Returns:
        Seconds of the call; milliseconds of GPU time by kernel class, including idle time, largest
        first; and the ten kernels that took the most time.
    """
    start = synchronized_time(device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        seconds = synchronized_time(device) - start
    kernels = {e.key: e for e in recorded.key_averages() if e.self_device_time_total > 0}
    classes: Counter[str] = Counter()
    for name, event in kernels.items():
        classes[kernel_class(name)] += event.self_device_time_total / 1e3
    classes["idle"] = max(0.0, 1e3 * seconds - sum(classes.values()))
    slowest = sorted(kernels.values(), key=lambda e: e.self_device_time_total, reverse=True)
    return {
        "seconds": round(seconds, 4),
        "milliseconds": {name: round(value, 2) for name, value in classes.most_common()},
        "slowest": [
            {
                "kernel": event.key[:100],
                "ms": round(event.self_device_time_total / 1e3, 2),
                "calls": event.count,
            }
            for event in slowest[:10]
        ],
    }
