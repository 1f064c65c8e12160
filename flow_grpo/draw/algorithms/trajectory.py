"""What algorithms share that train the noisy steps of sampled trajectories by their
log-probabilities."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from flow_grpo.config.settings import setting
from flow_grpo.draw.algorithms.base import Algorithm, Batch, Loss, Setup, trajectory_steps
from flow_grpo.draw.rollout import Trajectory, take_step
from flow_grpo.losses import KL, KLS, kl_to_reference, root_mean_square
from flow_grpo.sde import Step

if TYPE_CHECKING:
    from flow_grpo.draw.policy import FixedWeights, Policy

StepWeight = Literal["none", "guard", "tempflow"]
TEMPFLOW = 2.25  # TempFlow-GRPO's constant for SD3


@dataclass(frozen=True)
class TrajectorySettings:
    beta: float = setting(
        0.04,
        "Weight of the KL to the model as training began. 0 saves its forward pass; rewards that "
        "can be hacked need some.",
        at_least=0,
    )
    kl_type: KL = setting(
        "flow_grpo",
        "How the KL is measured: flow_grpo leaves dt out, gaussian is exact, velocity is the mean "
        "squared difference of velocities.",
        choices=KLS,
    )
    kl_target: float = setting(
        0.0,
        "Where set, and once the KL has reached this value: its weight is doubled or halved after "
        "an epoch in which the KL was more than 1.5 times this value, or less than 1/1.5 of it.",
        at_least=0,
    )
    adv_clip_max: float = setting(
        5.0,
        "Advantages beyond +-this are cut: one lucky sample should not decide an update.",
        above=0,
    )
    ratio: Literal["step", "trajectory"] = setting(
        "step",
        "Compare single steps with the policy that sampled, or all of them together: then a clip "
        "holds a sample back as a whole, and the ratio is the product of those of its steps. It "
        "takes one more forward pass for each.",
        choices=("step", "trajectory"),
    )
    step_weight: StepWeight = setting(
        "none",
        "What the loss of a step is multiplied by: guard 1/(-dt), tempflow 2.25 times the scale "
        "of its noise.",
        choices=("none", "guard", "tempflow"),
    )


@dataclass(frozen=True)
class Prepared:
    reference: Tensor | None  # velocities of the reference, (B, steps, C, H, W)
    log_ratio: Tensor | None = None  # (B,), of whole trajectories


@dataclass(frozen=True)
class Taken:
    """A noisy step, taken again with the weights as they are."""

    step: Step
    log_ratio: Tensor  # (B,) to the policy that sampled; of all steps, where asked for
    old_mean: Tensor | None  # like step.mean, where the algorithm keeps them
    credit: Tensor  # (B,), cut at adv_clip_max
    dt: float


class TrajectoryAlgorithm(Algorithm):
    """Base of the methods that train the noisy steps of a rollout; a subclass has a `surrogate`."""

    holds = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {"loss", "surrogate", "policy_loss", "hold", "_weight"}
        if not own.isdisjoint(vars(cls)):  # what its base says is not of these
            cls.linear_in_credit = vars(cls).get("linear_in_credit", False)

    def __init__(self, settings: TrajectorySettings, setup: Setup) -> None:
        super().__init__(settings, setup)
        self.kl_weight = settings.beta
        self.losses_per_sample = len(self.noisy_steps(np.random.default_rng(0), 0))

    def check(self) -> None:
        super().check()
        if self.settings.ratio == "trajectory" and self.keeps_means:
            raise ValueError(
                f"{self.name}.ratio='trajectory' does not go with algorithm={self.name!r}, which "
                "measures how far single steps have moved; use 'step'"
            )

    def noisy_steps(self, rng: np.random.Generator, epoch: int) -> range:
        return trajectory_steps(self.setup, rng)

    def has_gradient(self, credit: Tensor) -> Tensor:
        return super().has_gradient(credit) if self.is_held else credit != 0

    def surrogate(self, taken: Taken) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss (B,) of a step before its weight, and what to log of it."""
        raise NotImplementedError

    def prepare(self, policy: "Policy", batch: Batch) -> Prepared:
        trajectory = batch.trajectory
        steps = np.tile(trajectory.steps, (len(batch), 1))

        def velocities(which: "FixedWeights") -> Tensor:
            states = trajectory.latents[:, :-1]
            return policy.fixed_velocities(which, states, steps, trajectory.conditioning)

        reference = velocities("reference") if self.needs_reference else None
        if self.settings.ratio == "step":
            return Prepared(reference)
        return Prepared(reference, log_ratios(policy, trajectory, velocities("current")))

    def loss(self, policy: "Policy", batch: Batch, prepared: Prepared, j: int) -> Loss:
        trajectory = batch.trajectory
        i = trajectory.steps[j]
        state, landed = trajectory.latents[:, j], trajectory.latents[:, j + 1]
        step, velocity = policy.step(i, state, landed, trajectory.conditioning)
        log_ratio = step.log_prob - trajectory.log_probs[:, j]
        if prepared.log_ratio is not None:  # its value, and the gradient of this step's part
            log_ratio = prepared.log_ratio + log_ratio - log_ratio.detach()
        taken = Taken(
            step,
            log_ratio,
            old_mean=None if trajectory.means is None else trajectory.means[:, j],
            credit=self.cut(batch.credit),
            dt=policy.dynamics.schedule.dt(i),
        )
        loss = self.policy_loss(taken, velocity)
        if prepared.reference is None:
            return loss
        reference = prepared.reference[:, j]
        kl = kl_of_step(self.settings.kl_type, policy, i, state, (step, velocity), reference)
        return self.hold(loss, batch, velocity=velocity, reference=reference, kl=kl)

    def cut(self, credit: Tensor) -> Tensor:
        return credit.clamp(-self.settings.adv_clip_max, self.settings.adv_clip_max)

    def policy_loss(self, taken: Taken, velocity: Tensor) -> Loss:
        """The loss of a step along `velocity`, without the KL and the anchors."""
        loss, columns = self.surrogate(taken)
        loss = loss * self._weight(taken)
        half_square = 0.5 * taken.log_ratio.detach() ** 2
        columns = {"policy_loss": loss, "approx_kl": half_square, **columns}
        columns["velocity_norm"] = root_mean_square(velocity)
        return Loss(loss, columns)

    def _weight(self, taken: Taken) -> float | Tensor:
        if self.settings.step_weight == "guard":
            return -1 / taken.dt
        if self.settings.step_weight == "tempflow":
            return TEMPFLOW * taken.step.std.flatten()
        return 1.0


def kl_of_step(
    kind: KL, policy: "Policy", i: int, state: Tensor, taken: tuple[Step, Tensor], other: Tensor
) -> Tensor:
    """From step i of `state`, with its velocity, to that along the velocity `other`, (B,)."""
    step, velocity = taken
    there = take_step(
        policy.dynamics, i, state, other, stochastic=True, next_latents=step.next_sample
    )
    return kl_to_reference(
        kind,
        mean=step.mean,
        reference_mean=there.mean,
        std=step.std,
        rate=step.rate,
        velocity=velocity,
        reference_velocity=other,
    )


def log_ratios(policy: "Policy", trajectory: Trajectory, velocities: Tensor) -> Tensor:
    """Whole trajectories against the policy that sampled them, (B,); `velocities` are today's."""
    total = torch.zeros_like(trajectory.log_probs[:, 0])
    for j, i in enumerate(trajectory.steps):
        state, landed = trajectory.latents[:, j], trajectory.latents[:, j + 1]
        step = take_step(
            policy.dynamics, i, state, velocities[:, j], stochastic=True, next_latents=landed
        )
        total = total + step.log_prob - trajectory.log_probs[:, j]
    return total
