"""Frozen weights in 8 and 4 bits, on the GPU and compiled.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import pytest
import torch
from torch import nn

from flow_grpo.speed.four_bits import widened
from flow_grpo.speed.low_bits import to_low_bits

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
