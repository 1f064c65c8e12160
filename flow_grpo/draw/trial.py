"""What is the user's own, tried: a method on the small model that ships, before anything of the run
is loaded, and a family as soon as it is. A mistake is told then, not after an evaluation."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from flow_grpo.config.custom import told_in_one_line
from flow_grpo.config.places import ROOT
from flow_grpo.data.prompts import Prompt
from flow_grpo.draw.algorithms import Algorithm, Batch, Loss
from flow_grpo.draw.algorithms.base import with_gradient
from flow_grpo.draw.fields import DrawAnchors, DrawSample
from flow_grpo.draw.models import ModelAdapter, Size, load_adapter
from flow_grpo.draw.policy import Policy
from flow_grpo.draw.rollout import Denoiser, Dynamics, Trajectory, initial_noise, latent_dtype
from flow_grpo.errors import UserError
from flow_grpo.rewards import TOTAL
from flow_grpo.run.metrics import Scored
from flow_grpo.run.snapshot import Snapshot

MODEL = ROOT / "assets/tiny-sd3"
SIDE = 16  # pixels
GROUPS = 2


def try_method(algorithm: Algorithm, field: str, weights: Mapping[str, float]) -> None:
    """Sample, score and train two groups as an epoch of the run would; `field` names the method,
    `weights` the rewards."""
    group = algorithm.setup.group_size
    setup = replace(algorithm.setup, update_samples=GROUPS * group, anchors=DrawAnchors())
    with torch.random.fork_rng(devices=[]), told_in_one_line(field, type(algorithm)):
        own = type(algorithm)(algorithm.settings, setup)
        policy = build_policy(own)
        trajectory = sample(policy, own)
        groups = np.arange(GROUPS * group) // group
        rng, weights = np.random.default_rng(0), dict(weights)
        rewards = {name: rng.random(len(groups)) for name in weights}
        rewards[TOTAL] = sum(weight * rewards[name] for name, weight in weights.items())
        baseline = np.zeros(len(groups)) if setup.estimator == "remax" else None
        scored = Scored(rewards, groups, weights, baseline)
        credit = own.credit(scored)
        if not isinstance(credit, np.ndarray) or credit.shape != groups.shape:
            raise UserError(f"{field}: credit must give a NumPy array of one number per sample")
        credit = torch.from_numpy(credit).to(trajectory.final.dtype)
        tasks = np.array([setup.tasks[0]] * len(groups))
        batch = Batch(trajectory, credit, np.arange(len(groups)), groups, (0, 0, 0), tasks)
        batches = with_gradient(own, own.batches([batch], len(batch)), batch=False, sample=False)
        for part, prepared in own.prepared(policy, batches):
            for j in sorted({0, own.losses_per_sample - 1}):
                loss = own.loss(policy, part, prepared, j)
                check_loss(loss, len(part), field)
                loss.per_sample.sum().backward()
        own.after_epoch(policy, 1)
        own.load_state_dict(own.state_dict())


def try_family(
    adapter: ModelAdapter, prompt: Prompt, size: Size, sample: DrawSample, field: str
) -> None:
    """Take the first step of a picture with a family of the user's own, which `field` names."""
    with told_in_one_line(field, type(adapter)), torch.no_grad():
        schedule, transformer = adapter.schedule(sample.num_steps, *size), adapter.transformer
        dynamics = Dynamics(schedule, guidance_scale=sample.guidance_scale)
        denoiser = Denoiser(adapter, transformer, dynamics)
        generators, shape = [torch.Generator().manual_seed(0)], adapter.latent_shape(*size)
        noise = initial_noise(generators, shape, adapter.device).to(latent_dtype(transformer))
        denoiser.step(0, noise, denoiser.encode([prompt]), stochastic=False)


def build_policy(algorithm: Algorithm) -> Policy:
    adapter, setup = load_adapter(str(MODEL), max_sequence_length=4), algorithm.setup
    dynamics = Dynamics(adapter.schedule(setup.num_steps, SIDE, SIDE), setup.sde_type)
    policy = Policy(adapter, dynamics, rank=2, alpha=2)
    policy.reference, policy.old = (
        Snapshot(policy.trained(), name) for name in ("reference", "old")
    )
    policy.loras = {path: Snapshot(policy.trained(), path) for path in algorithm.loras.values()}
    return policy


def sample(policy: Policy, algorithm: Algorithm) -> Trajectory:
    count = GROUPS * algorithm.setup.group_size
    generators = [torch.Generator().manual_seed(i) for i in range(count)]
    trajectory = policy.denoiser.sample(
        initial_noise(generators, policy.adapter.latent_shape(SIDE, SIDE), "cpu"),
        policy.adapter.encode(["a"] * count, [""] * count),
        steps=algorithm.noisy_steps(np.random.default_rng(0), 0),
        generators=generators,
        keep_means=algorithm.keeps_means,
        keep_states=algorithm.needs_reward_gradient,
    )
    pull = torch.ones_like(trajectory.final) if algorithm.needs_reward_gradient else None
    return replace(trajectory, pull=pull)


def check_loss(loss: Loss, count: int, field: str) -> None:
    for name, values in {"the loss": loss.per_sample, **loss.columns}.items():
        if values.shape != (count,):
            raise UserError(
                f"{field}: {name} must have one number per sample, {count} here, and has the shape "
                f"{tuple(values.shape)}"
            )
    if not loss.per_sample.requires_grad:
        raise UserError(f"{field}: the loss has no gradient; take it from the velocity or the step")
