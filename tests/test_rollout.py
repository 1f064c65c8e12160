import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from methods import pixels
from torch import nn

from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, sample_generators
from flow_grpo.draw.models import Schedule
from flow_grpo.draw.models.qwen_image import QwenImageAdapter
from flow_grpo.draw.models.qwen_image_edit import QwenImageEditAdapter
from flow_grpo.draw.models.sd3 import SD3Adapter
from flow_grpo.draw.policy import Policy
from flow_grpo.draw.rollout import (
    Denoiser,
    Dynamics,
    Trajectory,
    draw_noise,
    eval_generators,
    group_distance,
    group_generators,
    initial_noise,
    steps_taken,
    take_step,
)
from flow_grpo.sde import dpm2_step, sde_step


def draw(adapter, index, *, steps=range(1, 3), kind="flow", guidance=4.5):
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
def test_only_trained_steps_are_kept(adapter, kind):
    trajectory = draw(adapter, [0, 1, 2], kind=kind)
    assert trajectory.latents.shape == (3, 3, *trajectory.final.shape[1:])
    assert trajectory.latents.dtype == torch.float32
    assert trajectory.log_probs.shape == (3, 2)
    plain = draw(adapter, [0, 1], steps=range(0))
    assert plain.latents.numel() == plain.log_probs.numel() == 0


def test_a_kept_step_taken_again_has_the_same_log_prob_bit_for_bit(adapter):
    """With gradients on, as in training."""
    dynamics = Dynamics(adapter.schedule(5, 32, 32), "flow", 0.7, 4.5)
    policy = Policy(adapter, dynamics, rank=4, alpha=8)
    trajectory = draw(adapter, [0, 1, 2])
    for j, i in enumerate(trajectory.steps):
        state, landed = trajectory.latents[:, j], trajectory.latents[:, j + 1]
        step, _ = policy.step(i, state, landed, trajectory.conditioning)
        assert step.log_prob.requires_grad
        assert torch.equal(step.log_prob, trajectory.log_probs[:, j])


def test_steps_outside_the_window_add_no_noise(adapter):
    """Up to the window the path is Euler's, and after it the final picture follows from it."""
    trajectory = draw(adapter, [0, 1], steps=range(2, 3))
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
    together, alone = draw(adapter, [0, 1, 2, 3]), draw(adapter, [2])
    torch.testing.assert_close(together.final[2:3], alone.final, atol=1e-5, rtol=0)
    torch.testing.assert_close(together.log_probs[2:3], alone.log_probs, atol=1e-5, rtol=0)


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
    trajectory = draw(adapter, [0, 1, 2, 3])
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
    plain = draw(adapter, [0, 1], steps=range(0))
    assert plain[:1].means is Trajectory.join([plain, plain]).means is None


class Scale(nn.Module):
    """A model of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, latents):
        return self.weight * latents


class KnownField:
    """An adapter whose velocity is a formula; the conditioning is a number for each sample."""

    compiled = False

    def __init__(self) -> None:
        self.with_gradient, self.through = [], set()  # of each call
        self.prepared_at = []  # after so many calls

    def prepared(self, model, conditioning):
        self.prepared_at.append(len(self.with_gradient))
        return conditioning

    def finish(self, latents, conditioning):
        return latents

    def velocity(self, model, latents, timestep, conditioning, guidance_scale, *, gradient):
        self.with_gradient.append(torch.is_grad_enabled())
        self.through.add(gradient)
        return guidance_scale * model(latents) + timestep / 1000 * conditioning


START = torch.tensor([[1.0, 0.5], [-2.0, 0.25]])
NUMBERS = torch.tensor([[0.1], [0.7]], dtype=torch.float64)
SIGMAS, TIMESTEPS = (1.0, 0.8, 0.5, 0.0), (1000.0, 800.0, 500.0)
KNOWN = Dynamics(Schedule(SIGMAS, TIMESTEPS), "flow", 0.4, 2.0, "conditional")


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_a_path_through_a_known_field_is_the_one_its_formula_gives():
    """In the precision of the model, with noise from one generator per sample."""
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


def test_steps_without_noise_are_taken_within_their_context():
    events, field = [], KnownField()

    @contextmanager
    def without_noise():
        events.append(("in", len(field.with_gradient)))
        assert len(field.prepared_at) == len(field.with_gradient)  # other weights, not before
        yield
        events.append(("out", len(field.with_gradient)))

    Denoiser(field, Scale(), KNOWN).sample(
        *(START, NUMBERS),
        steps=range(1, 2),
        generators=seeded(1, 2),
        without_noise=without_noise,
    )
    assert events == [("in", 0), ("out", 1), ("in", 2), ("out", 3)]
    assert field.prepared_at == [0, 1, 2]


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_code_samples_what_will_be_trained_as_it_will_be_trained(compiled):
    """With gradients on, though none is kept: without them it rounds differently."""
    field, noise = KnownField(), torch.zeros(2, 2)
    field.compiled = compiled
    denoiser, arguments = Denoiser(field, Scale(), KNOWN), (0, START, NUMBERS)
    with torch.no_grad():
        _, velocity = denoiser.step(*arguments, stochastic=True, noise=iter([noise]))
        denoiser.step(*arguments, stochastic=True, next_latents=START)
        denoiser.step(*arguments, stochastic=False)
    assert field.with_gradient == [compiled, False, False]
    assert field.through == {"conditional"}
    assert not velocity.requires_grad
    step, velocity = denoiser.step(*arguments, stochastic=True, next_latents=START)
    assert velocity.requires_grad
    assert step.log_prob.requires_grad


def test_steps_of_each_sample_are_those_steps_taken_one_by_one():
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


def test_another_guidance_changes_nothing_else():
    denoiser = Denoiser(KnownField(), Scale(), KNOWN)
    assert denoiser.guided(None) is denoiser
    assert denoiser.guided(0.0) == replace(denoiser, dynamics=replace(KNOWN, guidance_scale=0.0))


def test_noise_is_drawn_for_each_sample_in_its_precision():
    drawn = draw_noise(seeded(1, 2), 3, START.double())
    for noise, generator in zip(drawn, seeded(1, 2), strict=True):
        assert torch.equal(noise, torch.randn(3, 2, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize(
    ("guidance", "most", "negative"),
    [(1.0, 0.0, None), (1.5, 0.0, ["blurry", " "]), (1.0, 1.5, ["blurry", " "])],
)
def test_negative_prompts_are_read_only_where_there_is_guidance(guidance, most, negative):
    """Prompts without one have that of the model: a space for Qwen-Image."""
    assert QwenImageAdapter.negative_prompt == QwenImageEditAdapter.negative_prompt == " "
    assert SD3Adapter.negative_prompt == ""
    ahead = []
    adapter = SimpleNamespace(
        encode=lambda *given: given,
        encode_ahead=lambda *given: ahead.extend(given),
        is_guided=lambda scale: scale > 1,
        negative_prompt=QwenImageAdapter.negative_prompt,
    )
    prompts = [Prompt("a", "blurry", images=(b"png",)), Prompt("b")]
    dynamics = replace(KNOWN, guidance_scale=guidance, most_guidance=most)
    denoiser = Denoiser(adapter, None, dynamics)
    assert denoiser.encode(prompts) == (["a", "b"], negative, [(b"png",), ()])
    assert denoiser.passes == (2 if guidance > 1 else 1)
    denoiser.encode_ahead(prompts)
    assert ahead == [["a", "b"], negative, [(b"png",), ()]]


def test_without_noisy_steps_nothing_is_drawn_and_nothing_kept():
    trajectory = Denoiser(KnownField(), Scale(), KNOWN).sample(START, NUMBERS)
    x = START.double()
    for i in range(3):
        x = x + (0.6 * x + TIMESTEPS[i] / 1000 * NUMBERS) * (SIGMAS[i + 1] - SIGMAS[i])
    torch.testing.assert_close(trajectory.final, x, rtol=1e-12, atol=0)
    assert trajectory.latents.shape == trajectory.log_probs.shape == (2, 0)
    assert trajectory.means is None


def test_steps_of_second_order_begin_anew_after_one_with_noise():
    """Sigmas 1 .9 | .75 with noise | .5 .25 0, the last three in a row: the second of them knows
    the first."""
    sigmas, timesteps = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0), (1000.0, 900.0, 750.0, 500.0, 250.0)
    dynamics = replace(KNOWN, schedule=Schedule(sigmas, timesteps), solver="dpm2")
    trajectory = Denoiser(KnownField(), Scale(), dynamics).sample(
        START, NUMBERS, steps=range(1, 2), generators=seeded(1, 2)
    )
    assert trajectory.means is None  # nobody asked for them

    def walk(x, steps):
        before = None
        for i in steps:
            v = 0.6 * x + timesteps[i] / 1000 * NUMBERS
            x, before = dpm2_step(v, x, sigmas[i], sigmas[i + 1], before)
        return x

    start, landed = trajectory.latents.unbind(1)
    torch.testing.assert_close(start, walk(START.double(), [0]), rtol=1e-12, atol=0)
    torch.testing.assert_close(trajectory.final, walk(landed, [2, 3, 4]), rtol=1e-12, atol=0)


def test_samples_that_are_still_alike_take_their_steps_once():
    """Sigmas 1 .9 .75 | .5 with noise | .25 0: two steps before the noise, of two groups of two;
    the second step of dpm2 knows the first."""
    sigmas, timesteps = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0), (1000.0, 900.0, 750.0, 500.0, 250.0)
    dynamics = replace(KNOWN, schedule=Schedule(sigmas, timesteps), solver="dpm2")
    field, start, numbers = KnownField(), START[[0, 1, 0, 1]], NUMBERS[[0, 1, 0, 1]]
    sizes, velocity = [], field.velocity
    field.velocity = lambda transformer, x, *rest, **more: (
        sizes.append(len(x)) or velocity(transformer, x, *rest, **more)
    )

    def sample(**alike):
        sizes.clear()
        generators = seeded(1, 2, 3, 4)
        return Denoiser(field, Scale(), dynamics).sample(
            start, numbers, steps=range(2, 3), generators=generators, **alike
        )

    apart, groups = sample(), np.array([7, 3, 7, 3])
    assert sizes == [4] * 5
    shared = sample(alike=groups)
    assert sizes == [2, 2, 4, 4, 4]
    assert steps_taken(5, range(2, 3), groups) == sum(sizes)
    assert steps_taken(5, range(0), groups) == 10  # the plain ode
    for a, b in ((shared.latents, apart.latents), (shared.final, apart.final)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert len(shared.final.unique(dim=0)) == 4
    sample(alike=np.arange(4))
    assert sizes == [4] * 5
    assert steps_taken(5, range(2, 3), np.arange(4)) == 20


def test_another_seed_epoch_or_purpose_is_another_noise():
    keys = [(0, 0), (1, 0), (0, 1), (0, int(Stream.EVAL))]
    generators = [
        *(g for seed, epoch in keys for g in group_generators(seed, epoch, [0, 1])),
        *(g for seed, epoch in keys for g in sample_generators(seed, epoch, [0, 1])),
        *(g for seed in (0, 1) for g in eval_generators(seed, [0, 1])),
    ]
    assert len({g.initial_seed() for g in generators}) == len(generators)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pictures_of_a_group_are_as_far_apart_as_their_pixels(dtype):
    """0 and .6 are .6 apart; 0, 0 and .6 are 0, .6 and .6 apart: 2/3 of the squares are .36."""
    grey = torch.tensor([0.0, 0.6, 0.0, 0.0, 0.6, 0.1], dtype=dtype)
    images = grey[:, None, None, None].expand(6, 3, 4, 4)
    total, count = group_distance(images, np.array([5, 5, 2, 2, 2, 9])).tolist()
    assert count == 2  # one picture alone tells nothing
    assert total == pytest.approx(0.6 + 0.6 * math.sqrt(2 / 3), rel=1e-3)
    assert group_distance(images[:2], np.array([0, 1])).tolist() == [0.0, 0.0]
    # clips: over the pixels of all frames, half of which are equal here
    still = torch.zeros(6, 1, 3, 4, 4, dtype=dtype)
    clips = torch.cat([images[:, None], still], dim=1)
    total, count = group_distance(clips, np.array([5, 5, 2, 2, 2, 9])).tolist()
    assert count == 2
    assert total == pytest.approx((0.6 + 0.6 * math.sqrt(2 / 3)) / math.sqrt(2), rel=1e-3)


def test_groups_are_counted_in_float32():
    """float16 has no 2049."""
    images, groups = torch.zeros(2 * 2049, 1, 1, 1, dtype=torch.float16), np.repeat(range(2049), 2)
    assert group_distance(images, groups).tolist() == [0, 2049]
