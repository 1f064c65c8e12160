"""Layers in fewer kernels: the same function and gradients."""

import operator
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from diffusers.models.activations import GELU
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from families import FAMILIES
from policies import policy_of
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from untrained import small
from untrained.small.flux import build as build_tiny_flux
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.draw.models.base import OF_IMAGE, OF_TEXT
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.policy import Policy
from flow_grpo.speed import rows
from flow_grpo.speed.compiler import OPEN
from flow_grpo.speed.faster import (
    ChannelsLastNorm,
    SiblingLinear,
    channels_last_norms,
    give_dense_gradients,
    join_siblings,
    settle_compiler,
)
from flow_grpo.speed.gelu import PlainGELU, ProductGELU, gelu, replace_gelu
from flow_grpo.speed.joint import JoinedProcessor, join_before_norms


@pytest.mark.parametrize("mean", [5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64, 12, 16), (2, 64, 48)])
def test_a_group_norm_is_the_one_of_torch(dtype, shape, mean):
    torch.manual_seed(0)
    norm = nn.GroupNorm(8, 64)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = (3 * torch.randn(shape) + mean).to(dtype)
    expected = norm(x.float())
    norm.to(dtype)
    channels_last_norms(norm)
    assert type(norm) is ChannelsLastNorm
    if x.ndim == 4:
        x = x.to(memory_format=torch.channels_last)
        assert norm(x).is_contiguous(memory_format=torch.channels_last)
    atol = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(norm(x).float(), expected, atol=atol, rtol=1e-2)


def test_gelu_by_a_sigmoid_is_the_one_by_a_tanh():
    x = torch.cat([torch.linspace(-9, 9, 1001), torch.tensor([-1e4, 0, 1e4])]).double()
    x.requires_grad_()
    plain = nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(gelu(x), plain, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (gelu(x), plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    half = x.detach().bfloat16()
    assert gelu(half).dtype == torch.bfloat16
    expected = nn.functional.gelu(half, approximate="tanh")
    torch.testing.assert_close(gelu(half), expected, rtol=1e-2, atol=1e-6)


def test_attention_gets_gradients_that_lie_together(monkeypatch):
    transformer = build_tiny_flux().transformer
    file = sys.modules[type(transformer).__module__]
    seen = []

    def attend(query, key, value, **settings):
        out = query + key + value
        out.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
        return out

    monkeypatch.setattr(file, "dispatch_attention_fn", attend)
    assert give_dense_gradients(transformer)
    assert give_dense_gradients(transformer)  # of another model of the same file
    assert file.dispatch_attention_fn.__wrapped__ is attend
    q, k, v = (torch.randn(2, 5, 3, 4, requires_grad=True) for _ in range(3))
    wide = torch.cat([file.dispatch_attention_fn(q, k, v).flatten(2), torch.ones(2, 5, 7)], -1)
    wide.square().sum().backward()
    assert seen == [True]
    torch.testing.assert_close(q.grad, 2 * (q + k + v).detach())


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_gradients_of_every_family_but_sd3_lie_together(family):
    """SD3's own attention does not go through what is wrapped; its gradients do so anyway."""
    transformer = small.build(family.name).transformer
    assert give_dense_gradients(transformer) != (family.name == "sd3")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_joined_before_its_norms_is_that_of_diffusers(dtype, last):
    torch.manual_seed(0)
    sizes = {"query_dim": 32, "added_kv_proj_dim": 32, "dim_head": 8, "heads": 4}
    kind = {"qk_norm": "rms_norm", "bias": True, "context_pre_only": last}
    attention = Attention(**sizes, **kind, processor=JointAttnProcessor2_0())
    for name, weight in attention.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, 1, 0.3)
    attention.to(dtype)
    inputs = [torch.randn(2, n, 32, dtype=dtype, requires_grad=True) for n in (6, 3)]
    outs = []
    for _ in range(2):
        out = attention(*inputs)
        outs.append((*out, *torch.autograd.grad(out[0].sum() + out[1].square().sum(), inputs)))
        join_before_norms(attention)
    assert type(attention.processor) is JoinedProcessor
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for found, expected in zip(*outs, strict=True):
        torch.testing.assert_close(found, expected, **close)


def test_attention_of_one_kind_or_without_norms_stays_as_it_is():
    own = Attention(32, dim_head=8, heads=4, qk_norm="rms_norm", processor=JointAttnProcessor2_0())
    bare = Attention(32, added_kv_proj_dim=32, dim_head=8, heads=4)
    bare.set_processor(JointAttnProcessor2_0())
    for attention in (own, bare):
        join_before_norms(attention)
        assert type(attention.processor) is JointAttnProcessor2_0


def test_the_gelus_of_a_model_that_is_compiled():
    model = nn.Sequential(nn.GELU(approximate="tanh"), GELU(8, 8, approximate="tanh"), nn.GELU())
    x = torch.randn(3, 8)
    usual = model(x)
    replace_gelu(model)
    assert [type(module) for module in model] == [PlainGELU, ProductGELU, nn.GELU]
    torch.testing.assert_close(model(x), usual)


@pytest.fixture
def usual_rows(monkeypatch) -> None:
    """What torch makes of rows, again when a test is over."""
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", rows.usual)
    monkeypatch.setattr(InductorChoices, "triton_kernel_kwargs", rows.usual_settings)
    monkeypatch.setattr(TritonKernel, "want_no_x_dim", TritonKernel.want_no_x_dim)


@pytest.mark.usefixtures("usual_rows")
def test_rows_are_held_whole_in_every_thread_whatever_was_compiled_before():
    before = V.choices  # as an earlier compilation leaves it
    rows.hold_whole_rows()
    with ThreadPoolExecutor() as pool:
        elsewhere = pool.submit(lambda: V.choices).result()
    assert elsewhere is not before
    for choices in (before, elsewhere):
        assert choices.should_use_persistent_reduction is rows.hold
        assert choices.triton_kernel_kwargs.__func__ is rows.with_few_warps


ROW, COLUMN = sympy.symbols("row column")


def kernel(
    hints: list[ReductionHint],
    columns: int,
    *,
    places: sympy.Expr = ROW + 4096 * COLUMN,
    count: int = 4096,
) -> Any:
    """A kernel with sums of these kinds, over so many columns; `places` is where it reads."""
    read = MemoryDep("x", places, (ROW, COLUMN), (count, columns))
    node = SimpleNamespace(read_writes=SimpleNamespace(reads=[read]))
    hint = iter(hints)
    return SimpleNamespace(
        reduction_nodes=lambda: [node] * len(hints),
        reduction_hint=lambda _: next(hint),
        reduction_numel=columns,
        numel=count,
    )


@pytest.fixture
def plain_sizes(monkeypatch) -> Iterator[None]:
    """Those of the kernels here are numbers, and torch itself would hold none of their rows."""
    monkeypatch.setattr(rows, "usual", lambda *_: False)
    sizes = SimpleNamespace(statically_known_leq=operator.le, statically_known_geq=operator.ge)
    with V.set_graph_handler(SimpleNamespace(sizevars=sizes)):
        yield


@pytest.mark.usefixtures("plain_sizes")
def test_rows_are_held_where_a_sum_lies_along_them():
    inner, other, outer = ReductionHint.INNER, ReductionHint.DEFAULT, ReductionHint.OUTER
    assert rows.hold(kernel([inner], 8192), False)
    assert rows.hold(kernel([other, inner], 6144), False)
    part = 1536 * ModularIndexing(ROW, 1, 512) + 1075200 * FloorDiv(ROW, 512)
    assert rows.hold(kernel([other], 1536, places=part + COLUMN), False)
    assert not rows.hold(kernel([inner], 8193), False)
    assert not rows.hold(kernel([outer, other], 6144), False)
    # sums of columns, of a part of a tensor and of one whose width is not known
    columns = part.subs(ROW, COLUMN)
    for places in (columns + ROW, sympy.Symbol("width") * COLUMN + ROW):
        assert not rows.hold(kernel([outer], 2048, places=places), False)


@pytest.mark.usefixtures("plain_sizes")
def test_a_kernel_that_holds_rows_has_few_warps():
    def warps(settings: dict[str, Any], tiling: str = "x r0_", **shape: int) -> int | None:
        features = kernel([ReductionHint.INNER], **shape)
        args = [dict.fromkeys(tiling.split())]
        chosen = rows.with_few_warps(InductorChoices(), TritonKernel, features, args, settings)
        assert settings.items() <= chosen.items()
        return chosen["fixed_config"]["num_warps"] if "fixed_config" in chosen else None

    assert warps({"features": 1, "tiling_scores": None}, columns=1536) == 2
    assert warps({}, columns=6144) == 4
    assert warps({}, columns=64) is None  # torch's own choice is good
    assert warps({}, columns=1536, count=18) is None
    assert warps({}, columns=9000) is None  # not held
    assert warps({}, "x y r0_", columns=1536) is None
    assert warps({"mix_order_reduction": True}, columns=1536) is None


@pytest.fixture
def settings_come_back(usual_rows) -> Iterator[None]:
    """Those of torch's compiler, which hold for all of a process."""
    dynamo = torch._dynamo.config
    usual = {name: getattr(dynamo, name) for name in ("recompile_limit", "optimize_ddp")}
    budget = functorch_config.activation_memory_budget
    tag = torch.compiler.config.cache_key_tag
    with (
        dynamo.patch(**usual),
        functorch_config.patch(activation_memory_budget=budget),
        torch.compiler.config.patch(cache_key_tag=tag),
        warnings.catch_warnings(),
    ):
        yield


@pytest.mark.usefixtures("settings_come_back")
def test_the_compiler_sees_into_our_operators_whatever_was_compiled_before():
    select_decomp_table()  # as compiling does
    settle_compiler()
    assert OPEN
    assert OPEN.items() <= select_decomp_table().items()


@pytest.mark.usefixtures("settings_come_back")
def test_code_that_torch_kept_is_not_used_for_other_choices(monkeypatch):
    tags = []
    for change in (
        lambda: None,
        lambda: monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: "other"),
        lambda: monkeypatch.setattr(Path, "read_bytes", lambda path: path.name.encode()),
    ):
        change()
        settle_compiler()
        tags.append(torch.compiler.config.cache_key_tag)
    assert len(set(tags)) == 3


@pytest.mark.usefixtures("settings_come_back")
def test_a_compiled_sd3_joins_its_tokens_before_their_norms():
    adapter = SD3Adapter(build_tiny_sd3(layers=2), max_sequence_length=4)
    adapter.speed_up(fold=False, compiled=True, graphs=False)
    assert {type(block.attn.processor) for block in adapter.blocks()} == {JoinedProcessor}


def steps(policy: Policy) -> list[torch.Tensor]:
    """Velocities with and without LoRA, and the gradient."""
    adapter = policy.adapter
    latents = torch.randn(
        2, *adapter.latent_shape(32, 32), generator=torch.Generator().manual_seed(1)
    )
    texts = adapter.encode(["a", "b"], None)
    found = adapter.velocity(policy.module, latents, 500.0, texts, 1.0)
    gradients = torch.autograd.grad(found.square().mean(), policy.parameters())
    with policy.fixed("reference") as denoiser:
        reference = adapter.velocity(denoiser.transformer, latents, 500.0, texts, 1.0)
    with torch.no_grad():
        again = adapter.velocity(policy.module, latents, 500.0, texts, 1.0)
    assert torch.equal(again, found)
    return [found, reference, torch.cat([gradient.flatten() for gradient in gradients])]


def test_lora_of_layers_with_one_input_is_the_same_together():
    policy = policy_of(SD3Adapter(build_tiny_sd3(layers=2), max_sequence_length=4), rank=4)
    torch.manual_seed(0)
    for name, parameter in policy.transformer.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    apart = steps(policy)
    for block in policy.transformer.transformer_blocks:
        for names in (OF_IMAGE, OF_TEXT):
            join_siblings(block.attn, names)
    layers = [m for m in policy.transformer.modules() if type(m) is SiblingLinear]
    assert len(layers) == 12
    for a, b in zip(steps(policy), apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(layer.siblings.input is None for layer in layers)  # nothing is held


def test_lora_of_one_layer_does_not_mind_in_which_order_it_is_called():
    policy = policy_of(SD3Adapter(build_tiny_sd3(layers=1), max_sequence_length=4), rank=4)
    attention = policy.transformer.transformer_blocks[0].attn
    for name in OF_IMAGE:
        nn.init.normal_(getattr(attention, name).lora_B["default"].weight)
    x, y = torch.randn(2, 3, attention.to_q.in_features)
    calls = [("to_q", x), ("to_q", x), ("to_k", y), ("to_v", x), ("to_k", x)]
    apart = [getattr(attention, name)(given) for name, given in calls]
    join_siblings(attention, OF_IMAGE)
    for (name, given), expected in zip(calls, apart, strict=True):
        torch.testing.assert_close(getattr(attention, name)(given), expected)
