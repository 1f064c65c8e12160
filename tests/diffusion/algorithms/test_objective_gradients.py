"""The gradient of the full objective against finite differences, in float64."""

import numpy as np
import pytest
import torch
from algorithm_fixtures import assert_gradient_matches, perturb
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.diffusion.algorithms import Batch, Setup
from flow_grpo.diffusion.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Dynamics, initial_noise
from flow_grpo.training.snapshot import Snapshot


@pytest.mark.parametrize(
    ("kind", "kl"), [("flow", "flow_grpo"), ("dance", "gaussian"), ("cps", "velocity")]
)
@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_gradient_of_loss_and_kl_equals_finite_differences(kind, kl, guidance):
    pipeline = build_tiny_sd3(qk_norm=None)  # diffusers' RMSNorm computes in float32
    adapter = SD3Adapter(pipeline, dtype=torch.float64, max_sequence_length=4)
    dynamics = Dynamics(adapter.schedule(4, 16, 24), kind, 0.7, guidance)
    policy = Policy(adapter, dynamics, rank=2, alpha=4)
    policy.reference = Snapshot(policy.trained_parameters(), "reference")
    generator = torch.Generator().manual_seed(0)
    perturb(policy, generator, 0.2)  # away from LoRA's zero start, where the KL has no gradient
    seeds = [torch.Generator().manual_seed(s) for s in range(3)]
    noise = initial_noise(seeds, adapter.latent_shape(16, 24), "cpu").double()
    conditioning = adapter.encode(["a", "b", "a"], ["", "", "c"] if guidance > 1 else None)
    trajectory = policy.denoiser.sample(noise, conditioning, steps=range(3), generators=seeds)
    perturb(policy, generator, 0.02)  # away from ratio 1
    advantages = torch.tensor([1.5, -0.7, 0.3], dtype=torch.float64)
    batch = Batch(trajectory, advantages, np.arange(3), np.zeros(3, int))
    algorithm = Grpo(GrpoSettings(clip_range=0.5, beta=0.3, kl_type=kl), Setup(sde_type=kind))
    references = algorithm.prepare(policy, batch)

    def objective() -> torch.Tensor:
        steps = [algorithm.loss(policy, batch, references, j) for j in range(3)]
        assert all((s.columns["kl"] > 0).all() for s in steps)
        return torch.stack([s.per_sample.mean() for s in steps]).mean()

    assert_gradient_matches(objective, policy, generator)
