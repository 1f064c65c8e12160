"""How much of scripts/train_vlm.py a dry run measures: two batches of answers, or as many as make
whole groups."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from flow_grpo.answer.check import check
from flow_grpo.answer.credit import Fixed
from flow_grpo.answer.plan import AnswerPlan
from flow_grpo.answer.rollout import LENGTH, Rollout
from flow_grpo.answer.session import VlmSession, build_session, lighter_settings
from flow_grpo.config.trade import Unchecked
from flow_grpo.run.metrics import Timer, now
from flow_grpo.run.rehearsal import (
    Epoch,
    Rehearsal,
    Work,
    build_quietly,
    refuse_outage,
    tensor_bytes,
)

ByIndex = dict[int, Fixed]


@dataclass(frozen=True)
class AnswerLoop(Rehearsal):
    """The functions of scripts/train_vlm.py that are measured."""

    tests: ClassVar[str] = "test_questions"

    sample: Callable[[VlmSession, int, Timer], Rollout]
    prepare: Callable[[VlmSession, Rollout], ByIndex]
    give_credit: Callable[[VlmSession, Rollout, ByIndex], dict[str, float]]
    train: Callable[[VlmSession, int, Rollout, ByIndex], dict[str, float]]
    evaluate: Callable[[VlmSession, int], dict[str, float]]

    def build(self, config: Unchecked, num_processes: int | None = None) -> VlmSession:
        return build_quietly(config, check, build_session, num_processes)

    def describe(self, session: VlmSession) -> str:
        return f"{len(session.test_questions)} questions"

    def advice(self, session: VlmSession) -> list[str]:
        return lighter_settings(session.config)

    def count_work(self, session: VlmSession) -> Work:
        return self.work(
            session,
            batches=session.plan.batches,
            micro_batches=session.plan.per_process,  # answers are counted: batches differ
            eval_batch_size=session.config.sample.batch_size,
        )

    def shrink(self, session: VlmSession, folder: Path) -> VlmSession:
        # all of the epoch is trained, whatever it scored
        sample = replace(session.config.sample, refills=0)
        config = replace(session.config, sample=sample)
        plan = smallest_epoch(session.plan, session.accelerator.num_processes)
        return replace(session, config=config, plan=plan, folder=folder)

    def run_epoch(self, small: VlmSession, epoch: int) -> Epoch:
        timer, device = Timer(), small.accelerator.device
        rollout = self.sample(small, epoch, timer)
        refuse_outage(small, rollout.rewards)
        small.reward.rest()
        start = now(device)
        fixed = self.prepare(small, rollout)
        self.give_credit(small, rollout, fixed)
        rng = np.random.default_rng(epoch)
        for own in fixed.values():  # none is left out, as one without advantage would be
            own.advantages = torch.full_like(own.old, rng.standard_normal())
        self.train(small, epoch, rollout, fixed)
        seconds = (timer.seconds["sample"], timer.seconds["reward_wait"], now(device) - start)
        held = tensor_bytes([rollout.samples, rollout.prompts]) if device.type == "cpu" else 0
        lengths = f"{rollout.scores[LENGTH].mean():.0f} tokens on average, of at most "
        lengths += f"{small.most_tokens}; longer ones take longer"
        return Epoch(seconds, held / small.plan.batches, remark=("answers", lengths))


def smallest_epoch(plan: AnswerPlan, num_processes: int) -> AnswerPlan:
    """The batches of `plan`, as few as make whole groups; two at least, as one is scored while the
    next is sampled. They run on `num_processes`: fewer than planned need more batches each to make
    whole groups."""
    size, planned = plan.batch_size, num_processes == plan.num_processes
    for batches in range(2, plan.batches if planned else plan.group_size + 2):
        samples = batches * size * num_processes
        if samples % plan.group_size == 0:
            return replace(
                plan,
                num_processes=num_processes,
                questions=samples // plan.group_size,
                updates_per_pass=1,
                most_at_once=size,
            )
    return plan
