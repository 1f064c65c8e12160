"""LoRA folded into the weights: the same function and gradients, where it can be."""

import pytest
import torch
from peft import LoraConfig
from sessions import short_config
from torch import nn
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.session import build_session
from flow_grpo.speed.faster import SiblingLinear
from flow_grpo.speed.lora import FoldedLinear, fold_lora


def build(dtype: torch.dtype = torch.float32, **lora) -> SD3Adapter:
    """A model whose LoRA does something."""
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


def test_folded_lora_is_the_same_function_with_the_same_gradients():
    plain, other = build(), build()
    fold_lora(other.transformer)
    assert len(folded(other)) == 15  # eight in each of two blocks, but for the last text output
    torch.testing.assert_close(velocity(other), velocity(plain), rtol=1e-4, atol=1e-5)
    expected, found = gradients(plain), gradients(other)
    assert expected.keys() == found.keys()
    for name in expected:
        assert (found[name] - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


def test_without_its_adapters_it_is_the_model_below():
    adapter = build()
    base = SD3Adapter(build_tiny_sd3(), max_sequence_length=4)
    fold_lora(adapter.transformer)
    adapter.transformer.disable_adapters()
    torch.testing.assert_close(velocity(adapter), velocity(base), rtol=1e-4, atol=1e-5)
    adapter.transformer.enable_adapters()
    assert (velocity(adapter) - velocity(base)).abs().max() > 1e-2


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}])
def test_what_is_no_plain_sum_stays_as_it_is(lora):
    adapter = build(**lora)
    fold_lora(adapter.transformer)
    assert not folded(adapter)


def test_wide_layers_stay_as_they_are():
    adapter = build(r=5)  # of 32 x 32
    fold_lora(adapter.transformer)
    assert not folded(adapter)


def test_half_precision_stays_as_it_is():
    adapter = build(torch.bfloat16)
    fold_lora(adapter.transformer)
    assert not folded(adapter)


def test_training_folds(tmp_path):
    session = build_session(short_config(tmp_path, "folds"))
    session.close()
    assert folded(session.adapter)


def test_layers_are_folded_before_siblings_are_joined():
    """The other way round, joined layers would be left as they are."""
    adapter = build()
    adapter.speed_up(fold=True, compiled=True, graphs=False)
    assert len(folded(adapter)) == 15
    assert (adapter.compiled, adapter.replayed) == (True, False)
    plain = build()
    plain.speed_up(fold=False, compiled=True, graphs=False)
    joined = [m for m in plain.transformer.modules() if type(m) is SiblingLinear]
    assert len(joined) == 12
    assert not folded(plain)
