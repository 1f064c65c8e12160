"""LoRA added to the weights: the same function, and gone again."""

import pytest
import torch
from peft import LoraConfig

from flow_grpo.merging import can_merge, merge_lora, round_at_random
from flow_grpo.models import SD3Adapter
from flow_grpo.models.tiny_sd3 import build_tiny_sd3
from flow_grpo.policy import Policy


def build(dtype: torch.dtype, std: float) -> Policy:
    policy = Policy(SD3Adapter(build_tiny_sd3(), dtype=dtype, max_sequence_length=4), rank=4)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.transformer.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(std * torch.randn(parameter.shape, generator=generator))
    return policy


def velocity(policy: Policy) -> torch.Tensor:
    adapter = policy.adapter
    latents = torch.randn(
        2, *adapter.latent_shape(32, 32), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        texts = adapter.encode(["a", "b"], None)
        return adapter.velocity(policy.module, latents, 500.0, texts, 1.0)


def test_a_merged_lora_draws_the_same_and_is_taken_away_again():
    policy = build(torch.float32, std=0.1)
    layer = policy.transformer.transformer_blocks[0].attn.to_q
    before = velocity(policy)
    merged = merge_lora(policy.transformer, torch.Generator())
    for _ in range(2):
        with merged():
            assert layer.disable_adapters
            torch.testing.assert_close(velocity(policy), before, rtol=1e-4, atol=1e-4)
        assert not layer.disable_adapters
        assert torch.equal(velocity(policy), before)
    with pytest.raises(KeyError), merged():
        raise KeyError
    assert torch.equal(velocity(policy), before)
    assert layer.lora_A["default"].weight.requires_grad


@pytest.mark.parametrize(("dtype", "std"), [(torch.bfloat16, 1e-5), (torch.float16, 1e-6)])
def test_half_precision_does_not_swallow_a_small_lora(dtype, std):
    policy = build(dtype, std)
    layer = policy.transformer.transformer_blocks[0].attn.to_q
    weight, delta = layer.base_layer.weight, layer.get_delta_weight("default").detach()
    plain = weight.float()
    swallowed = ((plain + delta).to(dtype).float() - plain) * delta
    assert swallowed.sum() < 0.7 * delta.square().sum()
    means = []
    for seed in range(200):
        with merge_lora(policy.transformer, torch.Generator().manual_seed(seed))():
            means.append(weight.float() - plain)
    share = (torch.stack(means).mean(0) * delta).sum() / delta.square().sum()
    assert share == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(dtype):
    x = torch.linspace(-3, 3, 1001)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(2000):
        found.append(round_at_random(x, dtype, generator, {}).double())
    found = torch.stack(found)
    step = torch.finfo(dtype).eps * 2  # of numbers below 4
    assert (found - x).abs().max() <= step
    torch.testing.assert_close(found.mean(0), x.double(), atol=step / 10, rtol=0)
    exact = x.to(dtype)
    assert torch.equal(round_at_random(exact.float(), dtype, generator, {}), exact)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_dora_cannot_be_merged():
    policy = build(torch.float32, std=0.1)
    assert can_merge(policy.transformer)
    dora = LoraConfig(r=2, use_dora=True, target_modules=["ff.net.2"])
    policy.transformer.add_adapter(dora, adapter_name="dora")
    assert not can_merge(policy.transformer)
