"""GELU with the tanh approximation, written for compiled models on a GPU.

`0.5 x (1 + tanh(u))` equals `x sigmoid(2u)` with `2u = sqrt(8 / pi) (x + 0.044715 x^3)`. The tanh
that inductor emits takes longer than reading and writing the tensor; a sigmoid made of `exp2` and
`rsqrt`, both single GPU instructions, does not. The operator registers its own gradient, since the
one that autograd derives from these lines is twice as long.
"""

import math
from typing import Any

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

from flow_grpo.perf.inductor import DECOMPOSITIONS

GAIN = math.sqrt(8 / math.pi)
CUBIC = 0.044715 * GAIN
BITS = -math.log2(math.e)  # 2 ** (BITS * y) is exp(-y)


def _gelu(x: Tensor) -> Tensor:
    """Return the tanh-approximated GELU of `x`, computed in float32 or better."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * _gate(wide)).to(x.dtype)


def _gate(x: Tensor) -> Tensor:
    """Return sigmoid(2u)."""
    root = torch.rsqrt(1 + torch.exp2(x * (BITS * GAIN + BITS * CUBIC * x * x)))
    return root * root


gelu = torch.library.custom_op("flow_grpo::gelu", _gelu, mutates_args=())


@gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_backward(ctx: Any, gradient: Tensor) -> Tensor:
    """Return the gradient of the input of `gelu`, in the dtype of `gradient`."""
    (x,) = ctx.saved_tensors
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate = _gate(wide)
    slope = gate * (1 + (1 - gate) * wide * (GAIN + 3 * CUBIC * wide * wide))
    return (gradient * slope).to(gradient.dtype)


gelu.register_autograd(_gelu_backward, setup_context=_save_input)
DECOMPOSITIONS[torch.ops.flow_grpo.gelu.default] = _gelu


class FastGELU(nn.GELU):
    """GELU with the tanh approximation, computed by `gelu`, which compiles to a faster kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class FastProjectedGELU(GELU):
    """Replacement of diffusers' `GELU`, a linear projection and a tanh GELU, using `gelu`."""

    def gelu(self, gate: Tensor) -> Tensor:
        return gelu(gate)


def replace_gelu(model: nn.Module) -> None:
    """Replace the tanh GELUs of a model that will be compiled; in eager mode torch's is as fast."""
    for module in model.modules():
        if type(module) in (GELU, nn.GELU) and module.approximate == "tanh":
            module.__class__ = FastGELU if type(module) is nn.GELU else FastProjectedGELU
