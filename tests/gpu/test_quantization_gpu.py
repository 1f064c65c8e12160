"""Linear layers with frozen FP8 and NF4 weights, on the GPU and compiled.

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

from flow_grpo.perf.inductor import configure_inductor
from flow_grpo.perf.nf4_kernel import dequantize_nf4
from flow_grpo.perf.quantization import quantize_linears, quantize_rowwise_fp8

CUDA = torch.device("cuda")
CPU = torch.device("cpu")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp8", "nf4"])
def test_a_layer_computes_the_same_as_on_the_cpu(precision, compiled):
    torch.manual_seed(0)
    there = nn.Linear(256, 128).requires_grad_(False).to(torch.bfloat16)
    here = nn.Linear(256, 128).requires_grad_(False).to(torch.bfloat16)
    here.load_state_dict(there.state_dict())
    for layer, device in ((there, CPU), (here, CUDA)):
        quantize_linears([layer], precision, device)
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
    with torch.no_grad():  # sampling equals training bit for bit
        assert torch.equal(call(inputs[1]), outs[1])


def compiled_code(function: Callable, x: Tensor) -> tuple[Any, str]:
    """Return the result of a function and the code that inductor generates for it."""
    configure_inductor()
    torch.compiler.reset()
    with config.patch(force_disable_caches=True):  # a cached graph has no code to return
        out, codes = run_and_get_code(torch.compile(function, dynamic=False), x)
    return out, "".join(codes)


def test_a_shared_input_is_quantized_once():
    layers = nn.ModuleList(nn.Linear(256, 128, dtype=torch.bfloat16) for _ in "qkv")
    quantize_linears([layers.requires_grad_(False)], "fp8", CUDA)
    layers.to(CUDA)

    def three(x: Tensor) -> list[Tensor]:
        x = nn.functional.layer_norm(x, (256,))
        return [layer(x) for layer in layers]

    x = torch.randn(64, 256, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    _, code = compiled_code(three, x)
    assert len(re.findall(r"'\*fp8e4nv'", code)) == 1


def test_reductions_over_rows_of_a_slice_are_persistent_with_few_warps():
    x = torch.randn(4, 700, 1536, dtype=torch.bfloat16, device=CUDA)
    (low, scale), code = compiled_code(lambda x: quantize_rowwise_fp8(x[:, :512].flatten(0, 1)), x)
    assert "'num_warps': 2" in code
    assert "for r0_offset" not in code
    wide = (low.float() * scale).unflatten(0, (4, 512))
    torch.testing.assert_close(wide, x[:, :512].float(), rtol=2**-4, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sides", [(64, 1), (192, 5), (3584, 1000)])
def test_the_nf4_kernel_equals_plain_tensor_operations(sides, dtype):
    layer = nn.Linear(*sides, dtype=dtype).requires_grad_(False)
    quantize_linears([layer], "nf4", CUDA)
    found = dequantize_nf4(layer.low, layer.scale, layer.levels, sides[::-1], dtype)
    assert torch.equal(found.cpu(), layer.cpu().dequantize())


@pytest.mark.parametrize(("precision", "share"), [("fp8", 0.6), ("nf4", 0.4)])
def test_quantization_never_has_all_original_weights_on_the_gpu(precision, share):
    model = nn.Sequential(*(nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(16)))
    whole = sum(p.nbytes for p in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize_linears([model.requires_grad_(False)], precision, CUDA)
    assert torch.cuda.max_memory_allocated() - before < share * whole + 30 * 2**20
