"""Sample trajectories with a model and a step rule, and take single steps of them again."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from flow_grpo.models import Conditioning, ModelAdapter, Schedule
from flow_grpo.models.base import GuidanceGradient, latent_dtype
from flow_grpo.sampling.data import Prompt
from flow_grpo.sampling.seeding import Stream, torch_generator
from flow_grpo.sde import Kind, Step, sde_step
from flow_grpo.speed.transfer import send

_DRAWERS = ThreadPoolExecutor(thread_name_prefix="noise")


@dataclass(frozen=True)
class Dynamics:
    """How a velocity field is walked; the same in sampling and training."""

    schedule: Schedule
    kind: Kind = "ode"  # of the stochastic steps; all others are ode
    noise_level: float = 0.7
    guidance_scale: float = 1.0
    guidance_gradient: GuidanceGradient = "both"


@dataclass(frozen=True)
class Trajectory:
    """What training needs of a batch of sampled trajectories: the stochastic steps alone."""

    steps: range  # of the schedule
    latents: Tensor  # (B, len(steps) + 1, C, H, W), float32
    log_probs: Tensor  # (B, len(steps))
    conditioning: Conditioning

    def __len__(self) -> int:
        return len(self.log_probs)

    def __getitem__(self, part: slice | Tensor) -> "Trajectory":
        return replace(
            self,
            latents=self.latents[part],
            log_probs=self.log_probs[part],
            conditioning=self.conditioning[part],
        )


def policy_step(
    adapter: ModelAdapter,
    transformer: nn.Module,
    dynamics: Dynamics,
    i: int,
    latents: Tensor,
    conditioning: Conditioning,
    *,
    stochastic: bool,
    next_latents: Tensor | None = None,
    noise: Iterator[Tensor] | None = None,
) -> tuple[Step, Tensor]:
    """Step i of the schedule, as `take_step` takes it, and the velocity behind it."""
    # Compiled code rounds differently where it keeps nothing for a backward pass: what will be
    # trained is sampled by the code that trains it.
    as_trained = adapter.compiled and stochastic and next_latents is None
    with torch.set_grad_enabled(torch.is_grad_enabled() or as_trained):
        velocity = adapter.velocity(
            transformer,
            latents,
            dynamics.schedule.timesteps[i],
            conditioning,
            dynamics.guidance_scale,
            gradient=dynamics.guidance_gradient,
        )
    if as_trained:
        velocity = velocity.detach()  # and with it go the activations
    step = take_step(
        dynamics,
        i,
        latents,
        velocity,
        stochastic=stochastic,
        next_latents=next_latents,
        noise=next(noise) if noise is not None else None,
    )
    return step, velocity


def take_step(
    dynamics: Dynamics,
    i: int,
    latents: Tensor,
    velocity: Tensor,
    *,
    stochastic: bool,
    next_latents: Tensor | None = None,
    noise: Tensor | None = None,
) -> Step:
    """Step i of the schedule along `velocity`: with new noise, or to where it went."""
    sigmas = dynamics.schedule.sigmas
    return sde_step(
        velocity,
        latents,
        sigmas[i],
        sigmas[i + 1],
        kind=dynamics.kind if stochastic else "ode",
        noise_level=dynamics.noise_level,
        sigma_max=sigmas[1],
        next_sample=next_latents,
        noise=noise,
    )


@torch.no_grad()
def sample_trajectory(
    adapter: ModelAdapter,
    transformer: nn.Module,
    dynamics: Dynamics,
    latents: Tensor,
    conditioning: Conditioning,
    *,
    steps: range = range(0),
    generators: list[torch.Generator] | None = None,
    without_noise: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[Tensor, Trajectory]:
    """Denoise `latents` (B, C, H, W); `steps` add noise, drawn from one generator per sample.

    Returns the final latents and what training needs. With no steps it is the plain ode. All
    other steps are taken within `without_noise`.
    """
    latents = latents.to(dtype=latent_dtype(transformer))
    noise = step_noise(generators, len(steps), latents) if steps else None
    kept, log_probs = [], []
    for stochastic, run in groupby(range(len(dynamics.schedule)), steps.__contains__):
        if stochastic:
            kept.append(latents)
        with nullcontext() if stochastic else without_noise():
            for i in run:
                step, _ = policy_step(
                    adapter,
                    transformer,
                    dynamics,
                    i,
                    latents,
                    conditioning,
                    stochastic=stochastic,
                    noise=noise if stochastic else None,
                )
                latents = step.next_sample
                if stochastic:
                    kept.append(latents)
                    log_probs.append(step.log_prob)
    empty = latents.new_zeros(len(latents), 0)
    return latents, Trajectory(
        steps,
        torch.stack(kept, 1) if kept else empty,
        torch.stack(log_probs, 1) if log_probs else empty,
        conditioning,
    )


def encode_prompts(
    adapter: ModelAdapter, prompts: list[Prompt], dynamics: Dynamics
) -> Conditioning:
    negative = [p.negative_prompt for p in prompts] if dynamics.guidance_scale > 1 else None
    return adapter.encode([p.prompt for p in prompts], negative)


def encode_ahead(adapter: ModelAdapter, prompts: list[Prompt], dynamics: Dynamics) -> None:
    """Have the texts of `prompts` at hand."""
    negative = [p.negative_prompt for p in prompts] if dynamics.guidance_scale > 1 else []
    adapter.encode_ahead([*(p.prompt for p in prompts), *negative])


def sample_generators(seed: int, epoch: int, index: list[int]) -> list[torch.Generator]:
    """One per sample, so that its noise does not depend on the batch or process it lands in."""
    return [torch_generator(seed, Stream.SAMPLE, epoch, i) for i in index]


def group_generators(seed: int, epoch: int, rows: list[int]) -> list[torch.Generator]:
    """For `same_latent`: samples of one group start from the same noise."""
    return [torch_generator(seed, Stream.GROUP, epoch, row) for row in rows]


def eval_generators(seed: int, rows: list[int]) -> list[torch.Generator]:
    """One per prompt: the same picture for any batch size, in every evaluation of a run."""
    return [torch_generator(seed, Stream.EVAL, row) for row in rows]


def initial_noise(
    generators: list[torch.Generator], shape: tuple[int, ...], device: torch.device | str
) -> Tensor:
    return send(torch.stack(list(_drawn(generators, shape, torch.float32))), device)


def step_noise(generators: list[torch.Generator], count: int, like: Tensor) -> Iterator[Tensor]:
    """Of `count` steps, each like `like`; drawn while the device takes the first."""
    return _sent(_drawn(generators, (count, *like.shape[1:]), like.dtype), like.device)


def _drawn(
    generators: list[torch.Generator], shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """On all cores: for a batch of large pictures one would need a tenth of a second."""
    return _DRAWERS.map(lambda g: torch.randn(shape, generator=g, dtype=dtype), generators)


def _sent(drawn: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    yield from send(torch.stack(list(drawn), 1), device)
