"""LoRA added to the weights: the same function, and gone again; and weights that replace them."""

import pytest
import torch
from policies import policy_of
from safetensors.torch import load_file, save_file
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.draw.models import load_adapter
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.policy import Policy
from flow_grpo.errors import UserError
from flow_grpo.speed.lora import MergedLora, rounded_at_random, rounding_noise


def build(dtype: torch.dtype, std: float) -> Policy:
    policy = policy_of(SD3Adapter(build_tiny_sd3(), dtype=dtype, max_sequence_length=4), rank=4)
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
    merged = MergedLora(policy.lora_layers)
    merged.renew(seed=0)
    for _ in range(2):
        with merged.applied():
            assert layer.disable_adapters
            torch.testing.assert_close(velocity(policy), before, rtol=1e-4, atol=1e-4)
        assert not layer.disable_adapters
        assert torch.equal(velocity(policy), before)
    with pytest.raises(KeyError), merged.applied():
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
    means, merged = [], MergedLora([layer])
    for seed in range(200):
        merged.renew(seed)
        with merged.applied():
            means.append(weight.float() - plain)
    share = (torch.stack(means).mean(0) * delta).sum() / delta.square().sum()
    assert share == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(dtype):
    x = torch.linspace(0.01, 3, 500)
    x = torch.cat([x, -x])
    noises = [rounding_noise(x.to(dtype), seed) for seed in range(2000)]
    found = torch.stack([rounded_at_random(x, dtype, noise) for noise in noises]).double()
    assert torch.equal(found.to(dtype).double(), found)
    step = torch.finfo(dtype).eps * 2  # of numbers below 4
    assert (found - x).abs().max() <= step
    torch.testing.assert_close(found.mean(0), x.double(), atol=step / 10, rtol=0)
    exact = x.to(dtype)
    assert torch.equal(rounded_at_random(exact.float(), dtype, noises[0]), exact.float())


def test_a_whole_transformer_must_fit(tiny_sd3, tmp_path):
    policy = policy_of(load_adapter(str(tiny_sd3)), use_lora=False)
    policy.save(tmp_path)
    folder = tmp_path / "transformer"
    [file] = folder.glob("*.safetensors")
    good = load_file(file)
    load_adapter(str(tiny_sd3)).load_weights(folder)
    some = next(iter(good))
    for changed, message in [
        ({**good, "other": torch.zeros(1)}, "it has other"),
        ({name: t for name, t in good.items() if name != "proj_out.weight"}, "it has no proj_out"),
        ({**good, some: torch.zeros(1, 2)}, "its tensors have other shapes"),
    ]:
        save_file(changed, file)
        with pytest.raises(UserError, match=f"is of another model: {message}"):
            load_adapter(str(tiny_sd3)).load_weights(folder)
