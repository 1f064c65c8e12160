"""Dry run of scripts/train.py: measure an epoch with the fewest batches that form whole groups."""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.diffusion.builders import eval_image_size, image_size, training_memory_options
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.offline_plan import OfflinePlan
from flow_grpo.diffusion.plan import BatchPlan, largest_divisor
from flow_grpo.diffusion.session import Session, build_session
from flow_grpo.errors import UserError
from flow_grpo.training.distributed import get_ranks
from flow_grpo.training.dry_run import (
    DryRun,
    MeasuredEpoch,
    build_without_writing,
    raise_on_outage,
    tensor_bytes,
)
from flow_grpo.training.metrics import ScoredSamples, Timer
from flow_grpo.training.time_estimate import RemainingWork

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class DiffusionDryRun(DryRun):
    """Measures the given functions of scripts/train.py."""

    test_set: ClassVar[str] = "test_prompts"

    sample: Callable[[Session, int], list]
    collect_rewards: Callable[[Session, int, list], ScoredSamples]
    train: Callable[[Session, int, list, np.ndarray], dict[str, float]]
    evaluate: Callable[[Session, int], dict[str, float]]

    def build(self, config: UncheckedConfig, num_processes: int | None = None) -> Session:
        """Build a session for measuring; see `build_without_writing`."""
        session = build_without_writing(config, check_config, build_session, num_processes)
        if session.adapter.compiled:
            logger.info("compiling the model; this takes a minute or two")
        return session

    def describe(self, session: Session) -> str:
        config, size = session.config, eval_image_size(session.config)
        work = f"{len(session.test_prompts)} prompts x {config.sample.eval_num_steps} steps"
        return work if size == image_size(config) else f"{work} at {size.width} x {size.height}"

    def advice(self, session: Session) -> list[str]:
        return training_memory_options(session.config, session.plan)

    def count_work(self, session: Session) -> RemainingWork:
        """Return the remaining batches, micro-batches and evaluations of a run."""
        sample, plan = session.config.sample, session.plan
        return self.work(
            session,
            batches=plan.batches_per_epoch,
            micro_batches=plan.updates * session.algorithm.batch_count(plan.train_batch_size),
            eval_batch_size=sample.test_batch_size,
            ahead=bool(sample.async_depth),
        )

    def shrink(self, session: Session, folder: Path) -> Session:
        """Return a session with the smallest valid plan, which writes to `folder`."""

        def check_plan(plan: BatchPlan) -> None:
            """Raise a UserError if the plan does not have whole groups where they are needed."""
            if session.algorithm.needs_whole_groups:
                plan.check_whole_groups(session.algorithm.name)
            for name in session.reward.pairwise_rewards:
                plan.check_groupwise_reward(name)

        processes = get_ranks(session.accelerator).data_size
        if isinstance(session.plan, OfflinePlan):
            plan = session.plan.smallest(processes)
        else:
            plan = smallest_valid_plan(session.plan, check_plan, processes)
        if session.config.is_offline:
            size = {"given_samples": plan.samples_per_update}
        else:
            size = {"update_samples": plan.samples_per_update}
            size["given_samples"] = plan.given_rows * plan.images_per_row
        algorithm = session.algorithm
        return replace(
            session,
            plan=plan,
            algorithm=type(algorithm)(algorithm.settings, replace(algorithm.setup, **size)),
            prompt_sets=[(len(session.prompts), plan.groups)],
            folder=folder,
        )

    def run_epoch(self, small: Session, epoch: int) -> MeasuredEpoch:
        """Sample, score and train one reduced epoch, with random credit, and measure it."""
        timer, samples = Timer(small.accelerator.device), []
        if not small.config.is_offline:
            with timer("sample"):
                samples = self.sample(small, epoch)
            with timer("reward_wait"):
                scored = self.collect_rewards(small, epoch, samples)
            raise_on_outage(small, scored.rewards)
        with timer("train"):
            small.reward.release_memory()
            small.snapshot_behaviour_weights()
            credit = np.random.default_rng(epoch).standard_normal(small.plan.samples)
            self.train(small, epoch, samples, credit)
        bytes_per_batch = tensor_bytes([s.trajectory for s in samples]) / max(1, len(samples))
        if small.rollout_gradients is not None and small.accelerator.device.type == "cpu":
            bytes_per_batch += small.rollout_gradients.bytes_per_sample
        return MeasuredEpoch(timer.seconds, bytes_per_batch)


def smallest_valid_plan(
    plan: BatchPlan, check_plan: Callable[[BatchPlan], None], num_processes: int
) -> BatchPlan:
    """Return the smallest plan with the same batch and group sizes, whole groups and one update.

    It has at least two batches if the run has, because one is scored while the next is sampled.

    Args:
        plan: The plan of the run.
        check_plan: Raises `UserError` for an invalid plan.
        num_processes: World size to run on. If it is below that of the plan, whole groups may need
            more batches per process.
    """
    planned = num_processes == plan.num_processes
    most = plan.batches_per_epoch * (1 if planned else plan.group_size)
    for batches in range(min(2, most), most + 1):
        micro_batches = plan.sample_batch_size // plan.train_batch_size * batches
        accumulated = min(micro_batches, plan.accumulation_steps)
        if not planned:
            accumulated = largest_divisor(micro_batches, accumulated)
        with suppress(UserError):
            small = replace(
                plan,
                num_processes=num_processes,
                batches_per_epoch=batches,
                accumulation_steps=accumulated,
                inner_epochs=1,
                given_rows=math.ceil(plan.given_rows * accumulated / plan.accumulation_steps),
            )
            check_plan(small)
            return small
    return plan
