"""AdamW in bfloat16: small changes accumulate, and saved states continue bit for bit."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from flow_grpo.training import adamw_bf16
from flow_grpo.training.adamw_bf16 import AdamWBf16
from flow_grpo.training.finite import step_if_finite

SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
COUNT = 2**15


def constant_steps(kind: type, gradients: list[float], dtype: torch.dtype) -> tuple[Tensor, dict]:
    """Return weights that start at 1, and their state, after steps with equal gradients."""
    weight = nn.Parameter(torch.ones(COUNT, dtype=dtype))
    optimizer = kind([weight], **SETTINGS)
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def test_steps_below_the_resolution_accumulate():
    """With a constant gradient, every step of Adam is the learning rate.

    A step is 1/39 of the distance of the neighbours of a weight below 1. The standard error of the
    mean is below sqrt(100 x 1e-4 / 256 / COUNT) = 3.5e-5.
    """
    weight, _ = constant_steps(AdamWBf16, [1.0] * 100, torch.bfloat16)
    assert float(weight.double().mean()) == pytest.approx(1 - 100 * 1e-4, abs=2e-4)
    nearest, _ = constant_steps(torch.optim.AdamW, [1.0] * 100, torch.bfloat16)
    assert torch.equal(nearest, torch.ones_like(nearest))


def test_moments_decay():
    """After a gradient of 1, n steps without a gradient leave (1 - beta2) beta2^n."""
    _, state = constant_steps(AdamWBf16, [1.0] + [0.0] * 100, torch.bfloat16)
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    expected = 1e-3 * 0.999**100
    assert float(state["exp_avg_sq"].double().mean()) == pytest.approx(expected, rel=6e-4)
    _, nearest = constant_steps(torch.optim.AdamW, [1.0] + [0.0] * 100, torch.bfloat16)
    assert float(nearest["exp_avg_sq"].double().mean()) > 1.05 * expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_equals_the_adamw_of_torch_in_other_dtypes(dtype, monkeypatch):
    monkeypatch.setattr(adamw_bf16, "CHUNK", 7)
    torch.manual_seed(0)
    starts = [torch.randn(4, 5, dtype=dtype), torch.randn(5, 3, dtype=dtype).T]
    found = []
    for kind in (AdamWBf16, torch.optim.AdamW):
        weights = [nn.Parameter(start.clone()) for start in starts]
        groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": 1e-2}]
        optimizer = kind(groups, **{**SETTINGS, "weight_decay": 0.1})
        for step in range(5):
            for weight in weights:
                weight.grad = torch.sin(weight.detach() + step)
            optimizer.step()
        found.append(weights)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=1e-7 if dtype.itemsize == 4 else 1e-14
        )


def noisy_steps(optimizer: AdamWBf16, weight: nn.Parameter, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
        optimizer.step()


def test_a_loaded_state_continues_bit_for_bit():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1000).bfloat16())
    optimizer = AdamWBf16([weight], **SETTINGS)
    noisy_steps(optimizer, weight, range(3))
    other, state = copy.deepcopy(weight), copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(1)  # the global generator has no effect
    resumed = AdamWBf16([other], **SETTINGS)
    resumed.load_state_dict(state)
    noisy_steps(optimizer, weight, range(3, 6))
    noisy_steps(resumed, other, range(3, 6))
    assert torch.equal(weight, other)
    for name, value in optimizer.state[weight].items():
        assert torch.equal(value, resumed.state[other][name])
        assert value.dtype == (torch.float32 if name == "step" else torch.bfloat16)


def test_a_nonfinite_gradient_changes_nothing():
    weight = nn.Parameter(torch.randn(100).bfloat16())
    optimizer = AdamWBf16([weight], **SETTINGS)
    noisy_steps(optimizer, weight, range(2))
    before, state = weight.detach().clone(), copy.deepcopy(optimizer.state[weight])
    weight.grad = torch.full_like(weight, torch.nan)
    assert not step_if_finite(Accelerator(cpu=True), optimizer, float("nan"))
    assert torch.equal(weight, before)
    assert all(torch.equal(state[name], value) for name, value in optimizer.state[weight].items())
