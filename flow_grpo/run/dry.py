"""`scripts/train.py --dry_run`: build all that the run would, measure a few batches, tell what the
run will take, and leave nothing behind."""

import json
import logging
import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo.algorithms.base import Scored
from flow_grpo.errors import RewardOutage, Stopped, UserError
from flow_grpo.run import estimate, tracking
from flow_grpo.run.benchmarking import now
from flow_grpo.run.check import check
from flow_grpo.run.gpu import lighter_training
from flow_grpo.run.memory import advice_when_short
from flow_grpo.run.outage import describe_outage
from flow_grpo.run.places import find_files
from flow_grpo.run.resume import Start, find_start
from flow_grpo.run.session import Session, build_algorithm, build_session
from flow_grpo.run.stopping import StopRequested
from flow_grpo.training.plan import BatchPlan

logger = logging.getLogger("flow_grpo")

ROUNDS = 2  # the first one, in which all warms up, is not counted


@dataclass(frozen=True)
class Loop:
    """The functions of scripts/train.py that are measured."""

    sample: Callable[[Session, int], list]
    collect_rewards: Callable[[Session, int, list], Scored]
    train: Callable[[Session, int, list, np.ndarray], dict[str, float]]
    evaluate: Callable[[Session, int], dict[str, float]]

    def dry_run(self, config: ConfigDict) -> Session:
        session = build_quietly(config)
        try:
            logger.info("%-21s %s; nothing is written now", "dry run", describe_start(session))
            logger.info("%s\n%s", session.plan.describe(), describe_evaluations(session))
            if session.adapter.compiled:
                logger.info("the model is compiled first, which takes a minute or two")
            with (
                session.stop,
                tempfile.TemporaryDirectory() as folder,
                advice_when_short(lighter_training(session.config, session.plan)),
            ):
                tell(session, *measure(self, session, Path(folder)))
        except StopRequested as request:
            raise Stopped("the dry run was stopped; nothing was written") from request
        finally:
            session.close()
        session.accelerator.wait_for_everyone()
        session.accelerator.end_training()
        return session


def build_quietly(config: ConfigDict) -> Session:
    """As the run would build it, with nothing written: no folder, lock, tracker or cache."""
    check(config)
    find_files(config)
    asked = json.loads(config.to_json_best_effort())

    def look(accelerator: Accelerator, *_: Any) -> tuple[Start, None]:
        """A run of this name is found or refused as always; its lock is given back at once."""
        with ExitStack() as at_once:
            start, _ = find_start(accelerator, asked, at_once)
        return start, None

    config.log_with = config.prompt_cache = ""
    return build_session(config, begin=look)


def describe_start(session: Session) -> str:
    done, folder = session.progress.epoch, session.folder
    if not folder.exists():
        source = f", which goes on from {session.config.resume}" if done >= 0 else ""
        return f"{folder} would be a new run{source}"
    return f"{folder} would go on after epoch {done}" if done >= 0 else f"{folder} would start anew"


def describe_evaluations(session: Session) -> str:
    count, config = len(session.test_prompts), session.config
    every = config.eval_freq
    when = f"every {estimate.count(every, 'epoch')}" if every else "before and after the run"
    return f"evaluation            {count} prompts x {config.sample.eval_num_steps} steps, {when}"


def smallest_epoch(plan: BatchPlan, check: Callable[[BatchPlan], None]) -> BatchPlan:
    """The batches of `plan`, as few as make whole groups and one update; two at least, as one is
    scored while the next is sampled, which may slow both."""
    for batches in range(min(2, plan.batches_per_epoch), plan.batches_per_epoch + 1):
        micro_batches = plan.sample_batch_size // plan.train_batch_size * batches
        with suppress(UserError):
            small = replace(
                plan,
                batches_per_epoch=batches,
                accumulation_steps=min(micro_batches, plan.accumulation_steps),
                inner_epochs=1,
            )
            check(small)
            return small
    return plan


def shrink(session: Session, folder: Path) -> Session:
    """The same session with a small epoch, which writes to `folder`."""

    def check(plan: BatchPlan) -> None:
        if session.algorithm.whole_groups:
            plan.check_whole_groups(session.algorithm.name)
        for name in session.reward.judges:
            plan.check_judge(name)

    plan = smallest_epoch(session.plan, check)
    config = session.config.copy_and_resolve_references()
    config.train.gradient_accumulation_steps = plan.accumulation_steps
    return replace(
        session,
        plan=plan,
        algorithm=build_algorithm(config),
        prompt_sets=[(len(session.prompts), plan.groups)],
        folder=folder,
    )


def measure(
    loop: Loop, session: Session, folder: Path
) -> tuple[estimate.Measured, estimate.Work, float]:
    """Seconds of the parts, how often the run has them, and GiB of a process at its peak."""
    small, size, rounds = shrink(session, folder), session.plan.train_batch_size, []
    work = count_work(session)
    logger.info(
        "%-21s %d of %d batches sampled, scored and trained, %d of %d of an evaluation, twice",
        *("measured", small.plan.batches_per_epoch, work.batches),
        *(min(2, work.eval_batches), work.eval_batches),
    )
    for number in range(ROUNDS):
        epoch = max(session.progress.epoch, 0) + number
        times = [now(session.accelerator.device)]
        samples = loop.sample(small, epoch)
        times.append(now(session.accelerator.device))
        scored = loop.collect_rewards(small, epoch, samples)
        times.append(now(session.accelerator.device))
        refuse_outage(small, scored)
        small.reward.rest()
        small.remember_behaviour()
        credit = np.random.default_rng(number).standard_normal(small.plan.samples)
        count_as_done(small)
        loop.train(small, epoch, samples, credit)
        times.append(now(session.accelerator.device))
        held = tensor_bytes([s.trajectory for s in samples]) / len(samples)
        del samples, scored
        for batches in (1, 2)[: work.eval_batches]:
            evaluate_some(loop, small, batches, work.eval_batches)
            times.append(now(session.accelerator.device))
        rounds.append(np.diff(times).tolist())
    sampling, waiting, training, first_eval, *both = rounds[-1]
    batches = small.plan.batches_per_epoch
    trained = small.plan.updates * small.algorithm.batch_count(size)
    measured = estimate.Measured(
        sample=sampling / batches,
        reward=estimate.reward_seconds(sampling, waiting, batches),
        train=training / trained,
        first_eval=first_eval,
        next_eval=max(0.0, both[0] - first_eval) if both else 0.0,
        warm_up=max(0.0, sum(rounds[0]) - sum(rounds[-1])),
    )
    more = (work.batches * (2 if work.ahead else 1) - batches) * held / 2**30
    own = tracking.peak_memory_gb(session.accelerator.device) + more
    peak = torch.tensor([own], device=session.accelerator.device)
    return measured, work, session.accelerator.gather(peak).max().item()


def count_work(session: Session) -> estimate.Work:
    config, plan, done = session.config, session.plan, session.progress.epoch
    shared = math.ceil(len(session.test_prompts) / plan.num_processes)
    return estimate.Work(
        batches=plan.batches_per_epoch,
        micro_batches=plan.updates * session.algorithm.batch_count(plan.train_batch_size),
        eval_batches=math.ceil(shared / config.sample.test_batch_size),
        epochs=config.num_epochs - max(done, 0),
        evaluations=estimate.count_evaluations(done, config.num_epochs, config.eval_freq),
        ahead=bool(config.sample.async_depth),
    )


def count_as_done(small: Session) -> None:
    """All micro-steps of an update but those of a small one, so that it ends in a step of the
    optimizer, which takes memory of its own."""
    accelerator, algorithm = small.accelerator, small.algorithm
    own = algorithm.batch_count(small.plan.train_batch_size) * algorithm.losses_per_sample
    accelerator.step = accelerator.gradient_accumulation_steps - own


def refuse_outage(small: Session, scored: Scored) -> None:
    limit = small.config.max_failed_fraction
    if outage := describe_outage(small.accelerator, small.reward, scored.rewards, limit):
        raise RewardOutage(f"dry run: {outage}")


def evaluate_some(loop: Loop, small: Session, batches: int, of: int) -> None:
    prompts = small.test_prompts[: math.ceil(len(small.test_prompts) * batches / of)]
    # as the one before training, which ends the run where rewards fail
    loop.evaluate(replace(small, test_prompts=prompts), 0)


def tensor_bytes(value: Any) -> int:
    """Of all tensors in it."""
    if isinstance(value, Tensor):
        return value.nbytes
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, dict):
        value = list(value.values())
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def tell(session: Session, measured: estimate.Measured, work: estimate.Work, peak: float) -> None:
    device = session.accelerator.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        where = f"{total:.1f} GiB of the GPU"
    else:
        total = psutil.virtual_memory().total / 2**30
        where = f"{total:.1f} GiB of this machine"
    each = ", for each process" if session.plan.num_processes > 1 else ""
    logger.info("%-21s %.1f GiB at the peak%s, of %s", "memory", peak, each, where)
    logger.info(estimate.describe(measured, work))
