"""The batch arithmetic of an epoch: checked before anything is loaded, printed before it starts."""

import math
from dataclasses import Field, dataclass, field, fields, replace

from flow_grpo.draw.fields import DrawFields
from flow_grpo.errors import UserError
from flow_grpo.run.plan import Plan


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is no larger than `most`; at least 1."""
    return next(n for n in range(max(1, min(number, most)), 0, -1) if number % n == 0)


def _field(config_name: str) -> Field:
    return field(metadata={"config": config_name})


@dataclass(frozen=True)
class BatchPlan(Plan):
    """How many samples, groups, batches and updates an epoch has."""

    num_processes: int
    sample_batch_size: int = _field("sample.train_batch_size")  # per process
    batches_per_epoch: int = _field("sample.num_batches_per_epoch")  # per process
    group_size: int = _field("sample.num_image_per_prompt")
    train_batch_size: int = _field("train.batch_size")  # per process
    # training micro-batches per update, over all their time steps
    accumulation_steps: int = _field("train.gradient_accumulation_steps")
    inner_epochs: int = _field("train.num_inner_epochs")
    trained_steps: int = 1  # denoising steps trained per sample
    explored: int = 1  # samples drawn for each that is kept

    def __post_init__(self) -> None:
        for number in fields(self):
            if getattr(self, number.name) < 1:
                name = number.metadata.get("config", number.name)
                raise UserError(f"{name}={getattr(self, number.name)} must be at least 1")
        if self.samples % self.group_size:
            raise UserError(
                f"{self.samples} samples per epoch = sample.train_batch_size="
                f"{self.sample_batch_size} x sample.num_batches_per_epoch={self.batches_per_epoch}"
                f" x {self.num_processes} processes do not divide into groups of "
                f"{self.group_field}; change one of these numbers"
            )
        if self.sample_batch_size % self.train_batch_size:
            raise UserError(
                f"train.batch_size={self.train_batch_size} does not divide "
                f"sample.train_batch_size={self.sample_batch_size}; training works on whole "
                "slices of the sampling batches, so make it a divisor (equal is best)"
            )
        if self.micro_batches % self.accumulation_steps:
            raise UserError(
                f"train.gradient_accumulation_steps={self.accumulation_steps} does not divide the "
                f"{self.micro_batches} micro-batches of an epoch per process; some gradients would "
                "be left over, so make it a divisor"
            )

    @property
    def group_field(self) -> str:
        return _group_field(self.group_size, kept=self.explored > 1)

    @property
    def samples(self) -> int:
        return self.sample_batch_size * self.batches_per_epoch * self.num_processes

    @property
    def groups(self) -> int:
        return self.samples // self.group_size

    @property
    def micro_batches(self) -> int:
        return self.sample_batch_size // self.train_batch_size * self.batches_per_epoch

    @property
    def updates_per_pass(self) -> int:
        return self.micro_batches // self.accumulation_steps

    def in_smaller_batches(self) -> "BatchPlan | None":
        """The same epoch and updates in less memory; None if batches are of one sample."""
        whole = self.train_batch_size
        if whole == 1:
            return None
        size = largest_divisor(whole, whole - 1)
        return replace(
            self,
            sample_batch_size=size,
            batches_per_epoch=self.sample_batch_size * self.batches_per_epoch // size,
            train_batch_size=size,
            accumulation_steps=whole * self.accumulation_steps // size,
        )

    def options_for(self, other: "BatchPlan") -> str:
        """What to add to the command to get `other` instead."""
        changed = [f for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        return " ".join(
            f"--config.{f.metadata['config']}={getattr(other, f.name)}" for f in changed
        )

    def check_whole_groups(self, algorithm: str) -> None:
        share = self.train_batch_size * self.accumulation_steps
        if share % self.group_size:
            raise UserError(
                f"algorithm={algorithm!r} compares within groups of {self.group_field}, but "
                f"an update has {share} samples per process = "
                f"train.batch_size={self.train_batch_size} x train.gradient_accumulation_steps="
                f"{self.accumulation_steps}; make that a multiple"
            )

    def check_judge(self, reward: str) -> None:
        """A reward that compares the samples of a group is called with one sampling batch."""
        if self.sample_batch_size % self.group_size:
            raise UserError(
                f"reward {reward!r} compares the pictures of a group, but sample.train_batch_size="
                f"{self.sample_batch_size} does not hold whole groups of "
                f"sample.num_image_per_prompt={self.group_size}; make it a multiple"
            )
        share = self.train_batch_size * self.accumulation_steps
        if self.num_processes > 1 and share % self.group_size:
            raise UserError(
                f"reward {reward!r} compares the pictures of a group, but an update's {share} "
                f"samples per process = train.batch_size={self.train_batch_size} x "
                f"train.gradient_accumulation_steps={self.accumulation_steps} do not hold whole "
                f"groups of sample.num_image_per_prompt={self.group_size}; make that a multiple"
            )

    def check_prompts(self, rows: int, source: str) -> None:
        if rows < self.groups:
            raise UserError(
                f"{source} has {rows} prompts to train on but an epoch needs {self.groups} "
                f"distinct ones ({self.samples} samples in groups of {self.group_size}); add "
                f"prompts, or {self._shorter_epoch(rows)}"
            )

    def _shorter_epoch(self, rows: int) -> str:
        """What to set for an epoch of at most `rows` groups, in batches as large as can be."""
        whole = self.sample_batch_size
        for size in (n for n in range(whole, 0, -1) if whole % n == 0):
            together = size * self.num_processes
            step = self.group_size // math.gcd(self.group_size, together)  # for whole groups
            batches = rows * self.group_size // together // step * step
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
                return f"set {self.options_for(smaller)}"
        return "use fewer processes"

    def rows(self) -> dict[str, str]:
        p = self
        per_update = p.train_batch_size * p.accumulation_steps * p.num_processes
        of = f", kept of {p.explored * p.group_size}" if p.explored > 1 else ""
        return {
            "samples per epoch": f"{p.samples} = {p.sample_batch_size} per batch"
            f" x {p.batches_per_epoch} batches x {p.num_processes} processes",
            "groups per epoch": f"{p.groups} prompts x {p.group_size} images{of}",
            "samples per update": f"{per_update} = {p.train_batch_size} per micro-batch"
            f" x {p.accumulation_steps} accumulated x {p.num_processes} processes,"
            f" each over {p.trained_steps} steps",
        }


def group_size(config: DrawFields) -> int:
    """How many samples of a prompt are trained."""
    return 2 * config.train.keep_best_worst or config.sample.num_image_per_prompt


def group_field(config: DrawFields) -> str:
    """The setting that decides the size of a trained group, with its value."""
    return _group_field(group_size(config), kept=config.train.keep_best_worst > 0)


def _group_field(size: int, *, kept: bool) -> str:
    if kept:
        return f"2 x train.keep_best_worst={size // 2}"
    return f"sample.num_image_per_prompt={size}"


def build_plan(config: DrawFields, num_processes: int, trained_steps: int = 1) -> BatchPlan:
    sample, train = config.sample, config.train
    return BatchPlan(
        num_processes=num_processes,
        sample_batch_size=sample.train_batch_size,
        batches_per_epoch=sample.num_batches_per_epoch,
        group_size=group_size(config),
        train_batch_size=train.batch_size,
        accumulation_steps=train.gradient_accumulation_steps,
        inner_epochs=train.num_inner_epochs,
        trained_steps=trained_steps,
        explored=sample.num_image_per_prompt // group_size(config),
    )


def lighter_settings(config: DrawFields) -> list[str]:
    """Options that need less memory, of those that the run has not yet."""
    on = {
        "train.gradient_checkpointing": config.train.gradient_checkpointing,
        "offload_idle": config.offload_idle,
    }
    return [f"--config.{name}=True" for name, is_on in on.items() if not is_on]


def lighter_training(config: DrawFields, plan: BatchPlan) -> list[str]:
    smaller = plan.in_smaller_batches()
    batches = [f"{plan.options_for(smaller)} (the same epoch, smaller batches)"] if smaller else []
    # compiled code samples with the memory of training
    larger = config.compile and plan.sample_batch_size > plan.train_batch_size
    return [
        *batches,
        *lighter_settings(config),
        *["--config.compile=False"] * larger,
        *["--config.sample.merge_lora=False"] * config.sample.merge_lora,
    ]


def lighter_evaluation(config: DrawFields) -> list[str]:
    size = config.sample.test_batch_size
    batches = [f"--config.sample.test_batch_size={size // 2}"] if size > 1 else []
    return batches + lighter_settings(config)
