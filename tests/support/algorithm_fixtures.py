"""Algorithms, samples and a small policy in float64, for tests of formulas."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.diffusion.algorithms import ALGORITHMS, Algorithm, Batch, Setup
from flow_grpo.diffusion.algorithms.forward_process import ForwardProcessAlgorithm, NoisedSamples
from flow_grpo.diffusion.algorithms.trajectory import PolicyStep
from flow_grpo.diffusion.models import Conditioning
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Dynamics, Trajectory, initial_noise
from flow_grpo.sde import Step
from flow_grpo.training.snapshot import Snapshot

STEPS = 4
METHODS = [
    n for n, a in ALGORITHMS.items() if a.__module__.startswith("flow_grpo.diffusion.algorithms.")
]


def method(name: str, setup: dict[str, Any] | None = None, **settings: Any) -> Algorithm:
    """Build an algorithm from its settings and the fields of its `Setup`."""
    chosen = ALGORITHMS[name]
    return chosen(chosen.Settings(**settings), Setup(**(setup or {})))


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pixels(*samples: list[float]) -> Tensor:
    """Return a float64 tensor of shape (B, 1, 1, W)."""
    return numbers(*samples)[:, None, None]


def policy_step(
    log_ratio: list[float],
    credit: list[float],
    *,
    mean: Tensor | None = None,
    old_mean: Tensor | None = None,
    std: float = 1.0,
) -> PolicyStep:
    mean = pixels(*[[0.0, 0.0]] * len(credit)) if mean is None else mean
    width = torch.full((1, 1, 1, 1), std, dtype=torch.float64)
    step = Step(mean, numbers(*log_ratio), mean, width, width)
    old_mean = mean if old_mean is None else old_mean
    return PolicyStep(step, numbers(*log_ratio).requires_grad_(), old_mean, numbers(*credit), -0.25)


def at_noise_level(t: float, target: Tensor, **velocities: Tensor) -> NoisedSamples:
    size = len(target)
    return NoisedSamples(
        np.zeros(size, int),
        torch.full((size, 1, 1, 1), t, dtype=torch.float64),
        torch.full((size,), 1000 * t),
        torch.zeros_like(target),
        target,
        **velocities,
    )


def samples_with_credit(*credit: float, groups: list[int] | None = None) -> Batch:
    """Return samples with these credits; the final latent of sample i is i."""
    size = len(credit)
    empty = torch.zeros(size, 0, dtype=torch.float64)
    texts = torch.zeros(1, 1, 1)
    conditioning = Conditioning({"embeds": texts}, torch.zeros(size, dtype=torch.long), None)
    final = pixels(*[[float(i)] for i in range(size)])
    return Batch(
        Trajectory(final, range(0), empty, empty, conditioning),
        numbers(*credit),
        np.arange(size),
        np.zeros(size, int) if groups is None else np.array(groups),
    )


def objective(
    algorithm: ForwardProcessAlgorithm, velocity: Tensor, at: NoisedSamples, *credit: float
) -> tuple[list[float], list[list[float]], dict[str, Tensor]]:
    """Return the losses, their gradients with respect to the velocity, and the metrics."""
    velocity = velocity.clone().requires_grad_()
    loss, columns = algorithm.objective(velocity, at, samples_with_credit(*credit))
    loss.sum().backward()
    return loss.tolist(), velocity.grad.squeeze(1, 2).tolist(), columns


@cache
def small_adapter() -> SD3Adapter:
    pipeline = build_tiny_sd3(qk_norm=None)  # diffusers' RMSNorm computes in float32
    return SD3Adapter(pipeline, dtype=torch.float64, max_sequence_length=4)


@cache
def small_policy() -> Policy:
    """Return a shared policy; `rollout` sets its weights, dynamics and old weights per test."""
    adapter = small_adapter()
    policy = Policy(adapter, Dynamics(adapter.schedule(STEPS, 16, 24)), rank=2, alpha=4)
    policy.reference = Snapshot(policy.trained_parameters(), "reference")
    policy.old = Snapshot(policy.trained_parameters(), "old")
    for seed, path in enumerate(("signs/lora", "scenes/lora", ""), 1):
        policy.loras[path] = teacher = Snapshot(policy.trained_parameters(), path)
        generator = torch.Generator().manual_seed(seed)
        for copy in teacher.copy:
            copy += 0.2 * torch.randn(copy.shape, generator=generator, dtype=copy.dtype)
    return policy


def rollout(
    algorithm: Algorithm, *, guidance: float = 1.0, kind: str = "flow", moved: float = 0.02
) -> tuple[Policy, Batch]:
    """Sample two groups of two, then perturb the weights.

    The behaviour policy differs from the reference. The old weights remain those of the behaviour
    policy, and the current weights differ from them by noise of scale `moved`.
    """
    policy, adapter = small_policy(), small_adapter()
    policy.dynamics = Dynamics(adapter.schedule(STEPS, 16, 24), kind, 0.7, guidance)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    perturb(policy, generator, 0.2)
    policy.old.blend(0)
    generators = [torch.Generator().manual_seed(s) for s in range(4)]
    trajectory = policy.denoiser.sample(
        initial_noise(generators, adapter.latent_shape(16, 24), "cpu").double(),
        adapter.encode(["a", "a", "b", "b"], ["", "", "c", "c"] if guidance > 1 else None),
        steps=algorithm.noisy_steps(np.random.default_rng(0), 0),
        generators=generators,
        keep_means=algorithm.records_step_means,
        keep_states=algorithm.needs_reward_gradient,
    )
    if algorithm.needs_reward_gradient:  # of a reward with its maximum at 1/2 everywhere
        trajectory = replace(trajectory, reward_gradient=1 - 2 * trajectory.final)
    perturb(policy, generator, moved)
    credit = numbers(1.5, -0.7, 0.3, -1.1)
    tasks = np.array(["signs", "scenes", "signs", "scenes"])
    groups = np.array([0, 0, 1, 1])
    return policy, Batch(trajectory, credit, np.arange(4), groups, (3, 1, 0), tasks)


def perturb(policy: Policy, generator: torch.Generator, scale: float) -> None:
    """Add Gaussian noise to the trained weights."""
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += scale * noise
    policy.on_weights_updated()


def assert_gradient_matches(
    objective: Callable[[], Tensor], policy: Policy, generator: torch.Generator
) -> None:
    """Compare the gradient with finite differences in random directions.

    One direction changes all LoRA B matrices, the other all A matrices.
    """
    parameters = policy.parameters()
    gradients = torch.autograd.grad(objective(), parameters)
    start = [p.detach().clone() for p in parameters]
    is_b = ["lora_B" in name for name in policy.trained_parameters()]
    for chosen in (is_b, [not b for b in is_b]):
        direction = [
            torch.randn(p.shape, generator=generator, dtype=p.dtype) * use
            for p, use in zip(parameters, chosen, strict=True)
        ]
        h, values = 1e-5, []
        for sign in (h, -h):
            with torch.no_grad():
                for p, at, d in zip(parameters, start, direction, strict=True):
                    p.copy_(at + sign * d)
                values.append(objective().item())
        expected = (values[0] - values[1]) / (2 * h)
        slope = sum((g * d).sum().item() for g, d in zip(gradients, direction, strict=True))
        assert abs(expected) > 1e-4
        assert slope == pytest.approx(expected, rel=1e-5)
