"""Algorithms, samples and a small policy in float64 for tests of their formulas."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.draw.algorithms import ALGORITHMS, Algorithm, Batch, Setup
from flow_grpo.draw.algorithms.forward import ForwardProcess, Noised
from flow_grpo.draw.algorithms.trajectory import Taken
from flow_grpo.draw.models import Conditioning
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.policy import Policy
from flow_grpo.draw.rollout import Dynamics, Trajectory, initial_noise
from flow_grpo.run.snapshot import Snapshot
from flow_grpo.sde import Step

STEPS = 4
METHODS = [
    n for n, a in ALGORITHMS.items() if a.__module__.startswith("flow_grpo.draw.algorithms.")
]


def method(name: str, setup: dict[str, Any] | None = None, **settings: Any) -> Algorithm:
    chosen = ALGORITHMS[name]
    return chosen(chosen.Settings(**settings), Setup(**(setup or {})))


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pixels(*samples: list[float]) -> Tensor:
    """(B, 1, 1, W)"""
    return numbers(*samples)[:, None, None]


def taken(
    log_ratio: list[float],
    credit: list[float],
    *,
    mean: Tensor | None = None,
    old_mean: Tensor | None = None,
    std: float = 1.0,
) -> Taken:
    mean = pixels(*[[0.0, 0.0]] * len(credit)) if mean is None else mean
    width = torch.full((1, 1, 1, 1), std, dtype=torch.float64)
    step = Step(mean, numbers(*log_ratio), mean, width, width)
    old_mean = mean if old_mean is None else old_mean
    return Taken(step, numbers(*log_ratio).requires_grad_(), old_mean, numbers(*credit), -0.25)


def at_level(t: float, target: Tensor, **velocities: Tensor) -> Noised:
    size = len(target)
    return Noised(
        np.zeros(size, int),
        torch.full((size, 1, 1, 1), t, dtype=torch.float64),
        torch.full((size,), 1000 * t),
        torch.zeros_like(target),
        target,
        **velocities,
    )


def of_credit(*credit: float, groups: list[int] | None = None) -> Batch:
    """Samples that have a credit, counted in their final latents."""
    size = len(credit)
    nothing = torch.zeros(size, 0, dtype=torch.float64)
    texts = torch.zeros(1, 1, 1)
    conditioning = Conditioning({"embeds": texts}, torch.zeros(size, dtype=torch.long), None)
    final = pixels(*[[float(i)] for i in range(size)])
    return Batch(
        Trajectory(final, range(0), nothing, nothing, conditioning),
        numbers(*credit),
        np.arange(size),
        np.zeros(size, int) if groups is None else np.array(groups),
    )


def objective(
    algorithm: ForwardProcess, velocity: Tensor, at: Noised, *credit: float
) -> tuple[list[float], list[list[float]], dict[str, Tensor]]:
    """The loss, and its gradient in the velocity."""
    velocity = velocity.clone().requires_grad_()
    loss, columns = algorithm.objective(velocity, at, of_credit(*credit))
    loss.sum().backward()
    return loss.tolist(), velocity.grad.squeeze(1, 2).tolist(), columns


@cache
def small_adapter() -> SD3Adapter:
    pipeline = build_tiny_sd3(qk_norm=None)  # diffusers' RMSNorm computes in float32
    return SD3Adapter(pipeline, dtype=torch.float64, max_sequence_length=4)


@cache
def small_policy() -> Policy:
    """Share it: each test sets its weights, dynamics and old weights by `rollout`."""
    adapter = small_adapter()
    policy = Policy(adapter, Dynamics(adapter.schedule(STEPS, 16, 24)), rank=2, alpha=4)
    policy.reference = Snapshot(policy.trained(), "reference")
    policy.old = Snapshot(policy.trained(), "old")
    for seed, path in enumerate(("signs/lora", "scenes/lora", ""), 1):
        policy.loras[path] = teacher = Snapshot(policy.trained(), path)
        generator = torch.Generator().manual_seed(seed)
        for copy in teacher.copy:
            copy += 0.2 * torch.randn(copy.shape, generator=generator, dtype=copy.dtype)
    return policy


def rollout(
    algorithm: Algorithm, *, guidance: float = 1.0, kind: str = "flow", moved: float = 0.02
) -> tuple[Policy, Batch]:
    """Two groups of two, drawn by weights away from the reference, which then move by `moved`;
    the old weights stay."""
    policy, adapter = small_policy(), small_adapter()
    policy.dynamics = Dynamics(adapter.schedule(STEPS, 16, 24), kind, 0.7, guidance)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    move(policy, generator, 0.2)
    policy.old.blend(0)
    generators = [torch.Generator().manual_seed(s) for s in range(4)]
    trajectory = policy.denoiser.sample(
        initial_noise(generators, adapter.latent_shape(16, 24), "cpu").double(),
        adapter.encode(["a", "a", "b", "b"], ["", "", "c", "c"] if guidance > 1 else None),
        steps=algorithm.noisy_steps(np.random.default_rng(0), 0),
        generators=generators,
        keep_means=algorithm.keeps_means,
        keep_states=algorithm.needs_reward_gradient,
    )
    if algorithm.needs_reward_gradient:  # of a reward that is best at 1/2 everywhere
        trajectory = replace(trajectory, pull=1 - 2 * trajectory.final)
    move(policy, generator, moved)
    credit = numbers(1.5, -0.7, 0.3, -1.1)
    tasks = np.array(["signs", "scenes", "signs", "scenes"])
    groups = np.array([0, 0, 1, 1])
    return policy, Batch(trajectory, credit, np.arange(4), groups, (3, 1, 0), tasks)


def move(policy: Policy, generator: torch.Generator, by: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += by * noise
    policy.moved()


def assert_slopes(
    objective: Callable[[], Tensor], policy: Policy, generator: torch.Generator
) -> None:
    """The gradient against finite differences, along all of one kind of LoRA's factors at once."""
    parameters = policy.parameters()
    gradients = torch.autograd.grad(objective(), parameters)
    start = [p.detach().clone() for p in parameters]
    is_b = ["lora_B" in name for name in policy.trained()]
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
