"""Interface of an algorithm to the training loop; see docs/methods/custom.md to add one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from flow_grpo.advantages import Estimator, Scale
from flow_grpo.config.settings import section
from flow_grpo.diffusion.algorithms.anchors import Anchors
from flow_grpo.diffusion.algorithms.settings import AnchorConfig
from flow_grpo.diffusion.rollout import Trajectory
from flow_grpo.errors import UserError
from flow_grpo.losses import adapt_kl_weight
from flow_grpo.training.metrics import Loss, ScoredSamples
from flow_grpo.windows import stochastic_steps

if TYPE_CHECKING:
    from flow_grpo.diffusion.policy import Policy


# Kind of the rows of `preferences` that a method trains on.
GivenKind = Literal["", "pairs", "rated", "demonstrations"]
NoiseDensity = Literal["", "logit_normal", "uniform"]


@dataclass(frozen=True)
class Setup:
    """Parts of the config outside the algorithm's own section that it may read."""

    num_steps: int = 10
    sde_type: str = "flow"
    window_size: int = 0
    window_range: tuple[int, int] = (0, 5)
    timestep_fraction: float = 1.0
    estimator: Estimator = "grpo"
    scale: Scale = "batch"
    group_size: int = 16
    update_samples: int = 16  # per update and process
    anchors: AnchorConfig = section(AnchorConfig)
    tasks: tuple[str, ...] = ("all",)  # names of the prompt sets
    given_samples: int = 0  # images of `preferences` per update and process, besides the samples
    density: NoiseDensity = ""  # of the noise levels; "": evenly over those of the schedule


@dataclass(frozen=True)
class Batch:
    """A micro-batch of samples to train on."""

    trajectory: Trajectory
    credit: Tensor  # (B,), on the CPU until it is trained
    index: np.ndarray  # (B,), position of each sample in the epoch
    group: np.ndarray  # (B,), group id of each sample
    seed: tuple[int, ...] = (0,)  # run, epoch and pass: seeds the noise of training
    tasks: np.ndarray | None = None  # (B,), prompt set of each sample

    def __len__(self) -> int:
        return len(self.credit)

    def __getitem__(self, part: slice | np.ndarray) -> "Batch":
        """Return the samples with these row numbers of the batch."""
        rows = torch.from_numpy(part) if isinstance(part, np.ndarray) else part
        return replace(
            self,
            trajectory=self.trajectory[rows],
            credit=self.credit[rows],
            index=self.index[part],
            group=self.group[part],
            tasks=None if self.tasks is None else self.tasks[part],
        )

    def rows_by_group(self) -> list[np.ndarray]:
        """Return the row indices of each group, in order of first appearance."""
        return [np.flatnonzero(self.group == g) for g in dict.fromkeys(self.group.tolist())]

    @staticmethod
    def concat(parts: "Sequence[Batch]") -> "Batch":
        """Concatenate batches; raise ValueError if their trajectories have different steps."""
        return replace(
            parts[0],
            trajectory=Trajectory.join([p.trajectory for p in parts]),
            credit=torch.cat([p.credit for p in parts]),
            index=np.concatenate([p.index for p in parts]),
            group=np.concatenate([p.group for p in parts]),
            tasks=None if parts[0].tasks is None else np.concatenate([p.tasks for p in parts]),
        )


class Algorithm:
    """Base class of all algorithms.

    By default an algorithm samples with the ODE, uses advantages as credit and trains every sample.
    Built-in algorithms are listed in `ALGORITHMS` under their `name`.
    """

    name: ClassVar[str] = ""  # value of `algorithm` and name of its config section
    Settings: ClassVar[type]  # dataclass of `setting`s, its config section
    # Keep, save and resume a copy of the weights, `policy.old`.
    keeps_old_policy: ClassVar[bool] = False
    # The loss uses `policy.old` as the behaviour policy. With `sample.async_depth=1` the behaviour
    # policy is one epoch older, and its snapshot is used instead: `policy.behaviour`.
    old_is_behaviour: ClassVar[bool] = False
    needs_whole_groups: ClassVar[bool] = False  # no group is split between ranks or updates
    records_step_means: ClassVar[bool] = False  # trajectories keep the means of noisy steps
    overrides_credit: ClassVar[bool] = False  # `credit` ignores train.advantage
    # Where the credit is 0 the loss is 0, apart from the KL and the anchors.
    zero_loss_without_credit: ClassVar[bool] = False
    applies_anchors: ClassVar[bool] = False  # the loss calls `add_regularization`
    # On-policy, the loss and its gradient are linear in the credit, and what is logged does not
    # depend on it. Required by train.keep_gradients.
    linear_in_credit: ClassVar[bool] = False
    loras: Mapping[str, str] = {}  # LoRA directory by config field; loaded into `policy.loras`
    initial_loras: Sequence[str] = ()  # those of them whose average initialises the policy
    # Trajectories keep all their states and the gradient of the reward at the final latents.
    needs_reward_gradient: ClassVar[bool] = False
    losses_per_sample: int = 1
    # Given images that it can train on instead of samples, see `flow_grpo.diffusion.given_images`.
    given: ClassVar[GivenKind] = ""
    kl_setting: ClassVar[str] = ""  # name of the setting with the initial KL weight, if any
    kl_weight: float = 0.0  # current weight; `kl_target` adapts it
    max_guidance: float = 0.0  # largest guidance scale used besides that of the rollout
    most_kl: float = 0.0  # largest KL of an epoch so far

    def __init__(self, settings: Any, setup: Setup) -> None:
        self.settings, self.setup = settings, setup
        self.anchors = Anchors(setup.anchors)

    def check(self) -> None:
        """Raise a UserError for incompatible settings; a ValueError is reported the same way."""
        setup, target = self.setup, getattr(self.settings, "kl_target", 0.0)
        if self.needs_whole_groups and setup.update_samples and setup.group_size < 2:
            raise UserError(
                f"must be at least 2 for algorithm={self.name!r}, which compares within groups",
                field="sample.num_image_per_prompt",
                value=setup.group_size,
            )
        if self.overrides_credit and setup.estimator != "grpo":
            raise UserError(
                f"is incompatible with algorithm={self.name!r}, which computes its own credit",
                field="train.advantage",
                value=setup.estimator,
                hint="reset it to 'grpo'",
            )
        kl_field = f"{self.name}.{self.kl_setting}" if self.kl_setting else ""
        if target and not self.kl_weight:
            raise UserError(
                "has no effect with a KL weight of 0",
                field=f"{self.name}.kl_target",
                value=target,
                hint=f"set its initial value {kl_field or '`kl_weight`'} above 0",
            )
        self.anchors.check(
            self.name,
            self.kl_weight,
            kl_field=kl_field,
            applies_anchors=self.applies_anchors,
            has_reference=self.needs_reference,
        )

    @property
    def is_regularized(self) -> bool:
        """Whether the KL or the norm guard gives samples without credit a gradient."""
        return self.kl_weight > 0 or self.setup.anchors.norm_guard > 0

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` evaluates the reference policy."""
        return self.is_regularized

    def noisy_steps(self, rng: np.random.Generator, epoch: int) -> range:
        """Return the steps of the schedule that add noise in this epoch; others are ODE steps."""
        return range(0)

    def credit(self, scored: ScoredSamples) -> np.ndarray:
        """Return the weight of each sample of an epoch, (N,): by default its advantage.

        Args:
            scored: Rewards of all samples of the epoch, on all ranks.
        """
        return scored.advantages(self.setup.estimator, self.setup.scale)

    @property
    def trained_samples(self) -> int:
        """Number of samples that one update trains on one process, including given images."""
        return self.setup.update_samples + self.setup.given_samples

    @property
    def given_share(self) -> float:
        """Fraction of the trained samples that come from `preferences`."""
        return self.setup.given_samples / self.trained_samples

    def batches(self, update: list[Batch], size: int) -> list[Batch]:
        """Return the micro-batches to train in an update, by default those of the rollout.

        There must be `batch_count(size)` of them with `trained_samples` in all.

        Args:
            update: All batches of the update, as they were sampled.
            size: Maximum number of samples per batch.
        """
        return update

    def batch_count(self, size: int) -> int:
        """Return how many batches of at most `size` samples an update has on one process."""
        return math.ceil(self.trained_samples / size)

    @property
    def trust_radius(self) -> float | None:
        """Distance of the ratio from 1 at which it is clipped; None without a clip."""
        return None

    def has_gradient(self, credit: Tensor) -> Tensor:
        """Return which samples can have a nonzero loss, given their credit, (B,) bool."""
        if self.zero_loss_without_credit and not self.is_regularized:
            return credit != 0
        return torch.ones_like(credit, dtype=torch.bool)

    def clip_credit(self, credit: Tensor) -> Tensor:
        """Clamp credit to +-adv_clip_max, a setting of most algorithms."""
        return credit.clamp(-self.settings.adv_clip_max, self.settings.adv_clip_max)

    def iter_prepared(self, policy: "Policy", batches: list[Batch]) -> Iterator[tuple[Batch, Any]]:
        """Yield each batch of an update with the result of `prepare`."""
        for batch in batches:
            yield batch, self.prepare(policy, batch)

    def prepare(self, policy: "Policy", batch: Batch) -> Any:
        """Compute without gradients what `loss` needs, such as velocities of the reference."""
        return None

    def loss(self, policy: "Policy", batch: Batch, prepared: Any, j: int) -> Loss:
        """Compute the loss of one trained step or noise level.

        Args:
            policy: The model with its trained, reference and old weights.
            batch: Samples to train, B of them.
            prepared: What `prepare` returned for the batch.
            j: Index of the step or noise level, below `losses_per_sample`.

        Returns:
            Loss per sample and columns to log, (B,) each.
        """
        raise NotImplementedError

    def add_regularization(self, loss: Loss, batch: Batch, **at: Tensor) -> Loss:
        """Add the KL and the anchors to a loss; see `Anchors.add_regularization`."""
        return self.anchors.add_regularization(loss, batch.index, kl_weight=self.kl_weight, **at)

    def after_epoch(self, policy: "Policy", updates: int) -> None:
        """Update what changes once per epoch, such as the old policy.

        Args:
            policy: The model with its trained, reference and old weights.
            updates: Optimizer updates since the start of the run.
        """

    def samples_with_old_policy(self, updates: int) -> bool:
        """Return whether `policy.old` samples an epoch that starts after this many updates."""
        return False

    def update_kl_weight(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the weight of the KL to `kl_target` after an epoch.

        Adaptation starts once the KL has reached the target: it is 0 at the start of every run,
        whatever the weight.

        Returns:
            The weight that the epoch used, to log.
        """
        target = getattr(self.settings, "kl_target", 0.0)
        if not target:
            return {}
        used, kl = self.kl_weight, metrics.get("train/kl", math.nan)
        if not math.isfinite(kl):  # all updates were skipped
            return {"train/kl_weight": used}
        self.most_kl = max(self.most_kl, kl)
        if self.most_kl >= target:
            self.kl_weight = adapt_kl_weight(used, kl, target)
        return {"train/kl_weight": used}

    def state_dict(self) -> dict[str, float]:
        """Return the state besides the weights that a resumed run needs."""
        kl = {"kl_weight": self.kl_weight, "most_kl": self.most_kl}
        return kl | self.anchors.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the anchors' state and the adapted KL weight."""
        self.anchors.load_state_dict(state)
        if getattr(self.settings, "kl_target", 0.0):
            self.kl_weight = state.get("kl_weight", self.kl_weight)
            self.most_kl = state.get("most_kl", 0.0)


def drop_zero_gradient(
    algorithm: Algorithm, batches: list[Batch], *, batch: bool, sample: bool
) -> list[Batch]:
    """Drop batches and samples whose loss is 0.

    At least one batch is kept, so that every rank takes part in every update.

    Args:
        algorithm: Decides which samples have a gradient.
        batches: Batches of one update.
        batch: Whether whole batches may be dropped.
        sample: Whether single samples may be dropped.
    """
    trained = [b for b in batches if algorithm.has_gradient(b.credit).any()] or batches[-1:]
    kept = trained if batch else batches
    return [_drop_zero_gradient_samples(algorithm, b) for b in kept] if sample else kept


def _drop_zero_gradient_samples(algorithm: Algorithm, batch: Batch) -> Batch:
    """Return the samples of a batch that have a gradient, or its first two if none has."""
    rows = algorithm.has_gradient(batch.credit).nonzero().squeeze(1).numpy()
    if len(rows) == len(batch):
        return batch
    return batch[rows] if len(rows) else batch[:2]  # two, for algorithms that compare pairs


def select_sde_steps(setup: Setup, rng: np.random.Generator) -> range:
    """Return the steps of the schedule that add noise, as the settings select them.

    Args:
        setup: Settings of the window, or of the trained fraction of steps.
        rng: Source of the start of a random window.
    """
    return stochastic_steps(
        setup.num_steps,
        window_size=setup.window_size,
        window_range=setup.window_range,
        timestep_fraction=setup.timestep_fraction,
        rng=rng,
    )
