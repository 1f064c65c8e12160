import pytest
import torch

from flow_grpo.policy import Policy
from flow_grpo.rollout import (
    Dynamics,
    eval_generators,
    group_generators,
    initial_noise,
    policy_step,
    sample_generators,
    sample_trajectory,
)


def draw(adapter, index, *, steps=range(1, 3), kind="flow", guidance=4.5):
    prompts = [f"prompt {i}" for i in index]
    generators = sample_generators(0, 0, index)
    return sample_trajectory(
        adapter,
        adapter.transformer,
        Dynamics(adapter.schedule(5, 32, 32), kind, 0.7, guidance),
        initial_noise(generators, adapter.latent_shape(32, 32), "cpu"),
        adapter.encode(prompts, [""] * len(prompts) if guidance > 1 else None),
        steps=steps,
        generators=generators,
    )


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_only_trained_steps_are_kept(adapter, kind):
    final, trajectory = draw(adapter, [0, 1, 2], kind=kind)
    assert trajectory.latents.shape == (3, 3, *final.shape[1:])
    assert trajectory.latents.dtype == torch.float32
    assert trajectory.log_probs.shape == (3, 2)
    _, plain = draw(adapter, [0, 1], steps=range(0))
    assert plain.latents.numel() == plain.log_probs.numel() == 0


def test_a_kept_step_taken_again_has_the_same_log_prob_bit_for_bit(adapter):
    """With gradients on, as in training."""
    Policy(adapter, rank=4, alpha=8)
    dynamics = Dynamics(adapter.schedule(5, 32, 32), "flow", 0.7, 4.5)
    _, trajectory = draw(adapter, [0, 1, 2])
    for j, i in enumerate(trajectory.steps):
        step, _ = policy_step(
            adapter,
            adapter.transformer,
            dynamics,
            i,
            trajectory.latents[:, j],
            trajectory.conditioning,
            stochastic=True,
            next_latents=trajectory.latents[:, j + 1],
        )
        assert step.log_prob.requires_grad
        assert torch.equal(step.log_prob, trajectory.log_probs[:, j])


def test_steps_outside_the_window_add_no_noise(adapter):
    """Up to the window the path is Euler's, and after it the final picture follows from it."""
    final, trajectory = draw(adapter, [0, 1], steps=range(2, 3))
    schedule = adapter.schedule(5, 32, 32)
    sigmas = schedule.sigmas

    def euler(x, steps):
        for i in steps:
            with torch.no_grad():
                v = adapter.velocity(
                    adapter.transformer, x, schedule.timesteps[i], trajectory.conditioning, 4.5
                )
            x = x + v * (sigmas[i + 1] - sigmas[i])
        return x

    start = initial_noise(sample_generators(0, 0, [0, 1]), adapter.latent_shape(32, 32), "cpu")
    torch.testing.assert_close(trajectory.latents[:, 0], euler(start, range(2)))
    torch.testing.assert_close(final, euler(trajectory.latents[:, 1], range(3, 5)))
    without_noise = euler(trajectory.latents[:, 0], [2])
    assert (trajectory.latents[:, 1] - without_noise).abs().mean() > 0.1


def test_a_sample_does_not_depend_on_its_batch(adapter):
    together, kept = draw(adapter, [0, 1, 2, 3])
    alone, kept_alone = draw(adapter, [2])
    torch.testing.assert_close(together[2:3], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(kept.log_probs[2:3], kept_alone.log_probs, atol=1e-5, rtol=0)


def test_every_sample_epoch_and_purpose_has_noise_of_its_own():
    def first(generators):
        return [tuple(noise.tolist()) for noise in initial_noise(generators, (4,), "cpu")]

    drawn = [
        *first(sample_generators(0, 0, [0, 1, 2])),
        *first(sample_generators(0, 1, [0, 1, 2])),
        *first(sample_generators(1, 0, [0, 1, 2])),
        *first(group_generators(0, 0, [0, 1, 2])),
        *first(eval_generators(0, [0, 1, 2])),
    ]
    assert len(set(drawn)) == len(drawn)


def test_samples_of_a_group_can_share_their_first_noise():
    noise = initial_noise(group_generators(0, 3, [7, 7, 9]), (4,), "cpu")
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])


def test_a_slice_of_a_trajectory_is_the_trajectory_of_a_slice(adapter):
    _, trajectory = draw(adapter, [0, 1, 2, 3])
    part = trajectory[1:3]
    assert len(part) == len(part.conditioning) == 2
    assert torch.equal(part.latents, trajectory.latents[1:3])
    assert torch.equal(part.conditioning.negative, trajectory.conditioning.negative[1:3])
