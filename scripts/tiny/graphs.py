"""Run training steps as CUDA graphs: a small model is bound by kernel launches."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

WARMUP_STEPS = 3

Step = Callable[[torch.Generator], Tensor]


def capture_cuda_graph(step: Step, generator: torch.Generator) -> Callable[[], Tensor]:
    """Return `step` without arguments: a graph replay on CUDA, a plain call elsewhere.

    Args:
        step: Must read and write the same tensors each time, draw random numbers only from its
            generator, and first set gradients to None, so that the capture allocates them in the
            graph's pool. It runs a few times before it is captured.
        generator: Passed to `step`.
    """
    if generator.device.type != "cuda":
        return lambda: step(generator)
    try:
        return _capture(step, generator)
    except RuntimeError as error:
        warnings.warn(
            f"CUDA graph capture failed, training continues without it and is slower: {error}",
            stacklevel=2,
        )
    torch.cuda.synchronize()
    # A failed capture can leave the registered generator unusable.
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed() + 1)
    return lambda: step(fresh)


def _capture(step: Step, generator: torch.Generator) -> Callable[[], Tensor]:
    """Warm up and capture a step as a CUDA graph; return a function that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_STEPS):
            step(generator)
        # A step that synchronizes cannot be captured. Detect it here: an aborted capture may leave
        # CUDA in a bad state.
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(generator)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        loss = step(generator)

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay
