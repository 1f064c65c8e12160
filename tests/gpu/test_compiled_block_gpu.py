"""The optimisations of compiled code appear in the generated kernels and are not slower.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import re
import time
from collections import Counter

import torch
from diffusers.models.transformers.transformer_sd3 import JointTransformerBlock
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from flow_grpo.perf.gelu import FastProjectedGELU, replace_gelu
from flow_grpo.perf.inductor import configure_inductor, count_persistent_kernels
from flow_grpo.perf.joint_attention import fuse_joint_attention_norms

HOOKS = {"persistent reductions", "few warps", "decompositions", "activation budget"}
WIDTH, HEADS, TOKENS, TEXT_TOKENS, BATCH = 1536, 24, 1024, 205, 8  # SD3.5-medium at 512 px


def build_block() -> nn.Module:
    torch.manual_seed(0)
    block = JointTransformerBlock(WIDTH, HEADS, WIDTH // HEADS, qk_norm="rms_norm")
    return block.cuda().bfloat16().requires_grad_(False)


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = ((BATCH, TOKENS, WIDTH), (BATCH, TEXT_TOKENS, WIDTH), (BATCH, WIDTH))
    return tuple(
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in shapes
    )


def train_pass(block: nn.Module, image: Tensor, text: Tensor, temb: Tensor) -> Tensor:
    image = image.detach().requires_grad_()
    text_out, image_out = block(image, text, temb)
    (image_out.float().square().mean() + text_out.float().square().mean()).backward()
    return image.grad


def seconds_per_pass(block: nn.Module, count: int = 20) -> float:
    inputs = make_inputs()
    for _ in range(3):
        train_pass(block, *inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        train_pass(block, *inputs)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def test_compiled_gelu_matches_the_tanh_approximation():
    plain = gelu_layer().cuda()
    x = torch.linspace(-4, 4, 3 * 16 * 64, device="cuda").view(3, 16, 64)
    expected = plain(x)
    replace_gelu(plain)
    assert type(plain) is FastProjectedGELU
    torch.testing.assert_close(plain(x), expected)


def gelu_layer() -> nn.Module:
    from diffusers.models.activations import GELU

    return GELU(64, 64, approximate="tanh")


def test_a_block_compiles_to_persistent_kernels_and_is_not_slower_than_plain():
    """If this fails, a new version of torch has changed what the hooks rely on."""
    plain = build_block()
    plain.compile(fullgraph=True, dynamic=False)
    plain_seconds = seconds_per_pass(plain)
    torch._dynamo.reset()
    assert {*configure_inductor()} >= HOOKS
    block = build_block()
    fuse_joint_attention_norms(block)
    replace_gelu(block)
    block.compile(fullgraph=True, dynamic=False)
    gradient, sources = run_and_get_code(train_pass, block, *make_inputs())
    assert gradient.isfinite().all()
    code = "\n".join(sources)
    heuristics = Counter(re.findall(r"@triton_heuristics\.(\w+)\(", code))
    print(dict(heuristics))
    # rows of 1,536 elements, above torch's limit of 1,024: persistent, with few warps
    assert heuristics["fixed_config"] > 0, heuristics
    assert count_persistent_kernels() >= heuristics["fixed_config"]
    ours = seconds_per_pass(block)
    print(f"block: {1e3 * ours:.2f} ms, plain torch.compile {1e3 * plain_seconds:.2f} ms")
    assert ours < 1.1 * plain_seconds
