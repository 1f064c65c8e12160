"""Patches of diffusers' internals; nothing else in the project replaces functions of a library."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from diffusers import ContextParallelConfig, ModelMixin
from diffusers.models import modeling_utils
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

DISPATCH_FUNCTION = "dispatch_attention_fn"  # in each of diffusers' transformer modules


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose backward pass makes the gradient contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def make_attention_gradients_contiguous(transformer: nn.Module) -> bool:
    """Make the gradients that reach the attention of a model contiguous.

    cuDNN attention silently computes wrong gradients if the incoming gradient is a slice of a wider
    tensor (torch 2.11).

    Returns:
        Whether all of the model's attention is patched. If not, the caller disables cuDNN
        attention.
    """
    processors = [m.processor for m in transformer.modules() if hasattr(m, "processor")]
    modules = {sys.modules[type(processor).__module__] for processor in processors}
    for module in modules:
        dispatch = getattr(module, DISPATCH_FUNCTION, None)
        if dispatch is not None and not hasattr(dispatch, "has_contiguous_gradient"):
            setattr(module, DISPATCH_FUNCTION, _with_contiguous_gradient(dispatch))
    return bool(modules) and all(hasattr(module, DISPATCH_FUNCTION) for module in modules)


def _with_contiguous_gradient(dispatch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an attention function so that it receives contiguous gradients in the backward pass."""

    @wraps(dispatch)
    def attend(*args: Any, **options: Any) -> Tensor:
        return _ContiguousGradient.apply(dispatch(*args, **options))

    attend.has_contiguous_gradient = True
    return attend


def enable_ulysses(transformer: ModelMixin, mesh: DeviceMesh, degree: int) -> None:
    """Split the tokens of a diffusers transformer over the "ulysses" dimension of a mesh.

    On a machine without an accelerator, diffusers would divide by the number of devices, 0. Its
    warning that the method is experimental is not for the user.

    Raises:
        ValueError: If the attention backend does not support it.
    """
    config = ContextParallelConfig(ulysses_degree=degree, mesh=mesh)
    count, level = torch.accelerator.device_count, modeling_utils.logger.level
    torch.accelerator.device_count = lambda: max(1, count())
    modeling_utils.logger.setLevel("ERROR")
    try:
        transformer.enable_parallelism(config=config)
    finally:
        torch.accelerator.device_count = count
        modeling_utils.logger.setLevel(level)
