"""What algorithms share that need only the final latents x0 of samples, however they were drawn:
x0 is noised again, x_t = (1 - t) x0 + t e, and the velocity at x_t is trained."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.data.seeding import Stream, numpy_rng, torch_generator
from flow_grpo.draw.algorithms.base import Algorithm, Batch, Loss, Setup
from flow_grpo.draw.models import Schedule
from flow_grpo.draw.rollout import Dynamics, draw_noise, take_step
from flow_grpo.losses import KL, KLS, kl_to_reference, mean_square, root_mean_square
from flow_grpo.speed.transfer import send

if TYPE_CHECKING:
    from flow_grpo.draw.policy import FixedWeights, Policy


@dataclass(frozen=True)
class ForwardSettings:
    times: int = setting(
        6, "Noise levels trained per sample, spread evenly over those of the rollout.", at_least=1
    )
    skip_first: int = setting(
        0, "How many of the noisiest levels of the rollout are never trained.", at_least=0
    )
    skip_last: int = setting(
        0,
        "How many of the cleanest levels of the rollout are never trained: errors there say little "
        "of the picture.",
        at_least=0,
    )
    noise_per: Literal["sample", "group"] = setting(
        "sample",
        'Draw noise levels and noise for each "sample", or once for all samples of a "group" '
        "(V-GRPO): their losses then differ by the samples alone. dgpo and dpo always do that.",
        choices=("sample", "group"),
    )
    train_guidance: float | None = setting(
        None,
        "Where set, the guidance of the velocity that is trained, in place of that of the rollout: "
        "then it is another policy than the one that sampled.",
        at_least=0,
        at_most=1000,
    )
    kl_guidance: float | None = setting(
        None,
        "Where set, the guidance of the reference, in place of that of the velocity that is "
        "trained: then the KL, and the margins of dpo, are not 0 at the start.",
        at_least=0,
        at_most=1000,
    )
    kl_beta: float = setting(
        0.0,
        "Weight of the KL to the model as training began. 0 saves its forward pass.",
        at_least=0,
    )
    kl_type: KL = setting(
        "velocity",
        "How the KL is measured: velocity is the mean squared difference of velocities; flow_grpo, "
        "which leaves dt out, and gaussian, which is exact, compare the noisy steps along them, of "
        "sample.sde_type and sample.noise_level.",
        choices=KLS,
    )
    kl_target: float = setting(
        0.0,
        "Where set, and once the KL has reached this value: its weight is doubled or halved after "
        "an epoch in which the KL was more than 1.5 times this value, or less than 1/1.5 of it.",
        at_least=0,
    )


@dataclass(frozen=True)
class Noised:
    """Samples at T noise levels each. (B, T, C, H, W) where nothing else is said."""

    steps: np.ndarray  # (B, T), of the schedule
    t: Tensor  # (B, T, 1, 1, 1)
    timesteps: Tensor  # (B, T), in the model's units
    x_t: Tensor
    target: Tensor  # e - x0, the velocity that leads from x0 to the noise
    old: Tensor | None = None  # velocities of the old weights
    reference: Tensor | None = None

    def __getitem__(self, j: int) -> "Noised":
        """All at the j-th level: (B, C, H, W)."""
        at = {k: None if v is None else v[:, j] for k, v in vars(self).items()}
        return type(self)(**at)


class ForwardProcess(Algorithm):
    """Base of the methods that noise final latents again; a subclass has an `objective`."""

    holds = True
    shares_noise = False  # samples of a group have the same noise and times, always
    fixed: tuple["FixedWeights", ...] = ()  # weights whose velocities the objective needs

    def __init__(self, settings: ForwardSettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.kl_weight = settings.kl_beta
        self.losses_per_sample = settings.times

    def check(self) -> None:
        super().check()
        skipped = self.settings.skip_first + self.settings.skip_last
        if self.settings.times > self.setup.num_steps - skipped:
            less = f" less {skipped}, of skip_first and skip_last" if skipped else ""
            raise ValueError(
                f"{self.name}.times={self.settings.times} must be at most sample.num_steps="
                f"{self.setup.num_steps}{less}: noise levels are those of the rollout; set it lower"
            )
        if self.setup.window_size:
            raise ValueError(
                f"sample.sde_window_size={self.setup.window_size} does not go with algorithm="
                f"{self.name!r}, which samples without noise; set it to 0"
            )
        compares_steps = self.needs_reference and self.settings.kl_type != "velocity"
        if compares_steps and self.setup.sde_type == "cps":
            raise ValueError(
                f"{self.name}.kl_type={self.settings.kl_type!r} needs sample.sde_type='flow' or "
                "'dance', not 'cps', whose last step has no noise to divide by"
            )
        if self.setup.estimator == "remax":
            raise ValueError(
                f"train.advantage='remax' does not go with algorithm={self.name!r}: it compares "
                "with a sample drawn without noise, and here all are; use 'rloo'"
            )

    @property
    def needs_reference(self) -> bool:
        return self.is_held or "reference" in self.fixed

    @property
    def most_guidance(self) -> float:
        return max(self.settings.train_guidance or 0.0, self.settings.kl_guidance or 0.0)

    def objective(
        self, velocity: Tensor, at: Noised, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss (B,) without KL, and what to log of it."""
        raise NotImplementedError

    def prepare(self, policy: "Policy", batch: Batch) -> Noised:
        schedule, x0 = policy.dynamics.schedule, batch.trajectory.final
        seed, *rest = batch.seed
        keys, steps = self.levels(batch, len(schedule))
        generators = [torch_generator(seed, Stream.NOISE, *rest, key) for key in keys]
        noised = noise(schedule, x0, steps, generators)
        needed = set(self.fixed) | ({"reference"} if self.needs_reference else set())
        if policy.behaviour is None and policy.old is not None and policy.old.is_current:
            needed -= {"old"}  # the velocity itself, see `loss`
        velocities = {
            which: self.fixed_velocities(policy, which, noised, batch) for which in sorted(needed)
        }
        return replace(noised, **velocities)

    def levels(self, batch: Batch, num_steps: int) -> tuple[list[int], np.ndarray]:
        """The steps (B, T) of the schedule whose noise levels are trained, and the key of each
        sample's random numbers."""
        s = self.settings
        shared = self.shares_noise or s.noise_per == "group"
        keys = (batch.group if shared else batch.index).tolist()
        seed, *rest = batch.seed
        rngs = [numpy_rng(seed, Stream.TIMES, *rest, key) for key in keys]
        span = num_steps - s.skip_first - s.skip_last
        return keys, s.skip_first + np.stack([stratified(rng, span, s.times) for rng in rngs])

    def fixed_velocities(
        self, policy: "Policy", which: "FixedWeights", at: Noised, batch: Batch
    ) -> Tensor:
        s = self.settings
        own = which == "reference" and s.kl_guidance is not None
        stale = which == "old" and policy.behaviour is not None
        return policy.fixed_velocities(
            policy.behaviour if stale else which,
            at.x_t,
            at.steps,
            batch.trajectory.conditioning,
            guidance=s.kl_guidance if own else s.train_guidance,
        )

    def loss(self, policy: "Policy", batch: Batch, prepared: Noised, j: int) -> Loss:
        at = prepared[j]
        conditioning, guidance = batch.trajectory.conditioning, self.settings.train_guidance
        velocity = policy.velocity(at.x_t, at.timesteps, conditioning, guidance=guidance)
        if "old" in self.fixed and at.old is None:
            at = replace(at, old=velocity.detach())
        policy_loss, columns = self.objective(velocity, at, batch)
        norm = root_mean_square(velocity)
        columns = {"policy_loss": policy_loss, "velocity_norm": norm, **columns}
        loss = Loss(policy_loss, columns)
        if at.reference is None:
            return loss
        kl = self.kl(policy.dynamics, velocity, at)
        return self.hold(loss, batch, velocity=velocity, reference=at.reference, kl=kl)

    def kl(self, dynamics: Dynamics, velocity: Tensor, at: Noised) -> Tensor:
        """To the reference, (B,)."""
        difference, kind = velocity - at.reference, self.settings.kl_type
        if kind == "velocity":
            return mean_square(difference)
        # The mean of a step is linear in the velocity: from 0 and along the difference of the
        # velocities a step leads to the difference of the means, without rounding of what cancels.
        zero = torch.zeros_like(difference)
        step = take_step(dynamics, at.steps, zero, difference, stochastic=True, next_latents=zero)
        return kl_to_reference(
            kind,
            mean=step.mean,
            reference_mean=zero,
            std=step.std,
            rate=step.rate,
            velocity=velocity,
            reference_velocity=at.reference,
        )


def noise(
    schedule: Schedule, x0: Tensor, steps: np.ndarray, generators: list[torch.Generator]
) -> Noised:
    """Samples `x0` (B, C, H, W) at the noise levels of the steps (B, T), one generator for each."""
    e = draw_noise(generators, steps.shape[1], x0)
    sigmas, timesteps = (
        send(torch.tensor(values)[torch.from_numpy(steps)], x0.device)
        for values in (schedule.sigmas, schedule.timesteps)
    )
    t = sigmas.to(x0.dtype).reshape(*steps.shape, *[1] * (x0.ndim - 1))
    x0 = x0[:, None]
    return Noised(steps, t, timesteps, (1 - t) * x0 + t * e, e - x0)


def stratified(rng: np.random.Generator, steps: int, count: int) -> np.ndarray:
    """Pick `count` different steps, one from each of `count` equal parts, all by one random offset:
    every step is equally likely, and two never meet."""
    return (np.arange(count) * steps + rng.integers(steps)) // count


def decay_at(updates: int, *, rate: float, start: int, most: float) -> float:
    """How much of the old weights stays after an epoch: 0 until `start` updates of the others, then
    growing by `rate` with each, up to `most`."""
    return float(np.clip(rate * (updates - start), 0.0, most))
