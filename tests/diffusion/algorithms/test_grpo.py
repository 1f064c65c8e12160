"""Optimizations of the loss do not change its result."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from flow_grpo.data.seeding import sample_generators
from flow_grpo.diffusion.algorithms import Batch, Loss, Setup
from flow_grpo.diffusion.algorithms.base import drop_zero_gradient
from flow_grpo.diffusion.algorithms.grpo import Grpo, GrpoSettings
from flow_grpo.diffusion.algorithms.trajectory import PreparedBatch
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Dynamics, initial_noise
from flow_grpo.training.snapshot import Snapshot

WITHOUT_KL = Grpo(GrpoSettings(beta=0.0), Setup())
ADVANTAGES = (0.7, 0.1, -1.2, 0.5)


def sampled(
    adapter,
    *,
    guidance: float = 1.0,
    steps: range = range(2),
    advantages: tuple[float, ...] = ADVANTAGES,
) -> tuple[Policy, Batch]:
    policy = Policy(
        adapter, Dynamics(adapter.schedule(4, 32, 32), "flow", 0.7, guidance), rank=4, alpha=8
    )
    policy.reference = Snapshot(policy.trained_parameters(), "reference")
    generators = sample_generators(0, 0, range(4))
    trajectory = policy.denoiser.sample(
        initial_noise(generators, adapter.latent_shape(32, 32), "cpu"),
        adapter.encode(["a", "b", "a", "c"], ["", "x", "", ""] if guidance > 1 else None),
        steps=steps,
        generators=generators,
    )
    return policy, Batch(trajectory, torch.tensor(advantages), np.arange(4), np.arange(4) // 2)


def samples_with_gradient(batch: Batch, advantages: list[float]) -> Batch:
    batch = replace(batch, credit=torch.tensor(advantages))
    (part,) = drop_zero_gradient(WITHOUT_KL, [batch], batch=False, sample=True)
    return part


def gradient(policy: Policy, batch: Batch, size: int) -> torch.Tensor:
    loss = WITHOUT_KL.loss(policy, batch, PreparedBatch(None), 1)
    (loss.per_sample.sum() / size).backward()
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    for parameter in policy.parameters():
        parameter.grad = None
    return found


def test_samples_without_advantage_have_no_gradient_and_can_be_dropped(adapter):
    policy, batch = sampled(adapter, advantages=(0.7, 0.0, -1.2, 0.0))
    part = samples_with_gradient(batch, batch.credit.tolist())
    assert part.credit.tolist() == batch.credit[[0, 2]].tolist()
    assert torch.equal(part.trajectory.latents, batch.trajectory.latents[[0, 2]])
    assert torch.equal(part.trajectory.final, batch.trajectory.final[[0, 2]])
    assert part.index.tolist() == [0, 2]
    assert part.group.tolist() == [0, 1]
    assert len(part.trajectory.conditioning) == len(part.trajectory) == len(part) == 2
    whole = gradient(policy, batch, 4)
    assert whole.norm() > 0
    found = gradient(policy, part, 4)
    assert (found - whole).norm() < 1e-4 * whole.norm()


def test_dropping_when_all_or_no_samples_have_a_gradient(adapter):
    _, batch = sampled(adapter)
    assert samples_with_gradient(batch, [1.0, 2.0, 3.0, 4.0]).index.tolist() == [0, 1, 2, 3]
    # every process has its part in every update
    assert samples_with_gradient(batch, [0.0] * 4).index.tolist() == [0, 1]


def test_batches_without_a_gradient_are_dropped_except_one(adapter):
    _, batch = sampled(adapter)
    none = replace(batch, credit=torch.zeros(4))
    some = replace(batch, credit=torch.tensor([0.0, 0.0, 3.0, 0.0]))

    def kept(batches, **leave_out):
        return drop_zero_gradient(WITHOUT_KL, batches, **leave_out)

    assert kept([none, some, none], batch=True, sample=False) == [some]
    last = replace(none)
    assert kept([none, last], batch=True, sample=False)[0] is last
    assert kept([none, some], batch=False, sample=False) == [none, some]
    (alone,) = kept([none, some], batch=True, sample=True)
    assert alone.index.tolist() == [2]
    with_kl = Grpo(GrpoSettings(beta=0.04), Setup())  # the KL has a gradient everywhere
    assert drop_zero_gradient(with_kl, [none, some], batch=True, sample=True) == [none, some]


def test_both_halves_in_one_pass_give_the_same_velocity(adapter):
    policy, batch = sampled(adapter, guidance=4.5)
    trajectory = batch.trajectory
    arguments = (
        *(policy.module, trajectory.latents[:, 0], 900.0, trajectory.conditioning),
        policy.dynamics.guidance_scale,
    )
    with torch.no_grad():
        apart = adapter.velocity(*arguments, gradient="conditional")
        together = adapter.velocity(*arguments)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_reference_runs_in_the_batches_of_training(adapter, guidance):
    """Other batch sizes round differently."""
    policy, batch = sampled(adapter, guidance=guidance, steps=range(1, 4))
    trajectory, algorithm = batch.trajectory, Grpo(GrpoSettings(beta=0.3), Setup())
    for parameter in policy.parameters():
        nn.init.normal_(parameter)  # which the reference has not
    calls, forward = [], policy.module.forward
    policy.module.forward = lambda **inputs: (
        calls.append(len(inputs["timestep"])),
        forward(**inputs),
    )[1]
    prepared = algorithm.prepare(policy, batch)
    assert prepared.reference.shape == trajectory.latents[:, :-1].shape
    algorithm.loss(policy, batch, prepared, 0)
    assert calls == [8 if guidance > 1 else 4] * 4
    with policy.frozen_denoiser("reference") as reference:
        for j, i in enumerate(trajectory.steps):
            expected = adapter.velocity(
                reference.transformer,
                trajectory.latents[:, j],
                policy.dynamics.schedule.timesteps[i],
                trajectory.conditioning,
                guidance,
            )
            assert torch.equal(prepared.reference[:, j], expected)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_kl_is_that_of_the_step_and_part_of_the_loss(adapter, guidance):
    policy, batch = sampled(adapter, guidance=guidance, steps=range(1, 4))
    algorithm = Grpo(GrpoSettings(beta=0.3), Setup())
    references = algorithm.prepare(policy, batch)

    def losses() -> list[Loss]:
        return [algorithm.loss(policy, batch, references, j) for j in range(3)]

    assert all((loss.columns["kl"] == 0).all() for loss in losses())  # LoRA is still zero
    for parameter in policy.parameters():
        nn.init.normal_(parameter, std=0.1)
    for loss in losses():
        policy_loss, kl = loss.columns["policy_loss"], loss.columns["kl"]
        assert (kl > 1e-6).all()
        torch.testing.assert_close(loss.per_sample, policy_loss + 0.3 * kl)


def test_the_approximate_kl_is_half_the_squared_log_ratio(adapter):
    policy, batch = sampled(adapter, advantages=(1.0,) * 4)
    once = torch.tensor([[0.0, 0.5], [0.0, -0.25], [0.0, 1.0], [0.0, 2.0]])
    moved = replace(batch.trajectory, log_probs=batch.trajectory.log_probs + once)
    columns = WITHOUT_KL.loss(
        policy, replace(batch, trajectory=moved), PreparedBatch(None), 1
    ).columns
    torch.testing.assert_close(columns["ratio"], (-once[:, 1]).exp())
    torch.testing.assert_close(columns["approx_kl"], torch.tensor([0.125, 0.03125, 0.5, 2.0]))
    assert "kl" not in columns  # nothing is measured without a reference


def test_advantages_are_clamped(adapter):
    policy, batch = sampled(adapter, advantages=(50.0, -50.0, 5.5, -4.5))
    loss = WITHOUT_KL.loss(policy, batch, PreparedBatch(None), 0)
    assert loss.per_sample.tolist() == pytest.approx([-5, 5, -5, 4.5])


def test_a_single_sample_with_an_advantage_is_kept(adapter):
    _, batch = sampled(adapter)
    part = samples_with_gradient(batch, [0.0, 0.0, 3.0, 0.0])
    assert part.credit.tolist() == [3.0]
    assert torch.equal(part.trajectory.latents, batch.trajectory.latents[2:3])
