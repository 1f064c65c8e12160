"""The fused GELU is the one of the model.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import pytest
import torch
from diffusers.models.activations import GELU

from flow_grpo.models.fused import FusedGELU, fuse_gelu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_gelu_is_the_tanh_one(dtype):
    torch.manual_seed(0)
    plain = GELU(64, 256, approximate="tanh").cuda()
    exact = plain(x := torch.randn(3, 16, 64, device="cuda"))
    fuse_gelu(plain)
    assert type(plain) is GELU  # float32 stays as it is
    fuse_gelu(half := plain.to(dtype))
    assert type(half) is FusedGELU
    with torch.no_grad():
        found = half(x)
    assert found.shape == exact.shape
    assert (found - exact).abs().max() < 0.03
    assert half(x.to(dtype)).requires_grad
