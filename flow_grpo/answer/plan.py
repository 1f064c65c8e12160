"""The arithmetic of an epoch: checked before anything is loaded, printed before it starts."""

import math
import os
from dataclasses import dataclass

from flow_grpo.answer.fields import AnswerFields
from flow_grpo.config.places import with_files
from flow_grpo.data.early import read_early
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.questions import check_there
from flow_grpo.errors import UserError
from flow_grpo.run.plan import Plan, check_places, count_processes


@dataclass(frozen=True)
class AnswerPlan(Plan):
    """How many questions, answers and updates an epoch has."""

    num_processes: int
    questions: int
    group_size: int
    updates_per_pass: int
    inner_epochs: int
    most_at_once: int  # samples of a process

    def __post_init__(self) -> None:
        parts = self.updates_per_pass * self.num_processes
        if self.samples % parts:
            raise UserError(
                f"{self.samples} samples per epoch = sample.questions_per_epoch={self.questions} x "
                f"sample.group_size={self.group_size} do not divide into train.updates_per_epoch="
                f"{self.updates_per_pass} updates x {self.num_processes} processes; change one of "
                "these numbers"
            )

    @property
    def samples(self) -> int:
        return self.questions * self.group_size

    @property
    def per_process(self) -> int:
        return self.samples // self.num_processes

    @property
    def batches(self) -> int:
        """That a process samples one after the other."""
        return math.ceil(self.per_process / self.most_at_once)

    @property
    def batch_size(self) -> int:
        """Sampled together; the last batch may have fewer."""
        return math.ceil(self.per_process / self.batches)

    def update(self, number: int) -> slice:
        """The samples of an update, by index."""
        size = self.samples // self.updates_per_pass
        return slice(number * size, (number + 1) * size)

    def check_questions(self, rows: int, source: str) -> None:
        if rows < self.questions:
            raise UserError(
                f"{source} has {rows} questions to train on but an epoch needs {self.questions} "
                f"distinct ones; add questions, or {self._shorter_epoch(rows)}"
            )

    def _shorter_epoch(self, rows: int) -> str:
        """What to set for an epoch of at most `rows` questions."""
        parts = self.updates_per_pass * self.num_processes
        fewer = next((n for n in range(rows, 0, -1) if n * self.group_size % parts == 0), None)
        if fewer is None:
            return "lower sample.questions_per_epoch and train.updates_per_epoch"
        return f"set --config.sample.questions_per_epoch={fewer}"

    def rows(self) -> dict[str, str]:
        return {
            "samples per epoch": f"{self.samples} = {self.questions} questions x "
            f"{self.group_size} answers",
            "sampled together": f"{self.batch_size}, on each of {self.num_processes} processes",
            "samples per update": f"{self.samples // self.updates_per_pass}",
        }


def build_plan(config: AnswerFields, num_processes: int) -> AnswerPlan:
    sample, train = config.sample, config.train
    check_parallel(sample.vllm_tensor_parallel, num_processes)
    return AnswerPlan(
        num_processes=num_processes,
        questions=sample.questions_per_epoch,
        group_size=sample.group_size,
        updates_per_pass=train.updates_per_epoch,
        inner_epochs=train.num_inner_epochs,
        most_at_once=sample.batch_size,
    )


def check_parallel(size: int, num_processes: int) -> None:
    """Reject a tensor-parallel size that does not divide the processes of a node."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    if on_node % size:
        raise UserError(
            f"sample.vllm_tensor_parallel={size} does not divide the processes of a node, "
            f"{on_node}; start a multiple of {size} on each, or lower it"
        )


def check_early(config: AnswerFields) -> None:
    """Tell what can be told of a run before torch is imported."""
    from flow_grpo.answer.questions import build_questions  # which imports this module

    config = with_files(config)
    plan = build_plan(config, count_processes())
    check_places(config)
    sources = parse_sources(config.dataset)
    for source in sources:
        check_there(source.path)
    read_early(sources, lambda: build_questions(config, plan))
