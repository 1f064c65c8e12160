"""How much of scripts/train.py a dry run measures: as few batches as make whole groups."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from flow_grpo.config.trade import Unchecked
from flow_grpo.draw.check import check
from flow_grpo.draw.plan import BatchPlan, largest_divisor, lighter_training
from flow_grpo.draw.session import Session, build_algorithm, build_session
from flow_grpo.errors import UserError
from flow_grpo.run.metrics import Scored, now
from flow_grpo.run.rehearsal import (
    Epoch,
    Rehearsal,
    Work,
    build_quietly,
    refuse_outage,
    tensor_bytes,
)

logger = logging.getLogger("flow_grpo")


@dataclass(frozen=True)
class Loop(Rehearsal):
    """The functions of scripts/train.py that are measured."""

    tests: ClassVar[str] = "test_prompts"

    sample: Callable[[Session, int], list]
    collect_rewards: Callable[[Session, int, list], Scored]
    train: Callable[[Session, int, list, np.ndarray], dict[str, float]]
    evaluate: Callable[[Session, int], dict[str, float]]

    def build(self, config: Unchecked, num_processes: int | None = None) -> Session:
        session = build_quietly(config, check, build_session, num_processes)
        if session.adapter.compiled:
            logger.info("the model is compiled first, which takes a minute or two")
        return session

    def describe(self, session: Session) -> str:
        return f"{len(session.test_prompts)} prompts x {session.config.sample.eval_num_steps} steps"

    def advice(self, session: Session) -> list[str]:
        return lighter_training(session.config, session.plan)

    def count_work(self, session: Session) -> Work:
        sample, plan = session.config.sample, session.plan
        return self.work(
            session,
            batches=plan.batches_per_epoch,
            micro_batches=plan.updates * session.algorithm.batch_count(plan.train_batch_size),
            eval_batch_size=sample.test_batch_size,
            ahead=bool(sample.async_depth),
        )

    def shrink(self, session: Session, folder: Path) -> Session:
        def check(plan: BatchPlan) -> None:
            if session.algorithm.whole_groups:
                plan.check_whole_groups(session.algorithm.name)
            for name in session.reward.judges:
                plan.check_judge(name)

        plan = smallest_epoch(session.plan, check, session.accelerator.num_processes)
        steps = {"gradient_accumulation_steps": plan.accumulation_steps}
        config = replace(session.config, train=replace(session.config.train, **steps))
        return replace(
            session,
            plan=plan,
            algorithm=build_algorithm(config),
            prompt_sets=[(len(session.prompts), plan.groups)],
            folder=folder,
        )

    def run_epoch(self, small: Session, epoch: int) -> Epoch:
        device = small.accelerator.device
        times = [now(device)]
        samples = self.sample(small, epoch)
        times.append(now(device))
        scored = self.collect_rewards(small, epoch, samples)
        times.append(now(device))
        refuse_outage(small, scored.rewards)
        small.reward.rest()
        small.remember_behaviour()
        credit = np.random.default_rng(epoch).standard_normal(small.plan.samples)
        self.train(small, epoch, samples, credit)
        times.append(now(device))
        held = tensor_bytes([s.trajectory for s in samples]) / len(samples)
        if small.gradients is not None and device.type == "cpu":
            held += small.gradients.bytes_each
        return Epoch(tuple(np.diff(times).tolist()), held)


def smallest_epoch(
    plan: BatchPlan, check: Callable[[BatchPlan], None], num_processes: int
) -> BatchPlan:
    """The batches of `plan`, as few as make whole groups and one update; two at least, as one is
    scored while the next is sampled, which may slow both. They run on `num_processes`: fewer than
    planned need more batches each to make whole groups."""
    planned = num_processes == plan.num_processes
    most = plan.batches_per_epoch * (1 if planned else plan.group_size)
    for batches in range(min(2, most), most + 1):
        micro_batches = plan.sample_batch_size // plan.train_batch_size * batches
        accumulated = min(micro_batches, plan.accumulation_steps)
        with suppress(UserError):
            small = replace(
                plan,
                num_processes=num_processes,
                batches_per_epoch=batches,
                accumulation_steps=accumulated
                if planned
                else largest_divisor(micro_batches, accumulated),
                inner_epochs=1,
            )
            check(small)
            return small
    return plan
