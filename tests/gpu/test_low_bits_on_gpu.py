"""Frozen weights in 8 and 4 bits, on the GPU and compiled.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from flow_grpo.speed.faster import settle_compiler
from flow_grpo.speed.four_bits import widened
from flow_grpo.speed.low_bits import rows_in_8_bits, to_low_bits

CUDA = torch.device("cuda")
CPU = torch.device("cpu")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp8", "nf4"])
def test_a_layer_is_what_it_is_on_the_cpu(precision, compiled):
    torch.manual_seed(0)
    there = nn.Linear(256, 128).requires_grad_(False).to(torch.bfloat16)
    here = nn.Linear(256, 128).requires_grad_(False).to(torch.bfloat16)
    here.load_state_dict(there.state_dict())
    for layer, device in ((there, CPU), (here, CUDA)):
        to_low_bits([layer], precision, device)
        layer.to(device)
    call = torch.compile(here, fullgraph=True) if compiled else here
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    inputs = [each.requires_grad_() for each in (x.clone(), x.to(CUDA))]
    outs = [there(inputs[0]), call(inputs[1])]
    gradient = torch.randn_like(outs[0])
    backs = [
        torch.autograd.grad(out, own, gradient.to(out.device))[0]
        for out, own in zip(outs, inputs, strict=True)
    ]
    for expected, found in (outs, backs):
        assert (found.cpu() - expected).norm() < 0.01 * expected.norm()
    with torch.no_grad():  # sampling is training, to the bit
        assert torch.equal(call(inputs[1]), outs[1])


def compiled_code(function: Callable, x: Tensor) -> tuple[Any, str]:
    """What it gives, and what torch made of it."""
    settle_compiler()
    torch.compiler.reset()
    with config.patch(force_disable_caches=True):  # else there may be none to see
        out, codes = run_and_get_code(torch.compile(function, dynamic=False), x)
    return out, "".join(codes)


def test_what_layers_share_is_written_once():
    layers = nn.ModuleList(nn.Linear(256, 128, dtype=torch.bfloat16) for _ in "qkv")
    to_low_bits([layers.requires_grad_(False)], "fp8", CUDA)
    layers.to(CUDA)

    def three(x: Tensor) -> list[Tensor]:
        x = nn.functional.layer_norm(x, (256,))
        return [layer(x) for layer in layers]

    x = torch.randn(64, 256, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    _, code = compiled_code(three, x)
    assert len(re.findall(r"'\*fp8e4nv'", code)) == 1


def test_rows_of_a_part_are_held_by_few_warps():
    x = torch.randn(4, 700, 1536, dtype=torch.bfloat16, device=CUDA)
    (low, scale), code = compiled_code(lambda x: rows_in_8_bits(x[:, :512].flatten(0, 1)), x)
    assert "'num_warps': 2" in code
    assert "for r0_offset" not in code
    wide = (low.float() * scale).unflatten(0, (4, 512))
    torch.testing.assert_close(wide, x[:, :512].float(), rtol=2**-4, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sides", [(64, 1), (192, 5), (3584, 1000)])
def test_the_kernel_widens_as_plain_lines_do(sides, dtype):
    layer = nn.Linear(*sides, dtype=dtype).requires_grad_(False)
    to_low_bits([layer], "nf4", CUDA)
    found = widened(layer.low, layer.scale, layer.levels, sides[::-1], dtype)
    assert torch.equal(found.cpu(), layer.cpu().widened())


@pytest.mark.parametrize(("precision", "share"), [("fp8", 0.6), ("nf4", 0.4)])
def test_loading_never_has_all_weights_in_full_on_the_gpu(precision, share):
    model = nn.Sequential(*(nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(16)))
    whole = sum(p.nbytes for p in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    to_low_bits([model.requires_grad_(False)], precision, CUDA)
    assert torch.cuda.max_memory_allocated() - before < share * whole + 30 * 2**20
