"""Folded LoRA layers compute the same outputs and gradients; stochastic rounding is unbiased."""

import math

import pytest
import torch
from peft import LoraConfig
from sessions import short_config
from torch import nn
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.session import build_session
from flow_grpo.perf.lora import FoldedLinear, cast_stochastic, fold_lora
from flow_grpo.perf.optimize import SharedInputLoraLinear


def build(dtype: torch.dtype = torch.float32, **lora) -> SD3Adapter:
    """Return a model with nonzero LoRA weights."""
    adapter = SD3Adapter(build_tiny_sd3(), dtype=dtype, max_sequence_length=4)
    config = LoraConfig(**{"r": 8, **lora}, lora_alpha=8, target_modules=adapter.lora_targets)
    torch.manual_seed(0)
    adapter.transformer.add_adapter(config)
    for name, parameter in adapter.transformer.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapter


def velocity(adapter: SD3Adapter) -> torch.Tensor:
    latents = torch.randn(
        3, *adapter.latent_shape(16, 24), generator=torch.Generator().manual_seed(1)
    )
    conditioning = adapter.encode(["a", "b", "a"], None)
    return adapter.velocity(adapter.transformer, latents, 500.0, conditioning, 1.0)


def gradients(adapter: SD3Adapter) -> dict[str, torch.Tensor]:
    velocity(adapter).square().mean().backward()
    return {n: p.grad for n, p in adapter.transformer.named_parameters() if p.grad is not None}


def folded(adapter: SD3Adapter) -> list[nn.Module]:
    return [m for m in adapter.transformer.modules() if isinstance(m, FoldedLinear)]


def test_folded_lora_has_the_same_output_and_gradients():
    plain, other = build(), build()
    fold_lora(other.transformer)
    assert len(folded(other)) == 15  # eight in each of two blocks, except the last text output
    torch.testing.assert_close(velocity(other), velocity(plain), rtol=1e-4, atol=1e-5)
    expected, found = gradients(plain), gradients(other)
    assert expected.keys() == found.keys()
    for name in expected:
        assert (found[name] - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


def test_folded_layers_with_disabled_lora_are_the_base_model():
    adapter = build()
    base = SD3Adapter(build_tiny_sd3(), max_sequence_length=4)
    fold_lora(adapter.transformer)
    adapter.transformer.disable_adapters()
    torch.testing.assert_close(velocity(adapter), velocity(base), rtol=1e-4, atol=1e-5)
    adapter.transformer.enable_adapters()
    assert (velocity(adapter) - velocity(base)).abs().max() > 1e-2


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}])
def test_only_plain_lora_is_folded(lora):
    adapter = build(**lora)
    fold_lora(adapter.transformer)
    assert not folded(adapter)


def test_layers_that_are_large_for_their_rank_are_not_folded():
    adapter = build(r=5)  # for weights of 32 x 32
    fold_lora(adapter.transformer)
    assert not folded(adapter)


def test_half_precision_is_not_folded():
    adapter = build(torch.bfloat16)
    fold_lora(adapter.transformer)
    assert not folded(adapter)


def test_training_folds_lora(tmp_path):
    session = build_session(short_config(tmp_path, "folds"))
    session.close()
    assert folded(session.adapter)


def test_layers_are_folded_before_they_share_projections():
    """Otherwise layers with shared projections would not be folded."""
    adapter = build()
    adapter.apply_optimizations(fold=True, compiled=True, graphs=False)
    assert len(folded(adapter)) == 15
    assert (adapter.compiled, adapter.uses_cuda_graphs) == (True, False)
    plain = build()
    plain.apply_optimizations(fold=False, compiled=True, graphs=False)
    shared = [m for m in plain.transformer.modules() if type(m) is SharedInputLoraLinear]
    assert len(shared) == 12
    assert not folded(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_goes_to_a_neighbour_and_is_unbiased(dtype):
    x = torch.linspace(0.01, 3, 500)
    x = torch.cat([x, -x])
    found = cast_stochastic(x.repeat(2000, 1), dtype)
    assert found.dtype == dtype
    step = torch.finfo(dtype).eps * 2  # of numbers below 4
    assert (found.double() - x).abs().max() <= step
    torch.testing.assert_close(found.double().mean(0), x.double(), atol=step / 10, rtol=0)
    assert torch.equal(cast_stochastic(found.float(), dtype), found)  # exact values are kept
    assert torch.equal(cast_stochastic(x, dtype), cast_stochastic(x, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_keeps_nonfinite_values(dtype):
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32)
    found = cast_stochastic(bits.view(torch.float32).repeat(50, 1), dtype).float()
    assert found[:, :3].isnan().all()
    assert torch.equal(found[:, 3:], torch.tensor([math.inf, -math.inf]).expand(50, 2))
