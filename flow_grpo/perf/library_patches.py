"""Patches of diffusers' internals; nothing else in the project replaces functions of a library."""

import sys
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

import torch
from diffusers import ContextParallelConfig, ModelMixin
from diffusers.models import attention_dispatch, modeling_utils
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


def _ulysses_backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key and value, which may differ in length.

    The function of diffusers 0.42.1 requires as many keys as queries, which cross-attention between
    two modalities does not have.
    """
    config = ctx._parallel_config.context_parallel_config
    size, group = config.ulysses_degree, config._ulysses_mesh.get_group()
    exchange = attention_dispatch._all_to_all_single

    def to_heads(x: Tensor) -> Tensor:  # (B, T / N, H, D) to (B, T, H / N, D)
        parts = x.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4).contiguous()
        return exchange(parts, group).flatten(0, 1).transpose(0, 1).contiguous()

    def to_tokens(x: Tensor) -> Tensor:  # and back
        parts = x.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4).contiguous()
        return exchange(parts, group).flatten(0, 1).permute(1, 2, 0, 3).contiguous()

    query, key, value, *_ = ctx.backward_op(ctx, to_heads(gradient))
    return to_tokens(query), to_tokens(key), to_tokens(value), *[None] * 9


def enable_ulysses(
    transformer: ModelMixin,
    mesh: DeviceMesh,
    degree: int,
    plan: Mapping[str, Any] | None = None,
    whole_keys: Collection[str] = (),
) -> None:
    """Split the tokens of a diffusers transformer over the "ulysses" dimension of a mesh.

    Attention in the modules named `whole_keys` has queries of the own tokens, but all keys on each
    process: those of the prompt. It needs no exchange, which would repeat them N times, with the
    same result. `plan` replaces the transformer's own.

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
        transformer.enable_parallelism(config=config, cp_plan=plan)
    finally:
        torch.accelerator.device_count = count
        modeling_utils.logger.setLevel(level)
    attention_dispatch.TemplatedUlyssesAttention.backward = staticmethod(_ulysses_backward)
    for name, module in transformer.named_modules():
        if name.rpartition(".")[2] in whole_keys:
            module.processor._parallel_config = None
