"""Capture and replay of forward and backward passes as CUDA graphs.

A graph launches the thousands of kernels of a pass at once, which saves the time that the CPU needs
to launch them one by one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from flow_grpo.errors import UserError, first_line
from flow_grpo.perf.lora import is_plain_lora, lora_layers

WARMUP_RUNS = 2  # runs before a capture, which compile code and select kernels


class CudaGraphPool:
    """Stream and memory that all graphs share.

    A replay may overwrite the activations of another graph.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.replay_count = 0

    @contextmanager
    def warmup_stream(self) -> Iterator[None]:
        """Use the stream of the captures, because libraries initialize themselves per stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the work in the context into `graph`.

        Raise a UserError if it cannot be captured.
        """
        try:
            # "thread_local": rewards may use the device in other threads at the same time
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                yield
        except RuntimeError as error:
            cause = error.__context__ or error  # ending an interrupted capture raises as well
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise UserError(
                f"the model cannot be captured in a CUDA graph: {first_line(cause)}",
                hint="set --config.cuda_graphs=False",
            ) from error

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph and count it, so that stale activations of other graphs are detected."""
        self.replay_count += 1
        graph.replay()


class _Model(nn.Module):
    """A module that computes with copies of its LoRA weights, in the dtype of the base weights.

    The weights are cast together, since separate casts are hundreds of small kernels in every pass.
    The copies are leaves of the autograd graph, so that no hook of DDP runs within a capture.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.eager_forward = module.forward
        self.trained = [p for p in module.parameters() if p.requires_grad]
        dtype = self.trained[0].dtype
        if all(map(is_plain_lora, lora_layers(module))):  # autocast would cast these weights
            dtype = next(p.dtype for p in module.parameters() if not p.requires_grad)
        self.compute_params = [p.detach().to(dtype).requires_grad_() for p in self.trained]
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        self.by_name = dict(zip(names, self.compute_params, strict=True))

    def forward(self, **inputs: Any) -> tuple[Tensor]:
        return self.eager_forward(**inputs)

    def run(self, inputs: dict[str, Any], *, with_lora: bool) -> Tensor:
        """Return the output of the module, with the current weights copied if `with_lora`."""
        if with_lora and self.compute_params[0].dtype != self.trained[0].dtype:
            with torch.no_grad():
                torch._foreach_copy_(self.compute_params, self.trained)
        return functional_call(self, self.by_name if with_lora else {}, kwargs=inputs)[0]


class CudaGraphForward:
    """Replacement for the `forward` of a module that captures and replays CUDA graphs.

    There is a graph for each combination of tensor shapes, other inputs, gradient mode and whether
    LoRA is enabled, captured on first use.

    Limitations: Weights must be changed in place. `backward()` must follow before another forward
    pass is replayed. `torch.autograd.grad` does not work, because without DDP gradients are added
    to `.grad` directly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._model = _Model(module)
        self.eager = self._model.eager_forward
        self._graphs: dict[tuple, _CapturedGraph] = {}
        self._memory = CudaGraphPool()

    def __call__(self, **inputs: Any) -> tuple[Tensor]:
        """Replay the graph for these inputs, which is captured on first use.

        Returns:
            A tuple with the output, like `forward(..., return_dict=False)`.
        """
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        with_lora = self._model.trained[0].requires_grad
        with_gradient = with_lora and torch.is_grad_enabled()
        key = (with_gradient, with_lora, _graph_key(inputs))
        if key not in self._graphs:
            with torch.set_grad_enabled(with_gradient):
                self._graphs[key] = _CapturedGraph(
                    lambda static: self._model.run({**inputs, **static}, with_lora=with_lora),
                    {name: tensor.clone() for name, tensor in tensors.items()},
                    self._model.trained if with_gradient else [],
                    self._model.compute_params,
                    self._memory,
                )
        return (self._graphs[key](tensors),)


def _graph_key(inputs: dict[str, Any]) -> tuple:
    """Return what a graph depends on: shapes of tensors, and values of all other inputs."""
    key = []
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            key.append((name, value.shape, value.dtype))
        elif value is None or isinstance(value, bool | int | float | str):
            key.append((name, type(value), value))
        else:
            raise UserError(
                f"the model has the input {name}, a {type(value).__name__}, whose changes a CUDA "
                "graph would ignore",
                hint="set --config.cuda_graphs=False",
            )
    return tuple(key)


class _CapturedGraph:
    """The graphs of a forward pass and, if there are trained weights, of its backward pass.

    Args:
        forward: The function to capture, of tensors by name.
        inputs: Static inputs, which are overwritten before each replay.
        trained: Trained weights, empty without gradients.
        compute_params: Copies of them that `forward` uses.
        memory: Memory of all graphs of the module.
    """

    def __init__(
        self,
        forward: Callable[[dict[str, Tensor]], Tensor],
        inputs: dict[str, Tensor],
        trained: list[nn.Parameter],
        compute_params: list[Tensor],
        memory: CudaGraphPool,
    ) -> None:
        self.inputs, self.trained, self.memory = inputs, trained, memory
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with memory.warmup_stream():
            for _ in range(WARMUP_RUNS):
                output = forward(inputs)
                if trained:
                    torch.autograd.grad(output, compute_params, torch.zeros_like(output))
                del output
        with memory.capture(self.forward):
            output = forward(inputs)
        self.output = output.detach()
        if trained:
            self.grad_output = torch.zeros_like(self.output)
            with memory.capture(self.backward):
                gradients = torch.autograd.grad(output, compute_params, self.grad_output)
                self.gradient = torch.cat([gradient.flatten() for gradient in gradients])

    def __call__(self, tensors: dict[str, Tensor]) -> Tensor:
        for name, tensor in tensors.items():
            self.inputs[name].copy_(tensor)
        return _ReplayFunction.apply(self, *self.trained) if self.trained else self.run()

    def run(self) -> Tensor:
        self.memory.replay(self.forward)
        return self.output.clone()

    def replay_backward(self, grad_output: Tensor) -> list[Tensor]:
        """Return the gradient of each trained weight, given that of the output."""
        self.grad_output.copy_(grad_output)
        self.memory.replay(self.backward)
        gradient = self.gradient.to(self.trained[0].dtype, copy=True)
        parts = gradient.split([p.numel() for p in self.trained])
        return [part.view_as(p) for part, p in zip(parts, self.trained, strict=True)]


class _ReplayFunction(torch.autograd.Function):
    """Replays the graphs of a `_CapturedGraph` as the forward and backward pass of autograd."""

    @staticmethod
    def forward(ctx: Any, graph: _CapturedGraph, *trained: Tensor) -> Tensor:
        output = graph.run()
        ctx.graph, ctx.replay_count = graph, graph.memory.replay_count
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Replay the backward graph.

        Gradients are added to `.grad` directly, except where DDP needs them or there is no `.grad`
        yet.
        """
        if ctx.replay_count != ctx.graph.memory.replay_count:
            raise RuntimeError("another graph was replayed since; its activations are gone")
        trained, gradients = ctx.graph.trained, ctx.graph.replay_backward(grad_output)
        if distributed.is_initialized() or trained[0].grad is None:
            return (None, *gradients)
        # all at once, in a few kernels
        torch._foreach_add_([p.grad for p in trained], gradients)
        return (None, *(None for _ in trained))
