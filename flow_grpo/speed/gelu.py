"""The GELU that is made of a tanh, for compiled models: the compiler's tanh takes longer than to
read and write what goes through it."""

import math
from typing import Any

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

from flow_grpo.speed.compiler import OPEN

GAIN = math.sqrt(8 / math.pi)
CUBIC = 0.044715 * GAIN
BITS = -math.log2(math.e)  # 2 ** (BITS * y) is exp(-y)


# An operator for its gradient: torch's own, of these lines one by one, is twice as long.
@torch.library.custom_op("flow_grpo::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    """By a sigmoid."""
    return _gelu(x)


def _gelu(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * _gate(wide)).to(x.dtype)


def _gate(x: Tensor) -> Tensor:
    """The sigmoid, of what a GPU has an instruction for: a power of 2 and a root."""
    root = torch.rsqrt(1 + torch.exp2(x * (BITS * GAIN + BITS * CUBIC * x * x)))
    return root * root


@gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate = _gate(wide)
    slope = gate * (1 + (1 - gate) * wide * (GAIN + 3 * CUBIC * wide * wide))
    return (gradient * slope).to(gradient.dtype)


gelu.register_autograd(_gradient, setup_context=_keep_input)
OPEN[torch.ops.flow_grpo.gelu.default] = _gelu


class PlainGELU(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class ProductGELU(GELU):
    def gelu(self, gate: Tensor) -> Tensor:
        return gelu(gate)


class FusedGELU(ProductGELU):
    """A product and its GELU in one kernel, where nothing is kept for a backward pass."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(hidden_states)
        weight, bias = self.proj.weight, self.proj.bias
        flat = hidden_states.to(weight.dtype).flatten(0, -2)
        out = torch._addmm_activation(bias, flat, weight.t(), use_gelu=True)
        return out.unflatten(0, hidden_states.shape[:-1])


def replace_gelu(model: nn.Module) -> None:
    """In a model that is compiled: else torch's own is as fast."""
    for module in model.modules():
        if type(module) in (GELU, nn.GELU) and module.approximate == "tanh":
            product = FusedGELU if _is_fusible(module) else ProductGELU
            module.__class__ = PlainGELU if type(module) is nn.GELU else product


def _is_fusible(module: nn.Module) -> bool:
    """For GPUs in half precision: elsewhere torch's fused GELU is another one, or slower."""
    proj = getattr(module, "proj", None)
    if type(proj) is not nn.Linear or proj.bias is None:
        return False
    return proj.weight.is_cuda and proj.weight.dtype in (torch.float16, torch.bfloat16)
