"""A product and its GELU in one kernel, where nothing is kept for a backward pass."""

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn


class FusedGELU(GELU):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(hidden_states)
        weight, bias = self.proj.weight, self.proj.bias
        flat = hidden_states.to(weight.dtype).flatten(0, -2)
        out = torch._addmm_activation(bias, flat, weight.t(), use_gelu=True)
        return out.unflatten(0, hidden_states.shape[:-1])


def fuse_gelu(model: nn.Module) -> None:
    """For GPUs in half precision: elsewhere torch's fused GELU is another one, or slower."""
    for module in model.modules():
        if type(module) is GELU and type(module.proj) is nn.Linear and _is_fusible(module):
            module.__class__ = FusedGELU


def _is_fusible(module: GELU) -> bool:
    weight, bias = module.proj.weight, module.proj.bias
    half = weight.is_cuda and weight.dtype in (torch.float16, torch.bfloat16)
    return half and bias is not None and module.approximate == "tanh"
