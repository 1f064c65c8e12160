"""A forward pass, and its backward pass, as CUDA graphs: one launch in place of thousands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flow_grpo.errors import UserError

WARM_UP = 2  # runs before a recording: they compile, and choose kernels


class Replayed:
    """The `forward` of a module, recorded at the first call of its kind and replayed thereafter.

    A kind is the shapes of the tensors, with or without gradients, with or without LoRA. Weights
    must be changed in place. Only the last forward with gradients can be taken back: its
    activations are where the next one writes its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._recordings: dict[tuple, _Recording] = {}
        # Forwards without gradients share their memory: none outlives its call.
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, **inputs: Any) -> tuple[Tensor]:
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        with_lora = self._trained[0].requires_grad
        with_gradient = with_lora and torch.is_grad_enabled()
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
        kind = (with_gradient, with_lora, shapes)
        if kind not in self._recordings:
            self._recordings[kind] = _Recording(
                lambda static: self._forward(**{**inputs, **static}),
                {name: tensor.clone() for name, tensor in tensors.items()},
                self._trained if with_gradient else [],
                None if with_gradient else self._pool,
            )
        return (self._recordings[kind](tensors),)


class _Recording:
    def __init__(
        self,
        forward: Callable[[dict[str, Tensor]], tuple[Tensor]],
        inputs: dict[str, Tensor],
        trained: list[nn.Parameter],
        pool: tuple[int, int] | None,
    ) -> None:
        self.inputs, self.trained = inputs, trained
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.turn = 0
        with _on_side_stream():
            for _ in range(WARM_UP):
                (output,) = forward(inputs)
                if trained:
                    torch.autograd.grad(output, trained, torch.zeros_like(output))
                del output
        with _recording(self.forward, pool):
            (output,) = forward(inputs)
        self.output = output.detach()
        if trained:
            self.incoming = torch.zeros_like(self.output)
            with _recording(self.backward, self.forward.pool()):
                gradients = torch.autograd.grad(output, trained, self.incoming)
                self.gradient = torch.cat([gradient.flatten() for gradient in gradients])

    def __call__(self, tensors: dict[str, Tensor]) -> Tensor:
        for name, tensor in tensors.items():
            self.inputs[name].copy_(tensor)
        self.turn += 1
        if self.trained:
            return _Replay.apply(self, *self.trained)
        self.forward.replay()
        return self.output.clone()

    def take_back(self, incoming: Tensor) -> Iterator[Tensor]:
        """The gradient of each trained weight."""
        self.incoming.copy_(incoming)
        self.backward.replay()
        parts = self.gradient.clone().split([p.numel() for p in self.trained])
        return (part.view_as(p) for part, p in zip(parts, self.trained, strict=True))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _Recording, *trained: Tensor) -> Tensor:
        ctx.recording, ctx.turn = recording, recording.turn
        recording.forward.replay()
        return recording.output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.turn != ctx.recording.turn:
            raise RuntimeError("another forward was replayed since; its activations are gone")
        return (None, *ctx.recording.take_back(incoming))


@contextmanager
def _on_side_stream() -> Iterator[None]:
    """As recordings are made: lazy set-up is done per stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: tuple[int, int] | None) -> Iterator[None]:
    try:
        # rewards may use the device meanwhile, in threads of their own
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the model cannot be made a CUDA graph: {reason}; set --config.cuda_graphs=False"
        ) from error
