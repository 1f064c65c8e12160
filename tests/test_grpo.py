"""The parts of the loss that are there to save time change nothing else."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flow_grpo.algorithms.grpo import (
    GrpoSettings,
    StepLoss,
    grpo_step_loss,
    reference_velocities,
    with_gradient,
)
from flow_grpo.sampling.rollout import Dynamics, initial_noise, sample_generators, sample_trajectory
from flow_grpo.training.policy import Policy


def sampled(adapter, *, guidance: float = 1.0, steps: range = range(2)):
    policy = Policy(adapter, rank=4, alpha=8)
    dynamics = Dynamics(adapter.schedule(4, 32, 32), "flow", 0.7, guidance)
    generators = sample_generators(0, 0, range(4))
    _, trajectory = sample_trajectory(
        adapter,
        policy.module,
        dynamics,
        initial_noise(generators, adapter.latent_shape(32, 32), "cpu"),
        adapter.encode(["a", "b", "a", "c"], ["", "x", "", ""] if guidance > 1 else None),
        steps=steps,
        generators=generators,
    )
    return policy, dynamics, trajectory


def gradient(policy, dynamics, trajectory, advantages, size) -> torch.Tensor:
    settings = GrpoSettings(beta=0.0)
    loss = grpo_step_loss(policy, dynamics, trajectory, 1, advantages, settings)
    (loss.per_sample.sum() / size).backward()
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    for parameter in policy.parameters():
        parameter.grad = None
    return found


def test_samples_without_advantage_have_no_gradient_and_can_be_left_out(adapter):
    policy, dynamics, trajectory = sampled(adapter)
    advantages = torch.tensor([0.7, 0.0, -1.2, 0.0])
    part, kept = with_gradient(trajectory, advantages)
    assert kept.tolist() == advantages[[0, 2]].tolist()
    assert torch.equal(part.latents, trajectory.latents[[0, 2]])
    assert len(part.conditioning) == len(part) == 2
    whole = gradient(policy, dynamics, trajectory, advantages, 4)
    assert whole.norm() > 0
    found = gradient(policy, dynamics, part, kept, 4)
    assert (found - whole).norm() < 1e-4 * whole.norm()


def test_where_all_or_none_have_a_gradient(adapter):
    _, _, trajectory = sampled(adapter)
    part, kept = with_gradient(trajectory, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert len(part) == len(kept) == 4
    part, kept = with_gradient(trajectory, torch.zeros(4))
    assert len(part) == len(kept) == 1  # every process has its part in every update


def test_both_halves_in_one_pass_give_the_same_velocity(adapter):
    policy, dynamics, trajectory = sampled(adapter, guidance=4.5)
    arguments = (
        *(policy.module, trajectory.latents[:, 0], 900.0, trajectory.conditioning),
        dynamics.guidance_scale,
    )
    with torch.no_grad():
        apart = adapter.velocity(*arguments, gradient="conditional")
        together = adapter.velocity(*arguments)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("guidance", "most", "passes"),
    [(1.0, 32, [12]), (1.0, 11, [4, 4, 4]), (4.5, 32, [24]), (4.5, 1, [8, 8, 8])],
)
def test_the_reference_takes_as_many_steps_at_once_as_may_be(
    adapter, monkeypatch, guidance, most, passes
):
    policy, dynamics, trajectory = sampled(adapter, guidance=guidance, steps=range(1, 4))
    monkeypatch.setattr(
        "flow_grpo.algorithms.grpo.MAX_PASS", most * trajectory.latents[0, 0].numel()
    )
    for parameter in policy.parameters():
        nn.init.normal_(parameter)  # which the reference has not
    calls, forward = [], policy.module.forward
    policy.module.forward = lambda **inputs: (
        calls.append(len(inputs["timestep"])),
        forward(**inputs),
    )[1]
    found = reference_velocities(policy, dynamics, trajectory)
    assert calls == passes
    assert found.shape == trajectory.latents[:, :-1].shape
    with policy.reference() as reference:
        for j, i in enumerate(trajectory.steps):
            expected = adapter.velocity(
                reference,
                trajectory.latents[:, j],
                dynamics.schedule.timesteps[i],
                trajectory.conditioning,
                guidance,
            )
            torch.testing.assert_close(found[:, j], expected, rtol=1e-4, atol=1e-5)
    calls.clear()
    policy.transformer.enable_gradient_checkpointing()  # memory is short
    reference_velocities(policy, dynamics, trajectory)
    assert len(calls) == 3


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_kl_is_that_of_the_step_and_part_of_the_loss(adapter, guidance):
    policy, dynamics, trajectory = sampled(adapter, guidance=guidance, steps=range(1, 4))
    references = reference_velocities(policy, dynamics, trajectory)
    advantages = torch.tensor([0.7, 0.1, -1.2, 0.5])
    settings = GrpoSettings(beta=0.3)

    def losses() -> list[StepLoss]:
        return [
            grpo_step_loss(
                *(policy, dynamics, trajectory, j, advantages, settings),
                reference=references[:, j],
            )
            for j in range(3)
        ]

    assert all((loss.kl < 1e-9).all() for loss in losses())  # LoRA is still zero
    for parameter in policy.parameters():
        nn.init.normal_(parameter, std=0.1)
    for loss in losses():
        assert (loss.kl > 1e-6).all()
        torch.testing.assert_close(loss.per_sample, loss.policy.loss + settings.beta * loss.kl)


@pytest.mark.parametrize(
    ("guidance", "most", "passes"),
    [
        (1.0, 16, [16]),
        (1.0, 15, [8, 8]),
        (1.0, 7, [4, 4, 4, 4]),
        (1.5, 16, [16, 16]),
        (4.5, 15, [8, 8, 8, 8]),
    ],
)
def test_a_pass_of_the_reference_holds_no_more_than_the_most(
    adapter, monkeypatch, guidance, most, passes
):
    """Four samples of four steps; guidance takes two places for each."""
    policy, dynamics, trajectory = sampled(adapter, guidance=guidance, steps=range(4))
    monkeypatch.setattr(
        "flow_grpo.algorithms.grpo.MAX_PASS", most * trajectory.latents[0, 0].numel()
    )
    calls, forward = [], policy.module.forward
    policy.module.forward = lambda **inputs: (
        calls.append(len(inputs["timestep"])),
        forward(**inputs),
    )[1]
    reference_velocities(policy, dynamics, trajectory)
    assert calls == passes
    calls.clear()
    policy.transformer.enable_gradient_checkpointing()  # memory is short
    reference_velocities(policy, dynamics, trajectory)
    assert calls == [8 if guidance > 1 else 4] * 4


def test_the_approximate_kl_is_half_the_squared_log_ratio(adapter):
    policy, dynamics, trajectory = sampled(adapter)
    once = torch.tensor([[0.0, 0.5], [0.0, -0.25], [0.0, 1.0], [0.0, 2.0]])
    moved = replace(trajectory, log_probs=trajectory.log_probs + once)
    settings = GrpoSettings(beta=0.0)
    loss = grpo_step_loss(policy, dynamics, moved, 1, torch.ones(4), settings)
    torch.testing.assert_close(loss.policy.ratio, (-once[:, 1]).exp())
    torch.testing.assert_close(loss.approx_kl, torch.tensor([0.125, 0.03125, 0.5, 2.0]))
    assert loss.kl.tolist() == [0, 0, 0, 0]


def test_one_sample_with_an_advantage_is_left_alone(adapter):
    _, _, trajectory = sampled(adapter)
    part, kept = with_gradient(trajectory, torch.tensor([0.0, 0.0, 3.0, 0.0]))
    assert kept.tolist() == [3.0]
    assert torch.equal(part.latents, trajectory.latents[2:3])
