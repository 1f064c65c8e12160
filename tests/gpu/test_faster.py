"""The fused GELU is the one of the model.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import pytest
import torch
from diffusers.models.activations import GELU
from torch import nn

from flow_grpo.speed.gelu import FusedGELU, ProductGELU, replace_gelu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_gelu_is_the_tanh_one(dtype):
    plain = GELU(64, 64, approximate="tanh").cuda()
    nn.init.eye_(plain.proj.weight)
    nn.init.zeros_(plain.proj.bias)
    # where the other GELU is 5e-4 away
    x = torch.linspace(-4, -1, 3 * 16 * 64, device="cuda").view(3, 16, 64).to(dtype)
    exact = plain(x.float())
    replace_gelu(plain)
    assert type(plain) is ProductGELU  # in float32
    torch.testing.assert_close(plain(x.float()), exact)
    plain.__class__ = GELU
    replace_gelu(half := plain.to(dtype))
    assert type(half) is FusedGELU
    with torch.no_grad():
        found = half(x)
    assert found.shape == exact.shape
    torch.testing.assert_close(found.float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert half(x).requires_grad
