import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithm_fixtures import pixels
from torch import nn

from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, sample_generators
from flow_grpo.diffusion.models import Schedule
from flow_grpo.diffusion.models.qwen_image import QwenImageAdapter
from flow_grpo.diffusion.models.qwen_image_edit import QwenImageEditAdapter
from flow_grpo.diffusion.models.sd3 import SD3Adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import (
    Denoiser,
    Dynamics,
    Trajectory,
    count_sample_steps,
    draw_noise,
    eval_generators,
    group_generators,
    initial_noise,
    take_step,
    within_group_distance,
)
from flow_grpo.sde import dpm2_step, sde_step


def sample_batch(adapter, index, *, steps=range(1, 3), kind="flow", guidance=4.5):
    prompts = [f"prompt {i}" for i in index]
    generators = sample_generators(0, 0, index)
    dynamics = Dynamics(adapter.schedule(5, 32, 32), kind, 0.7, guidance)
    return Denoiser(adapter, adapter.transformer, dynamics).sample(
        initial_noise(generators, adapter.latent_shape(32, 32), "cpu"),
        adapter.encode(prompts, [""] * len(prompts) if guidance > 1 else None),
        steps=steps,
        generators=generators,
        keep_means=True,
    )


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_only_trained_steps_are_recorded(adapter, kind):
    trajectory = sample_batch(adapter, [0, 1, 2], kind=kind)
    assert trajectory.latents.shape == (3, 3, *trajectory.final.shape[1:])
    assert trajectory.latents.dtype == torch.float32
    assert trajectory.log_probs.shape == (3, 2)
    plain = sample_batch(adapter, [0, 1], steps=range(0))
    assert plain.latents.numel() == plain.log_probs.numel() == 0


def test_replaying_a_recorded_step_gives_the_same_log_prob_bit_for_bit(adapter):
    """With gradients on, as in training."""
    dynamics = Dynamics(adapter.schedule(5, 32, 32), "flow", 0.7, 4.5)
    policy = Policy(adapter, dynamics, rank=4, alpha=8)
    trajectory = sample_batch(adapter, [0, 1, 2])
    for j, i in enumerate(trajectory.steps):
        state, landed = trajectory.latents[:, j], trajectory.latents[:, j + 1]
        step, _ = policy.step(i, state, landed, trajectory.conditioning)
        assert step.log_prob.requires_grad
        assert torch.equal(step.log_prob, trajectory.log_probs[:, j])


def test_steps_outside_the_window_add_no_noise(adapter):
    """Before and after the window the path is that of the Euler method."""
    trajectory = sample_batch(adapter, [0, 1], steps=range(2, 3))
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
    torch.testing.assert_close(trajectory.final, euler(trajectory.latents[:, 1], range(3, 5)))
    without_noise = euler(trajectory.latents[:, 0], [2])
    assert (trajectory.latents[:, 1] - without_noise).abs().mean() > 0.1


def test_a_sample_does_not_depend_on_its_batch(adapter):
    together, alone = sample_batch(adapter, [0, 1, 2, 3]), sample_batch(adapter, [2])
    torch.testing.assert_close(together.final[2:3], alone.final, atol=1e-5, rtol=0)
    torch.testing.assert_close(together.log_probs[2:3], alone.log_probs, atol=1e-5, rtol=0)


def test_noise_differs_between_samples_epochs_seeds_and_streams():
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


def test_samples_of_a_group_can_share_the_initial_noise():
    noise = initial_noise(group_generators(0, 3, [7, 7, 9]), (4,), "cpu")
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])


def test_a_slice_of_a_trajectory_is_the_trajectory_of_a_slice(adapter):
    trajectory = sample_batch(adapter, [0, 1, 2, 3])
    part = trajectory[1:3]
    assert len(part) == len(part.conditioning) == 2
    assert torch.equal(part.final, trajectory.final[1:3])
    assert torch.equal(part.latents, trajectory.latents[1:3])
    assert torch.equal(part.log_probs, trajectory.log_probs[1:3])
    assert torch.equal(part.means, trajectory.means[1:3])
    assert torch.equal(part.conditioning.negative, trajectory.conditioning.negative[1:3])
    whole = Trajectory.join([trajectory[:1], part, trajectory[3:]])
    assert whole.steps == trajectory.steps
    for name in ("final", "latents", "log_probs", "means"):
        assert torch.equal(getattr(whole, name), getattr(trajectory, name))
    assert len(whole.conditioning) == 4
    plain = sample_batch(adapter, [0, 1], steps=range(0))
    assert plain[:1].means is Trajectory.join([plain, plain]).means is None


class Scale(nn.Module):
    """A model with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, latents):
        return self.weight * latents


class KnownField:
    """An adapter with an analytic velocity; the conditioning is one number per sample."""

    compiled = False

    def __init__(self) -> None:
        self.with_gradient, self.gradients = [], set()  # of each call
        self.precomputed_at = []  # number of velocity calls before each

    def precompute(self, model, conditioning):
        self.precomputed_at.append(len(self.with_gradient))
        return conditioning

    def start_latents(self, noise, conditioning, sigma):
        return noise

    def finalize_latents(self, latents, conditioning):
        return latents

    def velocity(self, model, latents, timestep, conditioning, guidance_scale, *, gradient):
        self.with_gradient.append(torch.is_grad_enabled())
        self.gradients.add(gradient)
        return guidance_scale * model(latents) + timestep / 1000 * conditioning


START = torch.tensor([[1.0, 0.5], [-2.0, 0.25]])
NUMBERS = torch.tensor([[0.1], [0.7]], dtype=torch.float64)
SIGMAS, TIMESTEPS = (1.0, 0.8, 0.5, 0.0), (1000.0, 800.0, 500.0)
KNOWN = Dynamics(Schedule(SIGMAS, TIMESTEPS), "flow", 0.4, 2.0, "conditional")


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_sampling_an_analytic_field_matches_the_closed_form():
    """In the dtype of the model, with noise from one generator per sample."""
    trajectory = Denoiser(KnownField(), Scale(), KNOWN).sample(
        START, NUMBERS, steps=range(2), generators=seeded(1, 2), keep_means=True
    )
    drawn = [torch.randn(2, 2, generator=g, dtype=torch.float64) for g in seeded(1, 2)]
    x = START.double()
    for i in range(3):
        v = 2 * 0.3 * x + TIMESTEPS[i] / 1000 * NUMBERS
        if i == 2:
            torch.testing.assert_close(trajectory.latents[:, 2], x, rtol=1e-12, atol=0)
            torch.testing.assert_close(trajectory.final, x - 0.5 * v, rtol=1e-12, atol=0)
            break
        noise = torch.stack([of_sample[i] for of_sample in drawn])
        step = sde_step(
            *(v, x, SIGMAS[i], SIGMAS[i + 1]), noise_level=0.4, sigma_max=0.8, noise=noise
        )
        torch.testing.assert_close(trajectory.latents[:, i], x, rtol=1e-12, atol=0)
        torch.testing.assert_close(trajectory.log_probs[:, i], step.log_prob, rtol=1e-9, atol=0)
        torch.testing.assert_close(trajectory.means[:, i], step.mean, rtol=1e-12, atol=0)
        x = step.next_sample
    assert trajectory.steps == range(2)
    assert torch.equal(trajectory.conditioning, NUMBERS)
    assert not trajectory.final.requires_grad


def test_inputs_are_precomputed_once_per_run_of_steps():
    field = KnownField()
    Denoiser(field, Scale(), KNOWN).sample(START, NUMBERS, steps=range(2), generators=seeded(1, 2))
    assert len(field.with_gradient) == 3
    assert field.precomputed_at == [0, 2]


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_code_samples_trained_steps_with_training_kernels(compiled):
    """With gradients enabled, though none is stored: without them it rounds differently."""
    field, noise = KnownField(), torch.zeros(2, 2)
    field.compiled = compiled
    denoiser, arguments = Denoiser(field, Scale(), KNOWN), (0, START, NUMBERS)
    with torch.no_grad():
        _, velocity = denoiser.step(*arguments, stochastic=True, noise=iter([noise]))
        denoiser.step(*arguments, stochastic=True, next_latents=START)
        denoiser.step(*arguments, stochastic=False)
    assert field.with_gradient == [compiled, False, False]
    assert field.gradients == {"conditional"}
    assert not velocity.requires_grad
    step, velocity = denoiser.step(*arguments, stochastic=True, next_latents=START)
    assert velocity.requires_grad
    assert step.log_prob.requires_grad


def test_per_sample_step_indices_match_single_steps():
    dynamics = replace(KNOWN, noise_level=0.5)
    x, v, landed = (pixels([a, 1.0], [0.5, a], [a, -a]) for a in (0.2, 0.7, 0.3))
    steps = np.array([2, 0, 1])
    together = take_step(dynamics, steps, x, v, stochastic=True, next_latents=landed)
    for row, i in enumerate(steps.tolist()):
        part = slice(row, row + 1)
        alone = take_step(dynamics, i, x[part], v[part], stochastic=True, next_latents=landed[part])
        for field in ("mean", "std", "rate", "log_prob"):
            torch.testing.assert_close(getattr(together, field)[part], getattr(alone, field))
    assert together.rate.flatten().tolist() == pytest.approx([0.5, 1.25**0.5, 1.0])


def test_with_guidance_changes_only_the_guidance_scale():
    denoiser = Denoiser(KnownField(), Scale(), KNOWN)
    assert denoiser.with_guidance(None) is denoiser
    assert denoiser.with_guidance(0.0) == replace(
        denoiser, dynamics=replace(KNOWN, guidance_scale=0.0)
    )


def test_noise_is_drawn_per_sample_in_the_dtype_of_the_latents():
    drawn = draw_noise(seeded(1, 2), 3, START.double())
    for noise, generator in zip(drawn, seeded(1, 2), strict=True):
        assert torch.equal(noise, torch.randn(3, 2, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize(
    ("guidance", "most", "negative"),
    [(1.0, 0.0, None), (1.5, 0.0, ["blurry", " "]), (1.0, 1.5, ["blurry", " "])],
)
def test_negative_prompts_are_encoded_only_with_guidance(guidance, most, negative):
    """Prompts without one use the model's default: a space for Qwen-Image."""
    assert QwenImageAdapter.negative_prompt == QwenImageEditAdapter.negative_prompt == " "
    assert SD3Adapter.negative_prompt == ""
    ahead = []
    adapter = SimpleNamespace(
        encode=lambda *given: given,
        precompute_embeddings=lambda *given: ahead.extend(given),
        is_guided=lambda scale: scale > 1,
        negative_prompt=QwenImageAdapter.negative_prompt,
    )
    prompts = [Prompt("a", "blurry", images=(b"png",)), Prompt("b")]
    dynamics = replace(KNOWN, guidance_scale=guidance, max_guidance=most)
    denoiser = Denoiser(adapter, None, dynamics)
    assert denoiser.encode(prompts) == (["a", "b"], negative, [(b"png",), ()])
    assert denoiser.passes_per_velocity == (2 if guidance > 1 else 1)
    denoiser.precompute_embeddings(prompts)
    assert ahead == [["a", "b"], negative, [(b"png",), ()]]


def test_without_stochastic_steps_nothing_is_recorded():
    trajectory = Denoiser(KnownField(), Scale(), KNOWN).sample(START, NUMBERS)
    x = START.double()
    for i in range(3):
        x = x + (0.6 * x + TIMESTEPS[i] / 1000 * NUMBERS) * (SIGMAS[i + 1] - SIGMAS[i])
    torch.testing.assert_close(trajectory.final, x, rtol=1e-12, atol=0)
    assert trajectory.latents.shape == trajectory.log_probs.shape == (2, 0)
    assert trajectory.means is None


def test_second_order_solver_restarts_after_a_stochastic_step():
    """Sigmas 1 0.9 | 0.75 with noise | 0.5 0.25 0: the last three steps share a history."""
    sigmas, timesteps = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0), (1000.0, 900.0, 750.0, 500.0, 250.0)
    dynamics = replace(KNOWN, schedule=Schedule(sigmas, timesteps), solver="dpm2")
    trajectory = Denoiser(KnownField(), Scale(), dynamics).sample(
        START, NUMBERS, steps=range(1, 2), generators=seeded(1, 2)
    )
    assert trajectory.means is None  # not requested

    def walk(x, steps):
        before = None
        for i in steps:
            v = 0.6 * x + timesteps[i] / 1000 * NUMBERS
            x, before = dpm2_step(v, x, sigmas[i], sigmas[i + 1], before)
        return x

    start, landed = trajectory.latents.unbind(1)
    torch.testing.assert_close(start, walk(START.double(), [0]), rtol=1e-12, atol=0)
    torch.testing.assert_close(trajectory.final, walk(landed, [2, 3, 4]), rtol=1e-12, atol=0)


def test_identical_samples_share_the_steps_before_the_first_noise():
    """Sigmas 1 0.9 0.75 | 0.5 with noise | 0.25 0: two groups of two share two dpm2 steps."""
    sigmas, timesteps = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0), (1000.0, 900.0, 750.0, 500.0, 250.0)
    dynamics = replace(KNOWN, schedule=Schedule(sigmas, timesteps), solver="dpm2")
    field, start, numbers = KnownField(), START[[0, 1, 0, 1]], NUMBERS[[0, 1, 0, 1]]
    sizes, velocity = [], field.velocity
    field.velocity = lambda transformer, x, *rest, **more: (
        sizes.append(len(x)) or velocity(transformer, x, *rest, **more)
    )

    def sample(**options):
        sizes.clear()
        generators = seeded(1, 2, 3, 4)
        return Denoiser(field, Scale(), dynamics).sample(
            start, numbers, steps=range(2, 3), generators=generators, **options
        )

    separate, groups = sample(), np.array([7, 3, 7, 3])
    assert sizes == [4] * 5
    shared = sample(noise_group_ids=groups)
    assert sizes == [2, 2, 4, 4, 4]
    assert count_sample_steps(5, range(2, 3), groups) == sum(sizes)
    assert count_sample_steps(5, range(0), groups) == 10  # plain ODE
    for a, b in ((shared.latents, separate.latents), (shared.final, separate.final)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert len(shared.final.unique(dim=0)) == 4
    sample(noise_group_ids=np.arange(4))
    assert sizes == [4] * 5
    assert count_sample_steps(5, range(2, 3), np.arange(4)) == 20


def test_generator_seeds_are_unique_per_seed_epoch_and_stream():
    keys = [(0, 0), (1, 0), (0, 1), (0, int(Stream.EVAL))]
    generators = [
        *(g for seed, epoch in keys for g in group_generators(seed, epoch, [0, 1])),
        *(g for seed, epoch in keys for g in sample_generators(seed, epoch, [0, 1])),
        *(g for seed in (0, 1) for g in eval_generators(seed, [0, 1])),
    ]
    assert len({g.initial_seed() for g in generators}) == len(generators)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_within_group_distance_is_the_rms_pixel_distance(dtype):
    """0 and 0.6 differ by 0.6; of 0, 0 and 0.6, two of three squared distances are 0.36."""
    grey = torch.tensor([0.0, 0.6, 0.0, 0.0, 0.6, 0.1], dtype=dtype)
    images = grey[:, None, None, None].expand(6, 3, 4, 4)
    total, count = within_group_distance(images, np.array([5, 5, 2, 2, 2, 9])).tolist()
    assert count == 2  # a group of one has no distance
    assert total == pytest.approx(0.6 + 0.6 * math.sqrt(2 / 3), rel=1e-3)
    assert within_group_distance(images[:2], np.array([0, 1])).tolist() == [0.0, 0.0]
    # videos: over the pixels of all frames, half of which are equal here
    still = torch.zeros(6, 1, 3, 4, 4, dtype=dtype)
    videos = torch.cat([images[:, None], still], dim=1)
    total, count = within_group_distance(videos, np.array([5, 5, 2, 2, 2, 9])).tolist()
    assert count == 2
    assert total == pytest.approx((0.6 + 0.6 * math.sqrt(2 / 3)) / math.sqrt(2), rel=1e-3)


def test_groups_are_counted_in_float32():
    """2049 is not representable in float16."""
    images, groups = torch.zeros(2 * 2049, 1, 1, 1, dtype=torch.float16), np.repeat(range(2049), 2)
    assert within_group_distance(images, groups).tolist() == [0, 2049]
