"""Sampling of trajectories, and evaluation of single steps of them in training.

A sample starts from noise at sigma = 1 and follows the model's velocity along the schedule
sigmas[0] > ... > sigmas[n] = 0. A contiguous window of steps adds noise by one of the SDE rules in
`flow_grpo.sde`; these stochastic steps have a log-probability and are the ones that are trained.
All other steps integrate the ODE. Training evaluates a stored step again, from `latents[:, j]` to
`latents[:, j + 1]`, with the same velocity function and batch composition as in sampling, so
that the ratio before the first update is exactly 1.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flow_grpo.data.prompts import Prompt
from flow_grpo.data.seeding import Stream, torch_generator
from flow_grpo.diffusion.models import Conditioning, ModelAdapter, Schedule
from flow_grpo.diffusion.models.base import GuidanceGradient, latent_dtype
from flow_grpo.perf.transfer import to_device
from flow_grpo.sde import Kind, Solver, Step, dpm2_step, sde_step


@dataclass(frozen=True)
class Dynamics:
    """How to integrate the velocity field; the same in sampling and training."""

    schedule: Schedule
    kind: Kind = "ode"  # rule of the stochastic steps; all others use "ode"
    noise_level: float = 0.7
    guidance_scale: float = 1.0
    guidance_gradient: GuidanceGradient = "both"
    solver: Solver = "euler"  # for ODE steps
    max_guidance: float = 0.0  # largest scale that losses evaluate the velocity at


@dataclass(frozen=True)
class Trajectory:
    """A batch of samples: the final latents and what training needs of the stochastic steps."""

    final: Tensor  # (B, C, H, W), float32
    steps: range  # indices of the stochastic steps in the schedule
    latents: Tensor  # (B, len(steps) + 1, C, H, W), float32; (B, 0) if none
    log_probs: Tensor  # (B, len(steps))
    conditioning: Conditioning
    # recorded on request:
    means: Tensor | None = None  # (B, len(steps), C, H, W), means of the transitions
    states: Tensor | None = None  # (B, schedule steps + 1, C, H, W), all latents of the path
    reward_gradient: Tensor | None = None  # (B, C, H, W), gradient of the reward in `final`

    def __len__(self) -> int:
        return len(self.final)

    def __getitem__(self, part: slice | Tensor) -> "Trajectory":
        selected = {name: tensor[part] for name, tensor in self._tensors().items()}
        return replace(self, conditioning=self.conditioning[part], **selected)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors with one row per sample; not those of the conditioning."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @staticmethod
    def join(parts: "Sequence[Trajectory]") -> "Trajectory":
        """Concatenate batches that took the same stochastic steps.

        Raises:
            ValueError: If the steps differ, as column j of the latents would be another step in
                each batch.
        """
        if odd := [p.steps for p in parts if p.steps != parts[0].steps]:
            raise ValueError(f"cannot join trajectories of {parts[0].steps} and {odd[0]}")
        names = parts[0]._tensors()
        joined = {name: torch.cat([getattr(p, name) for p in parts]) for name in names}
        conditioning = Conditioning.concat([p.conditioning for p in parts])
        return replace(parts[0], conditioning=conditioning, **joined)


@dataclass(frozen=True)
class Denoiser:
    """A model together with the dynamics it is sampled by."""

    adapter: ModelAdapter
    transformer: nn.Module
    dynamics: Dynamics

    def with_guidance(self, scale: float | None) -> "Denoiser":
        """Return a copy with another guidance scale; `None` keeps that of the rollout."""
        if scale is None:
            return self
        return replace(self, dynamics=replace(self.dynamics, guidance_scale=scale))

    def velocity(
        self, latents: Tensor, timestep: float | Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Return the guided velocity, (B, C, H, W); `timestep` is a float or (B,)."""
        return self.adapter.velocity(
            self.transformer,
            latents,
            timestep,
            conditioning,
            self.dynamics.guidance_scale,
            gradient=self.dynamics.guidance_gradient,
        )

    def no_gradient_sync(self) -> AbstractContextManager:
        """Return a context for passes with gradients that DDP must not synchronise."""
        ddp = isinstance(self.transformer, DistributedDataParallel)
        return self.transformer.no_sync() if ddp else nullcontext()

    def velocity_with_training_kernels(
        self, latents: Tensor, timestep: float | Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Return the velocity without a gradient, computed by the kernels of training.

        A compiled graph rounds differently if it stores nothing for a backward pass.
        """
        with torch.set_grad_enabled(self.adapter.compiled), self.no_gradient_sync():
            velocity = self.velocity(latents, timestep, conditioning)
        return velocity.detach()  # frees the activations

    def step(
        self,
        i: int,
        latents: Tensor,
        conditioning: Conditioning,
        *,
        stochastic: bool,
        next_latents: Tensor | None = None,
        noise: Iterator[Tensor] | None = None,
    ) -> tuple[Step, Tensor]:
        """Take step i of the schedule by `take_step`; return it with the velocity it used."""
        # steps that will be trained are sampled by the kernels that train them
        match_training = stochastic and next_latents is None and not torch.is_grad_enabled()
        velocity_at = self.velocity_with_training_kernels if match_training else self.velocity
        velocity = velocity_at(latents, self.dynamics.schedule.timesteps[i], conditioning)
        step = take_step(
            self.dynamics,
            i,
            latents,
            velocity,
            stochastic=stochastic,
            next_latents=next_latents,
            noise=next(noise) if noise is not None else None,
        )
        return step, velocity

    @torch.no_grad()
    def sample(
        self,
        latents: Tensor,
        conditioning: Conditioning,
        *,
        steps: range = range(0),
        generators: list[torch.Generator] | None = None,
        noise_group_ids: np.ndarray | None = None,
        keep_means: bool = False,
        keep_states: bool = False,
        stochastic_step_fn: Callable[..., tuple[Step, Tensor]] | None = None,
    ) -> Trajectory:
        """Denoise a batch of initial noise.

        Args:
            latents: Initial noise, (B, C, H, W).
            conditioning: Of the B prompts.
            steps: Indices of the steps that add noise; empty for plain ODE sampling.
            generators: One per sample, for the noise of `steps`.
            noise_group_ids: (B,); samples with equal ids start from the same noise and prompt, so
                the ODE steps before the first noise are computed once per id, unless `keep_states`.
            keep_means: Whether to record the means of the stochastic steps.
            keep_states: Whether to record the latents of all steps.
            stochastic_step_fn: Replacement for `step` in stochastic steps; it may run a backward
                pass through the weights.
        """
        latents = latents.to(dtype=latent_dtype(self.transformer))
        sigma = self.dynamics.schedule.sigmas[0]
        latents = self.adapter.start_latents(latents, conditioning, sigma)
        noise = step_noise(generators, len(steps), latents) if steps else None
        window_latents, log_probs, means = [], [], []
        path = [latents]
        for stochastic, run in groupby(range(len(self.dynamics.schedule)), steps.__contains__):
            if stochastic:
                window_latents.append(latents)
                step_fn, prepared_conditioning = stochastic_step_fn, conditioning
                if step_fn is None:  # precomputed inputs have no gradient
                    step_fn = partial(self.step, stochastic=True)
                    prepared_conditioning = self.adapter.precompute(self.transformer, conditioning)
                for i in run:
                    step, _ = step_fn(i, latents, prepared_conditioning, noise=noise)
                    latents = step.next_sample
                    window_latents.append(latents)
                    log_probs.append(step.log_prob)
                    if keep_means:
                        means.append(step.mean)
            elif noise_group_ids is None or window_latents or keep_states:
                record = path if keep_states else None
                latents = self._integrate_ode(list(run), latents, conditioning, record)
            else:
                latents = self._integrate_shared_ode(
                    list(run), latents, conditioning, noise_group_ids
                )
        empty = latents.new_zeros(len(latents), 0)
        return Trajectory(
            final=self.adapter.finalize_latents(latents, conditioning),
            steps=steps,
            latents=torch.stack(window_latents, 1) if window_latents else empty,
            log_probs=torch.stack(log_probs, 1) if log_probs else empty,
            conditioning=conditioning,
            means=torch.stack(means, 1) if means else None,
            states=torch.stack(path, 1) if keep_states else None,
        )

    def _integrate_ode(
        self,
        run: list[int],
        latents: Tensor,
        conditioning: Conditioning,
        path: list[Tensor] | None = None,
    ) -> Tensor:
        """Take consecutive steps without noise; append the result of each to `path`."""
        sigmas = self.dynamics.schedule.sigmas
        previous = None
        prepared_conditioning = self.adapter.precompute(self.transformer, conditioning)
        for i in run:
            step, velocity = self.step(i, latents, prepared_conditioning, stochastic=False)
            if self.dynamics.solver == "dpm2":
                latents, previous = dpm2_step(velocity, latents, sigmas[i], sigmas[i + 1], previous)
            else:
                latents = step.next_sample
            if path is not None:
                path.append(latents)
        return latents

    def _integrate_shared_ode(
        self,
        run: list[int],
        latents: Tensor,
        conditioning: Conditioning,
        noise_group_ids: np.ndarray,
    ) -> Tensor:
        """Take noise-free steps once per group of identical samples."""
        ids = noise_group_ids.tolist()
        groups = list(dict.fromkeys(ids))
        first = torch.tensor([ids.index(group) for group in groups])
        expand = torch.tensor([groups.index(group) for group in ids])
        unique = latents[to_device(first, latents.device)]
        latents = self._integrate_ode(run, unique, conditioning[first])
        return latents[to_device(expand, latents.device)]

    def encode(self, prompts: list[Prompt]) -> Conditioning:
        return self.adapter.encode(*self._encoder_inputs(prompts))

    def precompute_embeddings(self, prompts: list[Prompt]) -> None:
        """Encode `prompts` ahead of time."""
        self.adapter.precompute_embeddings(*self._encoder_inputs(prompts))

    def _encoder_inputs(
        self, prompts: list[Prompt]
    ) -> tuple[list[str], list[str] | None, list[tuple]]:
        """Return the prompts, the negative prompts if any guidance needs them, and the images."""
        negative = None
        if self.adapter.is_guided(max(self.dynamics.guidance_scale, self.dynamics.max_guidance)):
            negative = [p.negative_prompt or self.adapter.negative_prompt for p in prompts]
        return [p.prompt for p in prompts], negative, [p.images for p in prompts]

    @property
    def passes_per_velocity(self) -> int:
        """Return how many transformer passes one velocity takes."""
        return 2 if self.adapter.is_guided(self.dynamics.guidance_scale) else 1


def count_sample_steps(num_steps: int, noisy: range, noise_group_ids: np.ndarray) -> int:
    """Return how many steps `Denoiser.sample` takes, summed over samples."""
    shared = noisy.start if noisy else num_steps
    return len(noise_group_ids) * (num_steps - shared) + len({*noise_group_ids.tolist()}) * shared


def take_step(
    dynamics: Dynamics,
    i: int | np.ndarray,
    latents: Tensor,
    velocity: Tensor,
    *,
    stochastic: bool,
    next_latents: Tensor | None = None,
    noise: Tensor | None = None,
) -> Step:
    """Take one step of the schedule along `velocity`.

    Args:
        dynamics: Schedule, step rule and noise level.
        i: Index of the step, or one per sample, (B,).
        latents: (B, C, H, W), like `velocity` and `next_latents`.
        velocity: Model output at `latents`.
        stochastic: Whether to use the SDE rule of `dynamics`; the ODE otherwise.
        next_latents: Where the step led when it was sampled; given in training.
        noise: Noise of a new step, (B, C, H, W).
    """
    sigmas = dynamics.schedule.sigmas
    if isinstance(i, np.ndarray):
        exact = torch.tensor(sigmas, dtype=torch.float64)
        sigma, sigma_next = (to_device(exact[j], latents.device) for j in (i, i + 1))
    else:
        sigma, sigma_next = sigmas[i], sigmas[i + 1]
    return sde_step(
        velocity,
        latents,
        sigma,
        sigma_next,
        kind=dynamics.kind if stochastic else "ode",
        noise_level=dynamics.noise_level,
        sigma_max=sigmas[1],
        next_sample=next_latents,
        noise=noise,
    )


def group_generators(seed: int, epoch: int, rows: list[int]) -> list[torch.Generator]:
    """Return generators for `same_latent`, where samples of a group share the initial noise."""
    return [torch_generator(seed, Stream.GROUP, epoch, row) for row in rows]


def eval_generators(seed: int, rows: list[int]) -> list[torch.Generator]:
    """Return one generator per prompt, so that images depend neither on batch size nor on time."""
    return [torch_generator(seed, Stream.EVAL, row) for row in rows]


def initial_noise(
    generators: list[torch.Generator], shape: tuple[int, ...], device: torch.device | str
) -> Tensor:
    """Draw initial latents, one from each generator; (B, *shape), float32."""
    drawn = _randn_per_generator(generators, shape, torch.float32)
    return to_device(torch.stack(list(drawn)), device)


def step_noise(generators: list[torch.Generator], count: int, like: Tensor) -> Iterator[Tensor]:
    """Yield the noise of `count` steps, each like `like`; drawn while the device runs the first."""
    drawn = _randn_per_generator(generators, (count, *like.shape[1:]), like.dtype)
    return _stack_on_device(drawn, like.device)


def draw_noise(generators: list[torch.Generator], count: int, like: Tensor) -> Tensor:
    """Draw noise of shape (B, count, *like.shape[1:])."""
    drawn = _randn_per_generator(generators, (count, *like.shape[1:]), like.dtype)
    return to_device(torch.stack(list(drawn)), like.device)


def _randn_per_generator(
    generators: list[torch.Generator], shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield a standard normal tensor of `shape` per generator, on the CPU.

    They are drawn on all cores; a single one takes 0.1 s for a batch of large images.
    """
    threads = ThreadPoolExecutor(thread_name_prefix="noise")
    drawn = threads.map(lambda g: torch.randn(shape, generator=g, dtype=dtype), generators)
    threads.shutdown(wait=False)  # the threads end when all is drawn
    return drawn


def _stack_on_device(drawn: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    yield from to_device(torch.stack(list(drawn), 1), device)


def within_group_distance(images: Tensor, groups: np.ndarray) -> Tensor:
    """Return a sum and a count, (2,), whose quotient is the mean distance of samples in a group.

    The distance is the root-mean-square pixel difference of two images or videos with pixels in
    [0, 1]; it is summed over the groups with at least two samples in `images`.

    Args:
        images: (B, 3, H, W) or (B, F, 3, H, W).
        groups: Group ids, (B,).
    """
    distances = []
    for group in dict.fromkeys(groups.tolist()):
        rows = torch.from_numpy(np.flatnonzero(groups == group))
        members = images[to_device(rows, images.device)]
        if len(members) > 1:
            distances.append((2 * members.float().var(0).mean()).sqrt())
    total = torch.stack(distances).sum() if distances else images.new_zeros(())
    return torch.stack([total.float(), images.new_full((), len(distances), dtype=torch.float32)])
