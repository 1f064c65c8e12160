"""Tests of every model family on a GPU, compiled and eager.

python -m pytest -q --noconftest tests/gpu        on a machine with a GPU
"""

import pytest
import torch
from families import FAMILIES
from gpu_runs import PROMPTS, Run, relative
from reference_distances import METHODS, distances
from torch.nn.attention import SDPBackend, sdpa_kernel

COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@COMPILED
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_ratio_is_exactly_1(family, compiled):
    run = Run("bf16", family=family, compiled=compiled, replay=True, layers=1)
    trajectory = run.sample()
    for j in (0, 1):
        assert run.train(trajectory, [j]).isfinite().all()
        assert torch.equal(run.ratio, torch.ones_like(run.ratio))
    whole = distances(METHODS["trajectory"], run.policy, trajectory)
    assert whole["ratio"] == 0 < whole["kl"]
    run.reset()
    assert_at_start(run)


@pytest.mark.parametrize(
    ("family", "compiled"), [*((family, False) for family in FAMILIES), (FAMILIES[0], True)]
)
def test_full_weights_equal_their_reference_at_the_start(family, compiled):
    assert_at_start(Run("bf16", family=family, compiled=compiled, replay=False, use_lora=False))


def assert_at_start(run: Run) -> None:
    """Assert that policy and reference compute exactly the same."""
    trajectory = run.sample()
    for name, algorithm in METHODS.items():
        assert set(distances(algorithm, run.policy, trajectory).values()) == {0}, name


def gradient_of_velocity(run: Run, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = len(PROMPTS), *run.adapter.latent_shape(*run.size)
    latents = torch.randn(shape, generator=generator).cuda()
    texts = run.adapter.encode(PROMPTS, [""] * len(PROMPTS), run.images)
    velocity = run.adapter.velocity(run.policy.module, latents, 500.0, texts, scale)
    velocity.square().mean().backward()
    return torch.cat([p.grad.flatten() for p in run.policy.parameters()])


@COMPILED
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_gradients_equal_those_of_plain_attention(family, compiled):
    """cuDNN attention silently computed wrong ones for FLUX.1."""
    plain = Run("bf16", family=family, replay=False, layers=1)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradient_of_velocity(plain, family.guidance_scale)
    run = Run("bf16", family=family, compiled=compiled, replay=False, layers=1)
    assert relative(gradient_of_velocity(run, family.guidance_scale), expected) < 0.1
