"""A forward pass, and its backward pass, as CUDA graphs: one launch in place of thousands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from flow_grpo.errors import UserError
from flow_grpo.speed.lora import is_plain, lora_layers

WARM_UP = 2  # runs before a recording: they compile, and choose kernels


class GraphMemory:
    """Which all recordings share: one may write where another had its activations."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.turn = 0  # counts what was replayed in it

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Libraries set themselves up for each stream anew."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    @contextmanager
    def record(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        try:
            # rewards may use the device meanwhile, in threads of their own
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                yield
        except RuntimeError as error:
            cause = error.__context__ or error  # a recording that breaks off has an error too
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            reason = str(cause).strip().splitlines()[0]
            raise UserError(
                f"the model cannot be made a CUDA graph: {reason}; set --config.cuda_graphs=False"
            ) from error

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        self.turn += 1
        graph.replay()


class _Model(nn.Module):
    """A module that computes with copies of its LoRA, in the precision of the rest.

    All are cast together: by themselves they would be hundreds of small kernels in every pass. The
    copies are leaves of their own, so that no hook of DDP runs within a recording.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.plain_forward = module.forward
        self.trained = [p for p in module.parameters() if p.requires_grad]
        dtype = self.trained[0].dtype
        if all(map(is_plain, lora_layers(module))):  # which autocast would cast
            dtype = next(p.dtype for p in module.parameters() if not p.requires_grad)
        self.used = [p.detach().to(dtype).requires_grad_() for p in self.trained]
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        self.by_name = dict(zip(names, self.used, strict=True))

    def forward(self, **inputs: Any) -> tuple[Tensor]:
        return self.plain_forward(**inputs)

    def run(self, inputs: dict[str, Any], *, with_lora: bool) -> Tensor:
        if with_lora and self.used[0].dtype != self.trained[0].dtype:
            with torch.no_grad():
                torch._foreach_copy_(self.used, self.trained)
        return functional_call(self, self.by_name if with_lora else {}, kwargs=inputs)[0]


class Replayed:
    """The `forward` of a module, recorded at the first call of its kind and replayed thereafter.

    A kind is the shapes of the tensors, the other inputs, with or without gradients, with or
    without LoRA. Weights must be changed in place. `backward()` works as long as nothing else was
    replayed, `autograd.grad` does not: without DDP, gradients go to where the weights have theirs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._model = _Model(module)
        self.plain = self._model.plain_forward
        self._recordings: dict[tuple, _Recording] = {}
        self._memory = GraphMemory()

    def __call__(self, **inputs: Any) -> tuple[Tensor]:
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        with_lora = self._model.trained[0].requires_grad
        with_gradient = with_lora and torch.is_grad_enabled()
        kind = (with_gradient, with_lora, _kind(inputs))
        if kind not in self._recordings:
            with torch.set_grad_enabled(with_gradient):
                self._recordings[kind] = _Recording(
                    lambda static: self._model.run({**inputs, **static}, with_lora=with_lora),
                    {name: tensor.clone() for name, tensor in tensors.items()},
                    self._model.trained if with_gradient else [],
                    self._model.used,
                    self._memory,
                )
        return (self._recordings[kind](tensors),)


def _kind(inputs: dict[str, Any]) -> tuple:
    """What a recording is made for: it would take any other value for the one it was made with."""
    kind = []
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            kind.append((name, value.shape, value.dtype))
        elif value is None or isinstance(value, bool | int | float | str):
            kind.append((name, type(value), value))
        else:
            raise UserError(
                f"the model takes {name}, a {type(value).__name__}, which a CUDA graph would never "
                "see change; set --config.cuda_graphs=False"
            )
    return tuple(kind)


class _Recording:
    def __init__(
        self,
        forward: Callable[[dict[str, Tensor]], Tensor],
        inputs: dict[str, Tensor],
        trained: list[nn.Parameter],
        used: list[Tensor],  # what `forward` takes for them
        memory: GraphMemory,
    ) -> None:
        self.inputs, self.trained, self.memory = inputs, trained, memory
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with memory.warm_up():
            for _ in range(WARM_UP):
                output = forward(inputs)
                if trained:
                    torch.autograd.grad(output, used, torch.zeros_like(output))
                del output
        with memory.record(self.forward):
            output = forward(inputs)
        self.output = output.detach()
        if trained:
            self.incoming = torch.zeros_like(self.output)
            with memory.record(self.backward):
                gradients = torch.autograd.grad(output, used, self.incoming)
                self.gradient = torch.cat([gradient.flatten() for gradient in gradients])

    def __call__(self, tensors: dict[str, Tensor]) -> Tensor:
        for name, tensor in tensors.items():
            self.inputs[name].copy_(tensor)
        return _Replay.apply(self, *self.trained) if self.trained else self.run()

    def run(self) -> Tensor:
        self.memory.replay(self.forward)
        return self.output.clone()

    def gradients_of(self, incoming: Tensor) -> list[Tensor]:
        """The gradient of each trained weight."""
        self.incoming.copy_(incoming)
        self.memory.replay(self.backward)
        gradient = self.gradient.to(self.trained[0].dtype, copy=True)
        parts = gradient.split([p.numel() for p in self.trained])
        return [part.view_as(p) for part, p in zip(parts, self.trained, strict=True)]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _Recording, *trained: Tensor) -> Tensor:
        output = recording.run()
        ctx.recording, ctx.turn = recording, recording.memory.turn
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.turn != ctx.recording.memory.turn:
            raise RuntimeError("something else was replayed since; the activations are gone")
        trained, gradients = ctx.recording.trained, ctx.recording.gradients_of(incoming)
        if distributed.is_initialized() or trained[0].grad is None:
            return (None, *gradients)
        # together, in a few kernels; only DDP has to see each of them
        torch._foreach_add_([p.grad for p in trained], gradients)
        return (None, *(None for _ in trained))
