"""What the loop asks of an algorithm. A new one is a new file in this folder; see
docs/algorithms.md, "How to add a method"."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flow_grpo.advantages import Estimator, Scale
from flow_grpo.config.settings import section
from flow_grpo.draw.algorithms.anchors import Anchors
from flow_grpo.draw.fields import DrawAnchors
from flow_grpo.draw.rollout import Trajectory
from flow_grpo.losses import adapted_weight
from flow_grpo.run.metrics import Loss, Scored
from flow_grpo.windows import stochastic_steps

if TYPE_CHECKING:
    from flow_grpo.draw.policy import Policy

ALGORITHMS: dict[str, type["Algorithm"]] = {}


@dataclass(frozen=True)
class Setup:
    """What an algorithm may know of the rest of the config."""

    num_steps: int = 10
    sde_type: str = "flow"
    window_size: int = 0
    window_range: tuple[int, int] = (0, 5)
    timestep_fraction: float = 1.0
    estimator: Estimator = "grpo"
    scale: Scale = "batch"
    group_size: int = 16
    # of one update, on one process
    update_samples: int = 16
    anchors: DrawAnchors = section(DrawAnchors)
    tasks: tuple[str, ...] = ("all",)  # the names of the prompt sets


@dataclass(frozen=True)
class Batch:
    """Samples that are trained together."""

    trajectory: Trajectory
    credit: Tensor  # (B,), on the host until it is trained
    index: np.ndarray  # (B,) of each sample within the epoch
    group: np.ndarray  # (B,)
    seed: tuple[int, ...] = (0,)  # of the run, epoch and pass: new noise follows from it
    tasks: np.ndarray | None = None  # (B,), the prompt set of each sample

    def __len__(self) -> int:
        return len(self.credit)

    def __getitem__(self, part: slice | np.ndarray) -> "Batch":
        rows = part
        if isinstance(part, np.ndarray):
            rows = torch.from_numpy(part)
        return replace(
            self,
            trajectory=self.trajectory[rows],
            credit=self.credit[rows],
            index=self.index[part],
            group=self.group[part],
            tasks=None if self.tasks is None else self.tasks[part],
        )

    def by_group(self) -> list[np.ndarray]:
        """The rows of each group."""
        return [np.flatnonzero(self.group == g) for g in dict.fromkeys(self.group.tolist())]

    @staticmethod
    def join(parts: "Sequence[Batch]") -> "Batch":
        return replace(
            parts[0],
            trajectory=Trajectory.join([p.trajectory for p in parts]),
            credit=torch.cat([p.credit for p in parts]),
            index=np.concatenate([p.index for p in parts]),
            group=np.concatenate([p.group for p in parts]),
            tasks=None if parts[0].tasks is None else np.concatenate([p.tasks for p in parts]),
        )


class Algorithm:
    """Base of all methods. By default a method samples without noise, takes advantages for credit
    and trains every sample."""

    name: ClassVar[str] = ""  # of the config section, and what --config.algorithm takes
    Settings: ClassVar[type]
    # A copy of the weights is kept, saved and resumed: `policy.old`.
    keeps_old: ClassVar[bool] = False
    # The loss uses `policy.old` as the behaviour policy. With `sample.async_depth=1` the behaviour
    # policy is one epoch older, and its snapshot is used instead: `policy.behaviour`.
    old_is_behaviour: ClassVar[bool] = False
    # An update's samples on each process are whole groups.
    whole_groups: ClassVar[bool] = False
    keeps_means: ClassVar[bool] = False  # of the steps that were sampled
    own_credit: ClassVar[bool] = False  # in place of train.advantage
    holds: ClassVar[bool] = False  # its losses go through `hold`, where there is a reference
    # Where the weights are those that sampled: the gradient is the credit times that of a credit of
    # 1, and so is the loss; what is logged beside them does not depend on it.
    linear_in_credit: ClassVar[bool] = False
    # LoRA folders by the fields that name them: `policy.loras` has their weights.
    loras: Mapping[str, str] = {}
    start: Sequence[str] = ()  # those of them whose mean the run begins with
    # Trajectories have all their states, and the gradient of the reward at their end.
    needs_reward_gradient: ClassVar[bool] = False
    losses_per_sample: int = 1
    kl_weight: float = 0.0  # as it is now, where `kl_target` moves it
    most_guidance: float = 0.0  # of the scales that it asks for, beside that of the rollout
    most_kl: float = 0.0  # of all epochs so far

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            ALGORITHMS[cls.name] = cls

    def __init__(self, settings: Any, setup: Setup) -> None:
        self.settings, self.setup = settings, setup
        self.anchors = Anchors(setup.anchors)

    def check(self) -> None:
        """Raise a ValueError of one line for settings that do not go together."""
        setup, target = self.setup, getattr(self.settings, "kl_target", 0.0)
        if self.whole_groups and setup.group_size < 2:
            raise ValueError(
                f"sample.num_image_per_prompt={setup.group_size} must be at least 2 for algorithm="
                f"{self.name!r}, which compares the samples of a group"
            )
        if self.own_credit and setup.estimator != "grpo":
            raise ValueError(
                f"train.advantage={setup.estimator!r} does not go with algorithm={self.name!r}, "
                "which gives credit in a way of its own; leave it at 'grpo'"
            )
        if target and not self.kl_weight:
            raise ValueError(
                f"{self.name}.kl_target={target} needs a KL to move: set its weight above 0"
            )
        reference = self.needs_reference
        self.anchors.check(self.name, self.kl_weight, holds=self.holds, has_reference=reference)

    @property
    def is_held(self) -> bool:
        """Whether the KL or a guard gives samples without credit a gradient."""
        return self.kl_weight > 0 or self.setup.anchors.norm_guard > 0

    @property
    def needs_reference(self) -> bool:
        return self.is_held

    def noisy_steps(self, rng: np.random.Generator, epoch: int) -> range:
        """The steps of the schedule that add noise in this epoch; the others are ode."""
        return range(0)

    def credit(self, scored: Scored) -> np.ndarray:
        """Turn rewards into one number per sample, (N,): by default the advantage. 0 where there is
        no score."""
        return scored.advantages(self.setup.estimator, self.setup.scale)

    @property
    def trained_samples(self) -> int:
        """How many samples one update trains on one process."""
        return self.setup.update_samples

    def batches(self, update: list[Batch], size: int) -> list[Batch]:
        """What to train of an update: `trained_samples` in `batch_count(size)` batches."""
        return update

    def batch_count(self, size: int) -> int:
        return math.ceil(self.trained_samples / size)

    @property
    def trust(self) -> float | None:
        """How far a ratio may be from 1 until a clip acts, where there is one."""
        return None

    def has_gradient(self, credit: Tensor) -> Tensor:
        """(B,) bool: False where the loss of a sample is 0 whatever the weights are."""
        return torch.ones_like(credit, dtype=torch.bool)

    def prepared(self, policy: "Policy", batches: list[Batch]) -> Iterator[tuple[Batch, Any]]:
        """Each batch of an update, with what its losses need that has no gradient."""
        for batch in batches:
            yield batch, self.prepare(policy, batch)

    def prepare(self, policy: "Policy", batch: Batch) -> Any:
        """Compute what the losses of a batch need without gradients, such as the reference's
        velocities; `loss` gets it."""
        return None

    def loss(self, policy: "Policy", batch: Batch, prepared: Any, j: int) -> Loss:
        """The loss of each sample's j-th trained step or noise level, j below
        `losses_per_sample`."""
        raise NotImplementedError

    def hold(self, loss: Loss, batch: Batch, **at: Tensor) -> Loss:
        """The loss with the KL and the anchors at a velocity of the batch: see `Anchors.hold`."""
        return self.anchors.hold(loss, batch.index, kl_weight=self.kl_weight, **at)

    def after_epoch(self, policy: "Policy", updates: int) -> None:
        """Called once an epoch was trained, for instance to move the old weights; `updates` counts
        those of the whole run."""

    def samples_with_old(self, updates: int) -> bool:
        """Whether `policy.old` samples an epoch before which there were so many updates."""
        return False

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the weight of the KL towards `kl_target`, from when it was reached: at first the KL
        is 0, whatever its weight. What to log of it."""
        target = getattr(self.settings, "kl_target", 0.0)
        if not target:
            return {}
        used, kl = self.kl_weight, metrics.get("train/kl", math.nan)
        if not math.isfinite(kl):  # every update was skipped
            return {"train/kl_weight": used}
        self.most_kl = max(self.most_kl, kl)
        if self.most_kl >= target:
            self.kl_weight = adapted_weight(used, kl, target)
        return {"train/kl_weight": used}

    def state_dict(self) -> dict[str, float]:
        """What is not in the weights, to resume from."""
        kl = {"kl_weight": self.kl_weight, "most_kl": self.most_kl}
        return kl | self.anchors.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.anchors.load_state_dict(state)
        if getattr(self.settings, "kl_target", 0.0):
            self.kl_weight = state.get("kl_weight", self.kl_weight)
            self.most_kl = state.get("most_kl", 0.0)


def with_gradient(
    algorithm: Algorithm, batches: list[Batch], *, batch: bool, sample: bool
) -> list[Batch]:
    """Without whole batches that have no gradient, and without single samples, where these may be
    left out. One batch is always kept, so that every process has its part in every update."""
    trained = [b for b in batches if algorithm.has_gradient(b.credit).any()] or batches[-1:]
    kept = trained if batch else batches
    return [_with_gradient(algorithm, b) for b in kept] if sample else kept


def _with_gradient(algorithm: Algorithm, batch: Batch) -> Batch:
    rows = algorithm.has_gradient(batch.credit).nonzero().squeeze(1).numpy()
    if len(rows) == len(batch):
        return batch
    return batch[rows] if len(rows) else batch[:2]  # a pair, for algorithms that compare two


def trajectory_steps(setup: Setup, rng: np.random.Generator) -> range:
    """The noisy steps of a rollout that a method trains, as the settings choose them."""
    return stochastic_steps(
        setup.num_steps,
        window_size=setup.window_size,
        window_range=setup.window_range,
        timestep_fraction=setup.timestep_fraction,
        rng=rng,
    )
