"""Batch arithmetic of an epoch, checked before anything is loaded and logged at the start."""

import math
import os
from dataclasses import dataclass

from flow_grpo.errors import UserError
from flow_grpo.training.plan import Plan, check_divides, suggest_divisor, suggest_multiple
from flow_grpo.vlm.fields import VlmSampleConfig, VlmTrainConfig
from flow_grpo.vlm.losses import GIVEN_LOSSES


@dataclass(frozen=True)
class VlmBatchPlan(Plan):
    """Numbers of questions, samples and updates of an epoch."""

    num_processes: int
    questions: int
    group_size: int
    updates_per_pass: int
    inner_epochs: int
    max_batch_size: int  # samples per process that are generated together
    together: int = 1  # samples that must be in the same micro-batch: a pair of given responses
    sequence_parallel: int = 1  # processes that train on a micro-batch together
    tokens_per_batch: int = 0  # of a micro-batch

    def __post_init__(self) -> None:
        """Raise a UserError unless updates and processes divide the samples."""
        parts = self.updates_per_pass * self.num_processes
        if self.samples % (parts * self.together):
            raise UserError(
                f"x {self.num_processes} processes must divide the {self.samples} samples per "
                f"epoch (sample.questions_per_epoch={self.questions} x sample.group_size="
                f"{self.group_size})",
                field="train.updates_per_epoch",
                value=self.updates_per_pass,
                hint=self._suggest_division(),
            )

    def _suggest_division(self) -> str:
        """Return the numbers of processes and the group sizes that divide the samples."""
        parts = self.updates_per_pass * self.together
        if self.samples % parts:
            return "change one of these numbers"
        hint = suggest_divisor(self.samples // parts, self.num_processes, "processes")
        if self.together > 1:
            return hint
        parts *= self.num_processes
        unit = parts // math.gcd(parts, self.questions)
        return f"{hint}, or {suggest_multiple(unit, self.group_size, 'responses per question')}"

    @property
    def samples(self) -> int:
        """Responses per epoch, over all processes."""
        return self.questions * self.group_size

    @property
    def samples_per_process(self) -> int:
        """Responses per epoch that each process generates."""
        return self.samples // self.num_processes

    @property
    def batches(self) -> int:
        """Number of batches that a process samples one after another."""
        return math.ceil(self.samples_per_process / self.max_batch_size)

    @property
    def batch_size(self) -> int:
        """Number of samples per batch; the last batch may have fewer."""
        return math.ceil(self.samples_per_process / self.batches)

    def update(self, number: int) -> slice:
        """Return the sample indices of an update."""
        size = self.samples // self.updates_per_pass
        return slice(number * size, (number + 1) * size)

    def check_num_questions(self, rows: int, source: str) -> None:
        """Raise a UserError if `source` has fewer questions (`rows`) than an epoch."""
        if rows < self.questions:
            raise UserError(
                f"has {rows} training questions, but an epoch needs {self.questions} distinct ones",
                field=source,
                hint=f"add questions, or {self._suggest_shorter_epoch(rows)}",
            )

    def _suggest_shorter_epoch(self, rows: int) -> str:
        """Return the override for an epoch of at most `rows` questions."""
        parts = self.updates_per_pass * self.num_processes * self.together
        fewer = next((n for n in range(rows, 0, -1) if n * self.group_size % parts == 0), None)
        if fewer is None:
            return "lower sample.questions_per_epoch and train.updates_per_epoch"
        return f"set --config.sample.questions_per_epoch={fewer}"

    def rows(self) -> dict[str, str]:
        """Return the lines of `describe`: text by label."""
        rows = {
            "samples per epoch": f"{self.samples} = {self.questions} questions x "
            f"{self.group_size} responses",
            "sampled together": f"{self.batch_size} on each of {self.num_processes} processes",
            "samples per update": f"{self.samples // self.updates_per_pass}",
        }
        if (size := self.sequence_parallel) > 1:
            total = self.tokens_per_batch
            rows["trained together"] = (
                f"micro-batches of {total} tokens by {self.num_processes // size} groups of {size} "
                f"processes: {math.ceil(total / size)} = {total} / train.sequence_parallel={size} "
                "tokens on each"
            )
        return rows


def build_plan(sample: VlmSampleConfig, train: VlmTrainConfig, num_processes: int) -> VlmBatchPlan:
    """Return the batch plan of a run for this world size."""
    check_tensor_parallel(sample.vllm_tensor_parallel, num_processes)
    check_divides(train.sequence_parallel, num_processes, "train.sequence_parallel")
    given = GIVEN_LOSSES.get(train.loss)
    responses = 2 if given == "pairs" else 1
    return VlmBatchPlan(
        num_processes=num_processes,
        questions=sample.questions_per_epoch,
        group_size=responses if given else sample.group_size,
        updates_per_pass=train.updates_per_epoch,
        inner_epochs=train.num_inner_epochs,
        max_batch_size=sample.batch_size,
        together=responses,
        sequence_parallel=train.sequence_parallel,
        tokens_per_batch=train.tokens_per_batch,
    )


def check_tensor_parallel(size: int, num_processes: int) -> None:
    """Reject a tensor-parallel size that does not divide the processes of a node."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    if on_node % size:
        raise UserError(
            f"must divide the number of processes per node ({on_node})",
            field="sample.vllm_tensor_parallel",
            value=size,
            hint=f"start a multiple of {size} processes on each node, or lower it",
        )
