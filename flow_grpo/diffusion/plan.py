"""Batch arithmetic of an epoch, checked before anything is loaded and logged at the start."""

import math
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

import numpy as np

from flow_grpo.diffusion.fields import DiffusionSampleConfig, DiffusionTrainConfig
from flow_grpo.errors import UserError
from flow_grpo.training.plan import Plan, suggest_divisor, suggest_multiple
from flow_grpo.windows import stochastic_steps


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most` (and at least 1)."""
    return next(n for n in range(max(1, min(number, most)), 0, -1) if number % n == 0)


def _config_field(config_name: str) -> Field:
    return field(metadata={"config": config_name})


@dataclass(frozen=True)
class BatchPlan(Plan):
    """Numbers of samples, groups, batches and updates per epoch."""

    num_processes: int  # with context parallelism: groups of processes
    sample_batch_size: int = _config_field("sample.train_batch_size")  # per process
    batches_per_epoch: int = _config_field("sample.num_batches_per_epoch")  # per process
    group_size: int = _config_field("sample.num_image_per_prompt")
    train_batch_size: int = _config_field("train.batch_size")  # per process
    # micro-batches per update, each over all its trained steps
    accumulation_steps: int = _config_field("train.gradient_accumulation_steps")
    inner_epochs: int = _config_field("train.num_inner_epochs")
    trained_steps: int = 1  # denoising steps trained per sample
    exploration_factor: int = 1  # samples explored per sample trained
    given_rows: int = 0  # pairs or images of `preferences` per update and process
    images_per_row: int = 1  # 2 for pairs
    context_parallel: int = 1  # processes that compute each sample together
    tokens: int = 0  # of a sample, without its prompt; 0 if unknown

    def __post_init__(self) -> None:
        """Raise a UserError for numbers below 1 or that do not divide each other as needed."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value < (each.name not in ("given_rows", "tokens")):
                name = each.metadata.get("config", each.name)
                raise UserError("must be at least 1", field=name, value=value)
        if self.samples % self.group_size:
            raise UserError(
                f"{self.samples} samples per epoch = sample.train_batch_size="
                f"{self.sample_batch_size} x sample.num_batches_per_epoch={self.batches_per_epoch}"
                f" x {self.processes} do not divide into groups of "
                f"{self.group_size_setting}; {self._suggest_division()}"
            )
        if self.sample_batch_size % self.train_batch_size:
            raise UserError(
                f"does not divide sample.train_batch_size={self.sample_batch_size}: training "
                "slices the sampling batches",
                field="train.batch_size",
                value=self.train_batch_size,
                hint="use a divisor; equal sizes are best",
            )
        if self.micro_batches % self.accumulation_steps:
            raise UserError(
                f"does not divide the {self.micro_batches} micro-batches per epoch and process, so "
                "some gradients would be unused",
                field="train.gradient_accumulation_steps",
                value=self.accumulation_steps,
                hint="use a divisor",
            )

    def _suggest_division(self) -> str:
        """Return the numbers of processes and the group sizes that divide the samples."""
        own = self.sample_batch_size * self.batches_per_epoch
        unit = self.group_size // math.gcd(self.group_size, own)
        hint = suggest_multiple(unit, self.num_processes, "processes")
        if self.exploration_factor > 1:
            return hint
        return f"{hint}, or {suggest_divisor(self.samples, self.group_size, 'images per prompt')}"

    @property
    def group_size_setting(self) -> str:
        """Return the setting that determines the group size as NAME=VALUE, for messages."""
        return _group_size_setting(self.group_size, from_selection=self.exploration_factor > 1)

    @property
    def samples(self) -> int:
        """Samples per epoch, over all processes."""
        return self.sample_batch_size * self.batches_per_epoch * self.num_processes

    @property
    def given_samples_per_epoch(self) -> int:
        """Images of `preferences` per epoch, over all processes."""
        per_update = self.given_rows * self.images_per_row * self.num_processes
        return per_update * self.updates_per_pass

    @property
    def groups(self) -> int:
        """Groups (distinct prompts) per epoch, over all processes."""
        return self.samples // self.group_size

    @property
    def micro_batches(self) -> int:
        """Training micro-batches per pass and process."""
        return self.sample_batch_size // self.train_batch_size * self.batches_per_epoch

    @property
    def samples_per_update(self) -> int:
        """Samples of an update on each process."""
        return self.train_batch_size * self.accumulation_steps

    @property
    def updates_per_pass(self) -> int:
        """Optimizer updates per pass over the samples of an epoch."""
        return self.micro_batches // self.accumulation_steps

    def with_smaller_batches(self) -> "BatchPlan | None":
        """Return a plan of the same epoch and updates with the next smaller batch size.

        None if batches are of one sample already.
        """
        train_size = self.train_batch_size
        if train_size == 1:
            return None
        size = largest_divisor(train_size, train_size - 1)
        return replace(
            self,
            sample_batch_size=size,
            batches_per_epoch=self.sample_batch_size * self.batches_per_epoch // size,
            train_batch_size=size,
            accumulation_steps=train_size * self.accumulation_steps // size,
        )

    def overrides_for(self, other: "BatchPlan") -> str:
        """Return the command-line overrides that turn this plan into `other`."""
        changed = [f for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        return " ".join(
            f"--config.{f.metadata['config']}={getattr(other, f.name)}" for f in changed
        )

    def check_whole_groups(self, algorithm: str) -> None:
        """Raise a UserError unless each update has whole groups on each process."""
        if self.samples_per_update % self.group_size:
            raise UserError(
                f"compares samples within groups of {self.group_size_setting}, but an update has "
                f"{self.samples_per_update} samples per process = {self._update_setting}",
                field="algorithm",
                value=algorithm,
                hint="make them a multiple of the group size",
            )

    def check_groupwise_reward(self, reward: str) -> None:
        """Raise a UserError unless a reward that compares the images of a group gets whole groups.

        It scores one sampling batch at a time.
        """
        setting = f"sample.num_image_per_prompt={self.group_size}"
        if self.sample_batch_size % self.group_size:
            raise UserError(
                f"must be a multiple of {setting} for reward {reward!r}, which compares the images "
                "of a group",
                field="sample.train_batch_size",
                value=self.sample_batch_size,
            )
        if self.num_processes > 1 and self.samples_per_update % self.group_size:
            raise UserError(
                f"reward {reward!r} compares the images of a group, so an update's "
                f"{self.samples_per_update} samples per process = {self._update_setting} must be a "
                f"multiple of {setting}"
            )

    @property
    def _update_setting(self) -> str:
        """Return the settings that determine the samples per update, for messages."""
        return (
            f"train.batch_size={self.train_batch_size} x "
            f"train.gradient_accumulation_steps={self.accumulation_steps}"
        )

    def check_prompt_count(self, rows: int, source: str) -> None:
        """Raise a UserError if there are fewer prompts (`rows`) than groups in an epoch."""
        if rows < self.groups:
            raise UserError(
                f"has {rows} training prompts, but an epoch needs {self.groups} distinct ones "
                f"({self.samples} samples in groups of {self.group_size})",
                field=source,
                hint=f"add prompts, or {self._suggest_shorter_epoch(rows)}",
            )

    def _suggest_shorter_epoch(self, rows: int) -> str:
        """Return overrides for an epoch of at most `rows` groups, with the largest batches."""
        whole = self.sample_batch_size
        for size in range(whole, 0, -1):
            if whole % size:
                continue
            all_ranks = size * self.num_processes
            # batches per rank that hold whole groups
            step = self.group_size // math.gcd(self.group_size, all_ranks)
            batches = rows * self.group_size // all_ranks // step * step
            if batches:
                micro_batch = math.gcd(size, self.train_batch_size)
                most = size // micro_batch * batches
                smaller = replace(
                    self,
                    sample_batch_size=size,
                    batches_per_epoch=batches,
                    train_batch_size=micro_batch,
                    accumulation_steps=largest_divisor(most, self.accumulation_steps),
                )
                return f"set {self.overrides_for(smaller)}"
        return "use fewer processes"

    def rows(self) -> dict[str, str]:
        """Return the lines of `describe`: text by label."""
        explored = ""
        if self.exploration_factor > 1:
            explored = f", kept of {self.exploration_factor * self.group_size}"
        given = ""
        if self.given_rows:
            noun = "pairs" if self.images_per_row == 2 else "images"
            given = f", and {self.given_rows * self.num_processes} given {noun}"
        return {
            "samples per epoch": f"{self.samples} = {self.sample_batch_size} per batch"
            f" x {self.batches_per_epoch} batches x {self.processes}",
            "groups per epoch": f"{self.groups} prompts x {self.group_size} images{explored}",
            "samples per update": f"{self.samples_per_update * self.num_processes} = "
            f"{self.train_batch_size} per micro-batch x {self.accumulation_steps} accumulated"
            f" x {self.processes}, each over {self.trained_steps} steps{given}",
            **self.context_rows(),
        }

    def context_rows(self) -> dict[str, str]:
        """Return the line of context parallelism, if it is used and the tokens are known."""
        size = self.context_parallel
        if size == 1 or not self.tokens:
            return {}
        split = f"{self.tokens // size} = {self.tokens} / sample.context_parallel={size}"
        return {"tokens per process": split}


def count_trained_steps(config: Any) -> int:
    """Return the denoising steps or noise levels that a built-in algorithm trains per sample.

    The same as `losses_per_sample` of the algorithm, but without torch.
    """
    sample, own = config.sample, getattr(config, config.algorithm)
    if hasattr(own, "times"):
        return own.times
    if config.algorithm == "mix":
        return own.window_size
    steps = stochastic_steps(
        sample.num_steps,
        window_size=sample.sde_window_size,
        window_range=tuple(sample.sde_window_range),
        timestep_fraction=config.train.timestep_fraction,
        rng=np.random.default_rng(0),
    )
    return len(steps)


def group_size(sample: DiffusionSampleConfig, train: DiffusionTrainConfig) -> int:
    """Return the number of trained samples per prompt."""
    return 2 * train.keep_best_worst or sample.num_image_per_prompt


def group_size_setting(sample: DiffusionSampleConfig, train: DiffusionTrainConfig) -> str:
    """Return the setting that determines the size of a trained group, with its value."""
    size = group_size(sample, train)
    return _group_size_setting(size, from_selection=train.keep_best_worst > 0)


def _group_size_setting(size: int, *, from_selection: bool) -> str:
    if from_selection:
        return f"2 x train.keep_best_worst={size // 2}"
    return f"sample.num_image_per_prompt={size}"


def build_plan(
    sample: DiffusionSampleConfig,
    train: DiffusionTrainConfig,
    num_processes: int,
    trained_steps: int = 1,
    *,
    given_rows: int = 0,
    images_per_row: int = 1,
    tokens: int = 0,
) -> BatchPlan:
    """Return the batch plan of a run.

    Args:
        sample: Section `sample` of the config.
        train: Section `train` of the config.
        num_processes: World size, a multiple of `sample.context_parallel`.
        trained_steps: Denoising steps trained per sample.
        given_rows: Pairs or images of `preferences` per update and process.
        images_per_row: 2 for pairs.
        tokens: Transformer tokens of a sample, if known.
    """
    return BatchPlan(
        num_processes=num_processes // sample.context_parallel,
        sample_batch_size=sample.train_batch_size,
        batches_per_epoch=sample.num_batches_per_epoch,
        group_size=group_size(sample, train),
        train_batch_size=train.batch_size,
        accumulation_steps=train.gradient_accumulation_steps,
        inner_epochs=train.num_inner_epochs,
        trained_steps=trained_steps,
        exploration_factor=sample.num_image_per_prompt // group_size(sample, train),
        given_rows=given_rows,
        images_per_row=images_per_row,
        context_parallel=sample.context_parallel,
        tokens=tokens,
    )
