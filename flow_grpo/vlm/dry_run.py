"""Dry run of scripts/train_vlm.py: measure the smallest epoch with whole groups and two batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.errors import UserError
from flow_grpo.training.dry_run import (
    DryRun,
    MeasuredEpoch,
    build_without_writing,
    raise_on_outage,
    tensor_bytes,
)
from flow_grpo.training.metrics import Timer
from flow_grpo.training.time_estimate import RemainingWork
from flow_grpo.vlm.advantages import ResponseTensors
from flow_grpo.vlm.builders import memory_saving_options
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.fields import BRADLEY_TERRY
from flow_grpo.vlm.plan import VlmBatchPlan
from flow_grpo.vlm.rollout import LENGTH, Rollout
from flow_grpo.vlm.session import VlmSession, build_session

TensorsByIndex = dict[int, ResponseTensors]


@dataclass(frozen=True)
class VlmDryRun(DryRun):
    """Measures the given functions of scripts/train_vlm.py."""

    test_set: ClassVar[str] = "test_questions"

    sample: Callable[[VlmSession, int, Timer], Rollout]
    compute_rollout_log_probs: Callable[[VlmSession, Rollout], TensorsByIndex]
    assign_advantages: Callable[[VlmSession, Rollout, TensorsByIndex], None]
    compute_old_log_probs: Callable[
        [VlmSession, Rollout, TensorsByIndex, Sequence[np.ndarray]], None
    ]
    train: Callable[[VlmSession, int, Rollout, TensorsByIndex], dict[str, float]]
    evaluate: Callable[[VlmSession, int], dict[str, float]]

    def build(self, config: UncheckedConfig, num_processes: int | None = None) -> VlmSession:
        if config.train.loss == BRADLEY_TERRY:
            raise UserError(
                "does not support training of a reward model",
                field="--dry_run",
                hint="set --config.num_epochs=1 and a small --config.sample.questions_per_epoch",
            )
        return build_without_writing(config, check_config, build_session, num_processes)

    def describe(self, session: VlmSession) -> str:
        return f"{len(session.test_questions)} questions"

    def advice(self, session: VlmSession) -> list[str]:
        return memory_saving_options(session.config)

    def count_work(self, session: VlmSession) -> RemainingWork:
        """Return the remaining batches, responses to train and evaluations of a run."""
        return self.work(
            session,
            batches=session.plan.batches,
            micro_batches=session.plan.samples_per_process,  # responses: micro-batches vary in size
            eval_batch_size=session.config.sample.batch_size,
        )

    def shrink(self, session: VlmSession, folder: Path) -> VlmSession:
        """Return a session with the smallest valid plan, without refills, for `folder`."""
        # train on the whole epoch regardless of its scores
        sample = replace(session.config.sample, refills=0)
        config = replace(session.config, sample=sample)
        plan = smallest_valid_plan(session.plan, session.accelerator.num_processes)
        return replace(session, config=config, plan=plan, folder=folder)

    def run_epoch(self, small: VlmSession, epoch: int) -> MeasuredEpoch:
        """Sample, score and train one reduced epoch, with random advantages, and measure it."""
        device = small.accelerator.device
        timer = Timer(device)
        rollout = self.sample(small, epoch, timer)
        if small.given is None:
            raise_on_outage(small, rollout.rewards)
        small.reward.release_memory()
        with timer("train"):
            tensors = self.compute_rollout_log_probs(small, rollout)
            self.assign_advantages(small, rollout, tensors)
            rng = np.random.default_rng(epoch)
            for index, own in tensors.items():  # random: zero advantages are skipped
                sampled = rollout.samples[index].log_probs
                own.advantages = torch.full_like(sampled, rng.standard_normal())
            if small.config.train.updates_per_epoch > 1:  # a run does this for all but the first
                self.compute_old_log_probs(small, rollout, tensors, rollout.updates())
            self.train(small, epoch, rollout, tensors)
        stored = tensor_bytes([rollout.samples, rollout.prompts]) if device.type == "cpu" else 0
        remark = (
            f"{rollout.scores[LENGTH].mean():.0f} tokens on average, of at most "
            f"{small.max_response_tokens}; longer ones take longer"
        )
        return MeasuredEpoch(timer.seconds, stored / small.plan.batches, ("responses", remark))


def smallest_valid_plan(plan: VlmBatchPlan, num_processes: int) -> VlmBatchPlan:
    """Return the smallest plan with the same batch size, whole groups and at least two batches.

    Two batches are needed because one is scored while the next is sampled.

    Args:
        plan: The plan to shrink.
        num_processes: World size to run on. If it is below that of the plan, whole groups may need
            more batches per process.
    """
    size, same_size = plan.batch_size, num_processes == plan.num_processes
    for batches in range(2, plan.batches if same_size else plan.group_size + 2):
        samples = batches * size * num_processes
        if samples % plan.group_size == 0 and batches * size % plan.together == 0:
            return replace(
                plan,
                num_processes=num_processes,
                questions=samples // plan.group_size,
                updates_per_pass=1,
                max_batch_size=size,
            )
    return plan
