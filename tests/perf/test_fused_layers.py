"""Fused layers compute the same outputs and gradients; the hooks into torch's compiler work."""

import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from diffusers.models.activations import GELU
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from families import FAMILIES
from policies import make_policy
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

from flow_grpo.diffusion.models.base import IMAGE_QKV, TEXT_QKV
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.perf import inductor
from flow_grpo.perf.gelu import FastGELU, FastProjectedGELU, gelu, replace_gelu
from flow_grpo.perf.inductor import DECOMPOSITIONS, configure_inductor
from flow_grpo.perf.joint_attention import FusedJointAttnProcessor, fuse_joint_attention_norms
from flow_grpo.perf.library_patches import make_attention_gradients_contiguous
from flow_grpo.perf.optimize import SharedInputLoraLinear, share_lora_input


def test_gelu_by_sigmoid_equals_gelu_by_tanh():
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


def test_attention_gets_contiguous_gradients(monkeypatch):
    transformer = build_tiny_flux().transformer
    file = sys.modules[type(transformer).__module__]
    seen = []

    def attend(query, key, value, **settings):
        out = query + key + value
        out.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
        return out

    monkeypatch.setattr(file, "dispatch_attention_fn", attend)
    assert make_attention_gradients_contiguous(transformer)
    assert make_attention_gradients_contiguous(
        transformer
    )  # again for another model of the same module
    assert file.dispatch_attention_fn.__wrapped__ is attend
    q, k, v = (torch.randn(2, 5, 3, 4, requires_grad=True) for _ in range(3))
    wide = torch.cat([file.dispatch_attention_fn(q, k, v).flatten(2), torch.ones(2, 5, 7)], -1)
    wide.square().sum().backward()
    assert seen == [True]
    torch.testing.assert_close(q.grad, 2 * (q + k + v).detach())


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_except_two_is_patched(family):
    """SD3 and the text refiner of HunyuanVideo 1.5 do not use the patched function."""
    transformer = small.build(family.name).transformer
    assert make_attention_gradients_contiguous(transformer) != (
        family.name in ("sd3", "hunyuan_video15", "hunyuan_video15_i2v")
    )


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_joint_attention_equals_that_of_diffusers(dtype, last):
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
        fuse_joint_attention_norms(attention)
    assert type(attention.processor) is FusedJointAttnProcessor
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for found, expected in zip(*outs, strict=True):
        torch.testing.assert_close(found, expected, **close)


def test_attention_without_text_or_without_norms_is_not_fused():
    own = Attention(32, dim_head=8, heads=4, qk_norm="rms_norm", processor=JointAttnProcessor2_0())
    bare = Attention(32, added_kv_proj_dim=32, dim_head=8, heads=4)
    bare.set_processor(JointAttnProcessor2_0())
    for attention in (own, bare):
        fuse_joint_attention_norms(attention)
        assert type(attention.processor) is JointAttnProcessor2_0


def test_only_tanh_gelus_are_replaced():
    model = nn.Sequential(nn.GELU(approximate="tanh"), GELU(8, 8, approximate="tanh"), nn.GELU())
    x = torch.randn(3, 8)
    expected = model(x)
    replace_gelu(model)
    assert [type(module) for module in model] == [FastGELU, FastProjectedGELU, nn.GELU]
    torch.testing.assert_close(model(x), expected)


@pytest.fixture
def restore_choices(monkeypatch) -> None:
    """Restore torch's own choices after the test."""
    persistent, kernel_options = inductor._default_choices()
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", persistent)
    monkeypatch.setattr(InductorChoices, "triton_kernel_kwargs", kernel_options)
    monkeypatch.setattr(TritonKernel, "want_no_x_dim", TritonKernel.want_no_x_dim)


@pytest.mark.usefixtures("restore_choices")
def test_hooks_apply_in_every_thread_and_after_earlier_compilations():
    before = V.choices  # as left by an earlier compilation
    inductor.enable_persistent_reductions()
    inductor.limit_reduction_warps()
    with ThreadPoolExecutor() as pool:
        in_thread = pool.submit(lambda: V.choices).result()
    assert in_thread is not before
    for choices in (before, in_thread):
        assert choices.should_use_persistent_reduction is inductor.use_persistent_reduction
        assert choices.triton_kernel_kwargs.__func__ is inductor.limited_kernel_options


ROW, COLUMN = sympy.symbols("row column")


def kernel(
    hints: list[ReductionHint],
    columns: int,
    *,
    index: sympy.Expr = ROW + 4096 * COLUMN,
    count: int = 4096,
) -> Any:
    """Return the features of a kernel with reductions over `columns` that reads at `index`."""
    read = MemoryDep("x", index, (ROW, COLUMN), (count, columns))
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
    """Let kernels have plain numbers as sizes and torch choose no persistent reduction."""
    kernel_options = inductor._default_choices()[1]
    monkeypatch.setattr(inductor, "_default_choices", lambda: (lambda *_: False, kernel_options))
    sizes = SimpleNamespace(statically_known_leq=operator.le, statically_known_geq=operator.ge)
    with V.set_graph_handler(SimpleNamespace(sizevars=sizes)):
        yield


@pytest.mark.usefixtures("plain_sizes")
def test_reductions_over_contiguous_rows_are_persistent():
    inner, other, outer = ReductionHint.INNER, ReductionHint.DEFAULT, ReductionHint.OUTER
    assert inductor.use_persistent_reduction(kernel([inner], 8192), False)
    assert inductor.use_persistent_reduction(kernel([other, inner], 6144), False)
    part = 1536 * ModularIndexing(ROW, 1, 512) + 1075200 * FloorDiv(ROW, 512)
    assert inductor.use_persistent_reduction(kernel([other], 1536, index=part + COLUMN), False)
    assert not inductor.use_persistent_reduction(kernel([inner], 8193), False)
    assert not inductor.use_persistent_reduction(kernel([outer, other], 6144), False)
    # reductions over columns, of a slice and of a tensor with dynamic width
    columns = part.subs(ROW, COLUMN)
    for index in (columns + ROW, sympy.Symbol("width") * COLUMN + ROW):
        assert not inductor.use_persistent_reduction(kernel([outer], 2048, index=index), False)


@pytest.mark.usefixtures("plain_sizes")
def test_large_persistent_reductions_have_few_warps():
    def warps(settings: dict[str, Any], tiling: str = "x r0_", **shape: int) -> int | None:
        features = kernel([ReductionHint.INNER], **shape)
        args = [dict.fromkeys(tiling.split())]
        chosen = inductor.limited_kernel_options(
            InductorChoices(), TritonKernel, features, args, settings
        )
        assert settings.items() <= chosen.items()
        return chosen["fixed_config"]["num_warps"] if "fixed_config" in chosen else None

    assert warps({"features": 1, "tiling_scores": None}, columns=1536) == 2
    assert warps({}, columns=6144) == 4
    assert warps({}, columns=64) is None  # torch's own choice is good
    assert warps({}, columns=1536, count=18) is None
    assert warps({}, columns=9000) is None  # not persistent
    assert warps({}, "x y r0_", columns=1536) is None
    assert warps({"mix_order_reduction": True}, columns=1536) is None


@pytest.fixture
def restore_compiler_settings(restore_choices) -> Iterator[None]:
    """Restore the process-wide settings of torch's compiler after the test."""
    dynamo = torch._dynamo.config
    before = {name: getattr(dynamo, name) for name in ("recompile_limit", "optimize_ddp")}
    budget = functorch_config.activation_memory_budget
    tag = torch.compiler.config.cache_key_tag
    with (
        dynamo.patch(**before),
        functorch_config.patch(activation_memory_budget=budget),
        torch.compiler.config.patch(cache_key_tag=tag),
        warnings.catch_warnings(),
    ):
        yield


@pytest.mark.usefixtures("restore_compiler_settings")
def test_operators_are_decomposed_also_after_an_earlier_compilation():
    select_decomp_table()  # as compiling does
    configure_inductor()
    assert DECOMPOSITIONS
    assert DECOMPOSITIONS.items() <= select_decomp_table().items()


@pytest.mark.usefixtures("restore_compiler_settings")
def test_the_compile_cache_is_keyed_by_our_choices(monkeypatch):
    tags = []
    for change in (
        lambda: None,
        lambda: monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: "other"),
        lambda: monkeypatch.setattr(Path, "read_bytes", lambda path: path.name.encode()),
    ):
        change()
        configure_inductor()
        tags.append(torch.compiler.config.cache_key_tag)
    assert len(set(tags)) == 3


HOOKS = [
    ("recompile limit", "torch._dynamo.config.recompile_limit"),
    ("recompile limit", "torch._dynamo.config.optimize_ddp"),
    ("activation budget", "torch._functorch.config.activation_memory_budget"),
    ("persistent reductions", "torch._inductor.choices.InductorChoices"),
    ("persistent reductions", "torch._inductor.dependencies.MemoryDep"),
    ("persistent reductions", "torch._inductor.runtime.hints.ReductionHint"),
    ("persistent reductions", "torch._inductor.codegen.triton.TritonKernel"),
    ("persistent reductions", "torch._inductor.codegen.simd.SIMDKernel"),
    ("few warps", "torch._inductor.codegen.triton.FixedTritonConfig"),
    ("decompositions", "torch._inductor.decomposition.fast_random_decomps"),
    ("decompositions", "torch._inductor.lowering.needs_realized_inputs"),
    ("compile cache tag", "torch.compiler.config.cache_key_tag"),
]


@pytest.mark.parametrize(("hook", "symbol"), HOOKS)
@pytest.mark.usefixtures("restore_compiler_settings")
def test_without_a_private_symbol_training_continues(hook, symbol, monkeypatch, caplog):
    """Each symbol is removed in turn: its hook is skipped with one warning, the others apply."""
    inductor._warn_once.cache_clear()
    module, _, name = symbol.rpartition(".")
    target = importlib.import_module(module)
    if not module.endswith(".config"):
        monkeypatch.delattr(target, name)
    else:  # torch's config modules do not allow deletion
        monkeypatch.setattr(
            inductor, "_check_setting", partial(reject_setting, name, inductor._check_setting)
        )
    active = configure_inductor()
    configure_inductor()
    assert hook not in active
    assert active
    [warning] = [record for record in caplog.records if repr(hook) in record.getMessage()]
    assert "plain torch.compile" in warning.getMessage()
    monkeypatch.undo()
    layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(approximate="tanh"))
    compiled = torch.compile(layer, backend="aot_eager")
    compiled(torch.randn(2, 4)).square().mean().backward()
    assert layer[0].weight.grad.isfinite().all()


def reject_setting(name: str, check: Callable, config: Any, setting: str) -> None:
    """Check settings as if `config` did not have `name`."""
    check(SimpleNamespace(__name__="config") if setting == name else config, setting)


def test_persistent_kernels_are_counted_in_the_generated_code(tmp_path, monkeypatch):
    decorators = ["persistent_reduction", "fixed_config", "reduction", "pointwise"]
    code = tmp_path / "code.py"
    code.write_text("\n".join(f"    @triton_heuristics.{name}(" for name in decorators))
    modules = [SimpleNamespace(__file__=str(code))] * 2  # torch may load a file twice
    monkeypatch.setattr("torch._inductor.codecache.PyCodeCache.modules", modules)
    assert inductor.count_persistent_kernels() == 2
    monkeypatch.delattr("torch._inductor.codecache.PyCodeCache")
    assert inductor.count_persistent_kernels() is None


@pytest.mark.usefixtures("restore_compiler_settings")
def test_choices_with_other_parameters_are_not_replaced(monkeypatch, caplog):
    inductor._warn_once.cache_clear()
    inductor._default_choices.cache_clear()
    monkeypatch.setattr(InductorChoices, "triton_kernel_kwargs", lambda self, kernel: {})
    assert not {"persistent reductions", "few warps"} & {*configure_inductor()}
    assert "triton_kernel_kwargs" in caplog.text or "expected" in caplog.text
    inductor._default_choices.cache_clear()


@pytest.mark.usefixtures("restore_compiler_settings")
def test_a_compiled_sd3_uses_fused_joint_attention():
    adapter = SD3Adapter(build_tiny_sd3(layers=2), max_sequence_length=4)
    adapter.apply_optimizations(fold=False, compiled=True, graphs=False)
    assert {type(block.attn.processor) for block in adapter.blocks()} == {FusedJointAttnProcessor}


def steps(policy: Policy) -> list[torch.Tensor]:
    """Return velocities with and without LoRA, and the gradient."""
    adapter = policy.adapter
    latents = torch.randn(
        2, *adapter.latent_shape(32, 32), generator=torch.Generator().manual_seed(1)
    )
    texts = adapter.encode(["a", "b"], None)
    found = adapter.velocity(policy.module, latents, 500.0, texts, 1.0)
    gradients = torch.autograd.grad(found.square().mean(), policy.parameters())
    with policy.frozen_denoiser("reference") as denoiser:
        reference = adapter.velocity(denoiser.transformer, latents, 500.0, texts, 1.0)
    with torch.no_grad():
        again = adapter.velocity(policy.module, latents, 500.0, texts, 1.0)
    assert torch.equal(again, found)
    return [found, reference, torch.cat([gradient.flatten() for gradient in gradients])]


def test_shared_lora_projections_equal_separate_ones():
    policy = make_policy(SD3Adapter(build_tiny_sd3(layers=2), max_sequence_length=4), rank=4)
    torch.manual_seed(0)
    for name, parameter in policy.transformer.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    separate = steps(policy)
    for block in policy.transformer.transformer_blocks:
        for names in (IMAGE_QKV, TEXT_QKV):
            share_lora_input(block.attn, names)
    layers = [m for m in policy.transformer.modules() if type(m) is SharedInputLoraLinear]
    assert len(layers) == 12
    for a, b in zip(steps(policy), separate, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(layer.shared_projection.input is None for layer in layers)  # released


def test_layers_with_shared_projections_may_be_called_in_any_order():
    policy = make_policy(SD3Adapter(build_tiny_sd3(layers=1), max_sequence_length=4), rank=4)
    attention = policy.transformer.transformer_blocks[0].attn
    for name in IMAGE_QKV:
        nn.init.normal_(getattr(attention, name).lora_B["default"].weight)
    x, y = torch.randn(2, 3, attention.to_q.in_features)
    calls = [("to_q", x), ("to_q", x), ("to_k", y), ("to_v", x), ("to_k", x)]
    separate = [getattr(attention, name)(given) for name, given in calls]
    share_lora_input(attention, IMAGE_QKV)
    for (name, given), expected in zip(calls, separate, strict=True):
        torch.testing.assert_close(getattr(attention, name)(given), expected)
