"""Rollout gradients with CUDA graphs and compiled code.

python -m pytest -q --noconftest tests/gpu/test_rollout_gradients_gpu.py    on a GPU machine
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from gpu_runs import PROMPTS, Run, relative

from flow_grpo.data.seeding import sample_generators
from flow_grpo.diffusion.algorithms import Batch, Setup
from flow_grpo.diffusion.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.diffusion.rollout import initial_noise
from flow_grpo.diffusion.rollout_gradients import RolloutGradients

CREDIT = [1.5, -0.7]


@pytest.mark.parametrize(
    ("precision", "compiled", "replay", "beta", "off"),
    [
        ("no", False, True, 0.0, 1e-4),
        ("bf16", False, True, 0.0, 3e-2),
        ("bf16", True, True, 0.0, 3e-2),
        ("bf16", True, False, 0.3, 3e-2),  # CUDA graphs are off with a KL
    ],
)
def test_rollout_gradients_equal_those_of_the_training_loop(precision, compiled, replay, beta, off):
    run = Run(precision, compiled=compiled, replay=replay, width=64)
    policy, adapter = run.policy, run.adapter
    with torch.no_grad():
        for copy in policy.reference.copy:  # otherwise the KL has no gradient
            copy.mul_(0.5)
    algorithm = Grpo(GrpoSettings(beta=beta), Setup(num_steps=4))
    kept = RolloutGradients(Accelerator(), policy, algorithm)
    for _ in range(2):  # captured or compiled, then reused
        kept.reset()
        batches = []
        for i, credit in enumerate(CREDIT):
            generators = sample_generators(0, 0, [i])
            trajectory = policy.denoiser.sample(
                initial_noise(generators, adapter.latent_shape(*run.size), "cuda"),
                adapter.encode(PROMPTS[i : i + 1], [""]),
                steps=range(1, 3),
                generators=generators,
                stochastic_step_fn=kept.step,
            )
            kept.store(np.array([i]))
            batches.append(Batch(trajectory, torch.tensor([credit]), np.array([i]), np.zeros(1)))
        kept.assign_weighted_gradient(batches)
        found = torch.cat([p.grad.flatten() for p in policy.parameters()])
        policy.transformer.zero_grad(set_to_none=True)
    for batch in [replace(b, credit=b.credit.cuda()) for b in batches]:
        prepared = algorithm.prepare(policy, batch)
        for j in range(2):
            loss = algorithm.loss(policy, batch, prepared, j)
            assert torch.equal(loss.columns["ratio"], torch.ones(1, device="cuda"))
            loss.per_sample.sum().backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert relative(found, expected) < off
