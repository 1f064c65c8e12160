"""Smoke tests of custom algorithms and model families, so that mistakes surface early.

An algorithm is tried on the small model in assets/ before anything of the run is loaded, a model
family as soon as its model is loaded.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from flow_grpo.config.custom import as_user_error
from flow_grpo.config.paths import ROOT
from flow_grpo.data.prompts import Prompt
from flow_grpo.diffusion.algorithms import Algorithm, Batch, Loss
from flow_grpo.diffusion.algorithms.base import drop_zero_gradient
from flow_grpo.diffusion.fields import AnchorConfig, DiffusionSampleConfig
from flow_grpo.diffusion.models import ModelAdapter, Size, load_adapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Denoiser, Dynamics, Trajectory, initial_noise, latent_dtype
from flow_grpo.errors import UserError
from flow_grpo.rewards import TOTAL
from flow_grpo.training.metrics import ScoredSamples
from flow_grpo.training.snapshot import Snapshot

TINY_MODEL = ROOT / "assets/tiny-sd3"
IMAGE_SIDE = 16  # pixels
NUM_GROUPS = 2


def smoke_test_algorithm(algorithm: Algorithm, field: str, weights: Mapping[str, float]) -> None:
    """Sample, score and train two groups as an epoch of the run would.

    Args:
        algorithm: The algorithm; a new instance of its class is tested.
        field: Config field that names the algorithm, for error messages.
        weights: Weights of the run's rewards, which are replaced by random scores.
    """
    group = algorithm.setup.group_size
    setup = replace(algorithm.setup, update_samples=NUM_GROUPS * group, anchors=AnchorConfig())
    with torch.random.fork_rng(devices=[]), as_user_error(field, type(algorithm)):
        fresh = type(algorithm)(algorithm.settings, setup)
        policy = build_tiny_policy(fresh)
        trajectory = sample_trajectory(policy, fresh)
        groups = np.arange(NUM_GROUPS * group) // group
        rng, weights = np.random.default_rng(0), dict(weights)
        rewards = {name: rng.random(len(groups)) for name in weights}
        rewards[TOTAL] = sum(weight * rewards[name] for name, weight in weights.items())
        baseline = np.zeros(len(groups)) if setup.estimator == "remax" else None
        scored = ScoredSamples(rewards, groups, weights, baseline)
        credit = fresh.credit(scored)
        if not isinstance(credit, np.ndarray) or credit.shape != groups.shape:
            raise UserError(
                "is invalid: `credit` must return a NumPy array of shape (samples,)", field=field
            )
        credit = torch.from_numpy(credit).to(trajectory.final.dtype)
        tasks = np.array([setup.tasks[0]] * len(groups))
        batch = Batch(trajectory, credit, np.arange(len(groups)), groups, (0, 0, 0), tasks)
        batches = fresh.batches([batch], len(batch))
        batches = drop_zero_gradient(fresh, batches, batch=False, sample=False)
        for part, prepared in fresh.iter_prepared(policy, batches):
            for j in sorted({0, fresh.losses_per_sample - 1}):
                loss = fresh.loss(policy, part, prepared, j)
                check_loss(loss, len(part), field)
                loss.per_sample.sum().backward()
        fresh.after_epoch(policy, 1)
        fresh.load_state_dict(fresh.state_dict())


def smoke_test_family(
    adapter: ModelAdapter, prompt: Prompt, size: Size, sample: DiffusionSampleConfig, field: str
) -> None:
    """Take the first step of an image with a custom family; `field` names it in errors."""
    with as_user_error(field, type(adapter)), torch.no_grad():
        schedule = adapter.schedule(sample.num_steps, *size)
        dynamics = Dynamics(schedule, guidance_scale=sample.guidance_scale)
        denoiser = Denoiser(adapter, adapter.transformer, dynamics)
        generators = [torch.Generator().manual_seed(0)]
        noise = initial_noise(generators, adapter.latent_shape(*size), adapter.device)
        noise = noise.to(latent_dtype(adapter.transformer))
        denoiser.step(0, noise, denoiser.encode([prompt]), stochastic=False)


def build_tiny_policy(algorithm: Algorithm) -> Policy:
    """Load the bundled tiny model with the snapshots and LoRAs that the algorithm may use."""
    adapter = load_adapter(str(TINY_MODEL), max_sequence_length=4)
    setup = algorithm.setup
    dynamics = Dynamics(adapter.schedule(setup.num_steps, IMAGE_SIDE, IMAGE_SIDE), setup.sde_type)
    policy = Policy(adapter, dynamics, rank=2, alpha=2)
    policy.reference = Snapshot(policy.trained_parameters(), "reference")
    policy.old = Snapshot(policy.trained_parameters(), "old")
    policy.loras = {
        path: Snapshot(policy.trained_parameters(), path) for path in algorithm.loras.values()
    }
    return policy


def sample_trajectory(policy: Policy, algorithm: Algorithm) -> Trajectory:
    """Sample `NUM_GROUPS` groups with the tiny policy, as the algorithm's rollout would."""
    count = NUM_GROUPS * algorithm.setup.group_size
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    trajectory = policy.denoiser.sample(
        initial_noise(generators, policy.adapter.latent_shape(IMAGE_SIDE, IMAGE_SIDE), "cpu"),
        policy.adapter.encode(["a"] * count, [""] * count),
        steps=algorithm.noisy_steps(np.random.default_rng(0), 0),
        generators=generators,
        keep_means=algorithm.records_step_means,
        keep_states=algorithm.needs_reward_gradient,
    )
    reward_gradient = torch.ones_like(trajectory.final) if algorithm.needs_reward_gradient else None
    return replace(trajectory, reward_gradient=reward_gradient)


def check_loss(loss: Loss, count: int, field: str) -> None:
    """Raise a UserError unless loss and columns are (count,) and the loss has a gradient."""
    for name, values in {"the loss": loss.per_sample, **loss.columns}.items():
        if values.shape != (count,):
            raise UserError(
                f"returns {name} of shape {tuple(values.shape)}; it must be ({count},), one value "
                "per sample",
                field=field,
            )
    if not loss.per_sample.requires_grad:
        raise UserError(
            "returns a loss that has no gradient",
            field=field,
            hint="compute it from the velocity or the step",
        )
