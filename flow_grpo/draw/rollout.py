"""Sample trajectories with a model and a step rule, and take single steps of them again."""

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
from flow_grpo.draw.models import Conditioning, ModelAdapter, Schedule
from flow_grpo.draw.models.base import GuidanceGradient, latent_dtype
from flow_grpo.sde import Kind, Solver, Step, dpm2_step, sde_step
from flow_grpo.speed.transfer import send


@dataclass(frozen=True)
class Dynamics:
    """How a sample is drawn from a velocity field: schedule, kind of SDE, noise and guidance. The
    same in sampling and training."""

    schedule: Schedule
    kind: Kind = "ode"  # of the stochastic steps; all others are ode
    noise_level: float = 0.7
    guidance_scale: float = 1.0
    guidance_gradient: GuidanceGradient = "both"
    solver: Solver = "euler"  # of the ode steps
    most_guidance: float = 0.0  # of other scales that velocities at the samples are asked for


@dataclass(frozen=True)
class Trajectory:
    """What training needs of a batch of samples: where they ended, and their stochastic steps."""

    final: Tensor  # (B, C, H, W), float32
    steps: range  # of the schedule
    latents: Tensor  # (B, len(steps) + 1, C, H, W), float32; (B, 0) without steps
    log_probs: Tensor  # (B, len(steps))
    conditioning: Conditioning
    means: Tensor | None = None  # (B, len(steps), C, H, W), of the steps, where asked for
    states: Tensor | None = None  # (B, all steps + 1, C, H, W), where asked for
    pull: Tensor | None = None  # like final: the gradient of the reward there, where asked for

    def __len__(self) -> int:
        return len(self.final)

    def __getitem__(self, part: slice | Tensor) -> "Trajectory":
        return replace(
            self,
            final=self.final[part],
            latents=self.latents[part],
            log_probs=self.log_probs[part],
            conditioning=self.conditioning[part],
            **{name: own[part] for name, own in self._further().items()},
        )

    def _further(self) -> dict[str, Tensor]:
        """What was asked for beside the rest."""
        names = ("means", "states", "pull")
        return {name: own for name in names if (own := getattr(self, name)) is not None}

    @staticmethod
    def join(parts: "Sequence[Trajectory]") -> "Trajectory":
        """Concatenate batches that took the same stochastic steps.

        Raises:
            ValueError: The steps differ: column j of the latents would mean a different step for
                each batch.
        """
        if odd := [p.steps for p in parts if p.steps != parts[0].steps]:
            raise ValueError(f"cannot join trajectories of {parts[0].steps} and {odd[0]}")
        return replace(
            parts[0],
            final=torch.cat([p.final for p in parts]),
            latents=torch.cat([p.latents for p in parts]),
            log_probs=torch.cat([p.log_probs for p in parts]),
            conditioning=Conditioning.join([p.conditioning for p in parts]),
            **{n: torch.cat([getattr(p, n) for p in parts]) for n in parts[0]._further()},
        )


@dataclass(frozen=True)
class Denoiser:
    """A model together with the dynamics that it draws by."""

    adapter: ModelAdapter
    transformer: nn.Module
    dynamics: Dynamics

    def guided(self, scale: float | None) -> "Denoiser":
        """The same with another guidance than that of the rollout, where one is given."""
        if scale is None:
            return self
        return replace(self, dynamics=replace(self.dynamics, guidance_scale=scale))

    def velocity(
        self, latents: Tensor, timestep: float | Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The guided velocity; `timestep` is one for all, or (B,)."""
        return self.adapter.velocity(
            self.transformer,
            latents,
            timestep,
            conditioning,
            self.dynamics.guidance_scale,
            gradient=self.dynamics.guidance_gradient,
        )

    def unshared_gradients(self) -> AbstractContextManager:
        """DDP would take a pass with gradients for the one whose gradients it has to share."""
        ddp = isinstance(self.transformer, DistributedDataParallel)
        return self.transformer.no_sync() if ddp else nullcontext()

    def velocity_as_trained(
        self, latents: Tensor, timestep: float | Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Without gradient, but by the code that trains: compiled code rounds differently where it
        keeps nothing for a backward pass."""
        with torch.set_grad_enabled(self.adapter.compiled), self.unshared_gradients():
            velocity = self.velocity(latents, timestep, conditioning)
        return velocity.detach()  # and with it go the activations

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
        """Step i of the schedule, as `take_step` takes it, and the velocity behind it."""
        # what will be trained is sampled by the code that trains it
        as_trained = stochastic and next_latents is None and not torch.is_grad_enabled()
        velocity_at = self.velocity_as_trained if as_trained else self.velocity
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
        without_noise: Callable[[], AbstractContextManager] = nullcontext,
        alike: np.ndarray | None = None,
        keep_means: bool = False,
        keep_states: bool = False,
        noisy_step: Callable[..., tuple[Step, Tensor]] | None = None,
    ) -> Trajectory:
        """Denoise `latents` (B, C, H, W); `steps` add noise, drawn from one generator per sample.

        With no steps it is the plain ode. All other steps are taken within `without_noise`. Samples
        of the same number in `alike` (B,) start from the same noise and prompt: until noise comes
        between them, their steps are taken once, unless all states are kept, of steps without
        noise. `noisy_step` takes those with noise in place of `step`, and may go back through the
        weights.
        """
        latents = latents.to(dtype=latent_dtype(self.transformer))
        noise = step_noise(generators, len(steps), latents) if steps else None
        kept, log_probs, means, path = [], [], [], [latents]
        for stochastic, run in groupby(range(len(self.dynamics.schedule)), steps.__contains__):
            if stochastic:
                kept.append(latents)
                take, given = noisy_step, conditioning
                if take is None:  # what is prepared has no gradient
                    take = partial(self.step, stochastic=True)
                    given = self.adapter.prepared(self.transformer, conditioning)
                for i in run:
                    step, _ = take(i, latents, given, noise=noise)
                    latents = step.next_sample
                    kept.append(latents)
                    log_probs.append(step.log_prob)
                    means += [step.mean] if keep_means else []
            else:
                with without_noise():
                    if alike is None or kept or keep_states:
                        kept_here = path if keep_states else None
                        latents = self._ode(list(run), latents, conditioning, kept_here)
                    else:
                        latents = self._shared_ode(list(run), latents, conditioning, alike)
        empty = latents.new_zeros(len(latents), 0)
        return Trajectory(
            self.adapter.finish(latents, conditioning),
            steps,
            torch.stack(kept, 1) if kept else empty,
            torch.stack(log_probs, 1) if log_probs else empty,
            conditioning,
            torch.stack(means, 1) if means else None,
            torch.stack(path, 1) if keep_states else None,
        )

    def _ode(
        self,
        run: list[int],
        latents: Tensor,
        conditioning: Conditioning,
        path: list[Tensor] | None = None,
    ) -> Tensor:
        """Consecutive steps without noise; where each led is added to `path`."""
        sigmas, before = self.dynamics.schedule.sigmas, None
        given = self.adapter.prepared(self.transformer, conditioning)
        for i in run:
            step, velocity = self.step(i, latents, given, stochastic=False)
            if self.dynamics.solver == "dpm2":
                latents, before = dpm2_step(velocity, latents, sigmas[i], sigmas[i + 1], before)
            else:
                latents = step.next_sample
            if path is not None:
                path.append(latents)
        return latents

    def _shared_ode(
        self, run: list[int], latents: Tensor, conditioning: Conditioning, alike: np.ndarray
    ) -> Tensor:
        groups = list(dict.fromkeys(alike.tolist()))
        first = torch.tensor([alike.tolist().index(group) for group in groups])
        each = torch.tensor([groups.index(group) for group in alike.tolist()])
        latents = self._ode(run, latents[send(first, latents.device)], conditioning[first])
        return latents[send(each, latents.device)]

    def encode(self, prompts: list[Prompt]) -> Conditioning:
        return self.adapter.encode(*self._given(prompts))

    def encode_ahead(self, prompts: list[Prompt]) -> None:
        """Have what the model is given of `prompts` at hand."""
        self.adapter.encode_ahead(*self._given(prompts))

    def _given(self, prompts: list[Prompt]) -> tuple[list[str], list[str] | None, list[tuple]]:
        negative = [p.negative_prompt for p in prompts] if self._needs_negatives else None
        return [p.prompt for p in prompts], negative, [p.images for p in prompts]

    @property
    def _needs_negatives(self) -> bool:
        d = self.dynamics
        return self.adapter.is_guided(max(d.guidance_scale, d.most_guidance))

    @property
    def passes(self) -> int:
        """Passes of the transformer for the velocity of one sample."""
        return 2 if self.adapter.is_guided(self.dynamics.guidance_scale) else 1


def steps_taken(num_steps: int, noisy: range, alike: np.ndarray) -> int:
    """How many steps of single samples `Denoiser.sample` takes, by the same arguments."""
    shared = noisy.start if noisy else num_steps
    return len(alike) * (num_steps - shared) + len({*alike.tolist()}) * shared


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
    """Take step i of the schedule, or i (B,) of each sample, along `velocity`: with new noise, or
    to `next_latents`, where it went when it was sampled."""
    sigmas = dynamics.schedule.sigmas
    if isinstance(i, np.ndarray):
        exact = torch.tensor(sigmas, dtype=torch.float64)
        sigma, sigma_next = (send(exact[j], latents.device) for j in (i, i + 1))
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
    """For `same_latent`: samples of one group start from the same noise."""
    return [torch_generator(seed, Stream.GROUP, epoch, row) for row in rows]


def eval_generators(seed: int, rows: list[int]) -> list[torch.Generator]:
    """One per prompt: the same picture for any batch size, in every evaluation of a run."""
    return [torch_generator(seed, Stream.EVAL, row) for row in rows]


def initial_noise(
    generators: list[torch.Generator], shape: tuple[int, ...], device: torch.device | str
) -> Tensor:
    """The latents that samples begin with, one from each generator."""
    return send(torch.stack(list(_drawn(generators, shape, torch.float32))), device)


def step_noise(generators: list[torch.Generator], count: int, like: Tensor) -> Iterator[Tensor]:
    """The noise of `count` steps, each like `like`; drawn while the device takes the first."""
    return _sent(_drawn(generators, (count, *like.shape[1:]), like.dtype), like.device)


def draw_noise(generators: list[torch.Generator], count: int, like: Tensor) -> Tensor:
    """(B, count, ...), each like a sample of `like`."""
    drawn = _drawn(generators, (count, *like.shape[1:]), like.dtype)
    return send(torch.stack(list(drawn)), like.device)


def _drawn(
    generators: list[torch.Generator], shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """On all cores: for a batch of large pictures one would need a tenth of a second."""
    threads = ThreadPoolExecutor(thread_name_prefix="noise")
    drawn = threads.map(lambda g: torch.randn(shape, generator=g, dtype=dtype), generators)
    threads.shutdown(wait=False)  # they end once all is drawn
    return drawn


def _sent(drawn: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    yield from send(torch.stack(list(drawn), 1), device)


def group_distance(images: Tensor, groups: np.ndarray) -> Tensor:
    """How far apart two pictures or clips of a group are, root mean square over pixels in [0, 1]:
    the sum over groups of which there are two or more here, and their number, (2,)."""
    distances = [
        (2 * part.float().var(0).mean()).sqrt()
        for group in dict.fromkeys(groups.tolist())
        if len(part := images[_rows(groups == group, images.device)]) > 1
    ]
    total = torch.stack(distances).sum() if distances else images.new_zeros(())
    return torch.stack([total.float(), images.new_full((), len(distances), dtype=torch.float32)])


def _rows(chosen: np.ndarray, device: torch.device) -> Tensor:
    """Without waiting for the device."""
    return send(torch.from_numpy(np.flatnonzero(chosen)), device)
