"""`--dry_run` of a training script: build all that the run would, measure a few batches, tell what
the run will take, and leave nothing behind."""

import logging
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from torch import Tensor

from flow_grpo.config.settings import to_json
from flow_grpo.config.trade import Unchecked
from flow_grpo.errors import RewardOutage, Stopped
from flow_grpo.run.building import advice_when_short
from flow_grpo.run.metrics import now, peak_memory_gb
from flow_grpo.run.resume import Start, find_start
from flow_grpo.run.session import BaseSession, describe_outage, is_due
from flow_grpo.run.stopping import StopRequested
from flow_grpo.show.console import duration

logger = logging.getLogger("flow_grpo")

ROUNDS = 2  # the first one, in which all warms up, is not counted


@dataclass(frozen=True)
class Measured:
    """Seconds that one process takes."""

    sample: float  # of a batch
    reward: float  # of a batch, while others are sampled
    train: float  # of a micro-batch over all its steps
    first_eval: float  # of an evaluation of one batch
    next_eval: float  # of each further batch
    warm_up: float  # once


@dataclass(frozen=True)
class Work:
    """What one process has to do, and the rounds of the run that are still to be done."""

    batches: int  # sampled in an epoch
    micro_batches: int  # trained in an epoch, each pass counted
    eval_batches: int
    epochs: int
    evaluations: int
    ahead: bool = False  # sample.async_depth


def reward_seconds(sampling: float, waiting: float, batches: int) -> float:
    """What a batch takes to score, where `batches` were sampled, each scored while the next one
    was, and after the last of them `waiting` seconds were left."""
    sample = sampling / batches
    return waiting if waiting <= sample else (waiting + (batches - 1) * sample) / batches


def epoch_seconds(measured: Measured, work: Work) -> dict[str, float]:
    sample, reward, batches = measured.sample, measured.reward, work.batches
    sampling = sample * batches
    waiting = reward + (batches - 1) * max(0.0, reward - sample)
    if work.ahead:  # the next epoch is sampled meanwhile
        waiting = max(0.0, waiting - sampling)
    return {
        "sampling": sampling,
        "waiting for rewards": waiting,
        "training": measured.train * work.micro_batches,
    }


def eval_seconds(measured: Measured, work: Work) -> float:
    return measured.first_eval + measured.next_eval * (work.eval_batches - 1)


def run_seconds(measured: Measured, work: Work) -> float:
    epoch = sum(epoch_seconds(measured, work).values())
    evaluations = work.evaluations * eval_seconds(measured, work)
    return measured.warm_up + work.epochs * epoch + evaluations


def count_evaluations(done: int, last: int, every: int) -> int:
    """How many evaluations are to come after `done` epochs; -1 if the one before training is due
    too."""
    epochs = range(max(done, 0) + 1, last + 1)
    return (done < 0) + sum(is_due(epoch, every, last) for epoch in epochs)


def describe(measured: Measured, work: Work) -> str:
    epoch, run = epoch_seconds(measured, work), run_seconds(measured, work)
    parts = " + ".join(f"{name} {duration(s)}" for name, s in epoch.items())
    evaluation = eval_seconds(measured, work)
    share = work.evaluations * evaluation / run if run else 0.0
    return "\n".join(
        [
            f"time per epoch        {duration(sum(epoch.values()))} = {parts}",
            f"time per evaluation   {duration(evaluation)}",
            f"time of the run       {duration(run)}: {count(work.epochs, 'epoch')} and "
            f"{count(work.evaluations, 'evaluation')}, {share:.0%} of the time; without "
            "checkpoints",
        ]
    )


def count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


@dataclass(frozen=True)
class Epoch:
    """A small epoch on one process, timed in parts."""

    seconds: tuple[float, float, float]  # sampling, waiting for rewards, training
    held: float  # bytes that a sampled batch keeps until it is trained
    remark: tuple[str, str] | None = None  # a line to tell, and how it begins


class Rehearsal(ABC):
    """Runs the functions of a training script, on a small part of its work."""

    tests: ClassVar[str]  # where a session has what it evaluates on
    evaluate: Callable[[BaseSession, int], dict[str, float]]

    @abstractmethod
    def build(self, config: Unchecked, num_processes: int | None = None) -> BaseSession:
        """As the run would build it, by `build_quietly`; planned for `num_processes`."""

    @abstractmethod
    def describe(self, session: BaseSession) -> str:
        """What an evaluation has."""

    @abstractmethod
    def advice(self, session: BaseSession) -> list[str]:
        """Options that need less memory."""

    @abstractmethod
    def count_work(self, session: BaseSession) -> Work:
        """By `work`."""

    @abstractmethod
    def shrink(self, session: BaseSession, folder: Path) -> BaseSession:
        """The same session with a small epoch, which writes to `folder`."""

    @abstractmethod
    def run_epoch(self, small: BaseSession, epoch: int) -> Epoch:
        """Sample, score and train."""

    def work(self, session: BaseSession, *, eval_batch_size: int, **counts: int) -> Work:
        """What one process still has to do; `counts` are those of an epoch."""
        config, done = session.config, session.progress.epoch
        shared = math.ceil(len(getattr(session, self.tests)) / session.plan.num_processes)
        return Work(
            eval_batches=math.ceil(shared / eval_batch_size),
            epochs=config.num_epochs - max(done, 0),
            evaluations=count_evaluations(done, config.num_epochs, config.eval_freq),
            **counts,
        )

    def dry_run(self, config: Unchecked, world_size: int | None = None) -> BaseSession:
        """Measure a few batches without writing anything.

        Args:
            world_size: Number of processes to plan for, if not the current one. The current
                processes measure batches of the planned size.
        """
        session = self.build(config, world_size)
        try:
            logger.info("%-21s %s; nothing is written now", "dry run", describe_start(session))
            logger.info(session.plan.describe())
            planned, here = session.plan.num_processes, session.accelerator.num_processes
            if planned != here:
                logger.info(
                    "%-21s %d processes, measured on %d: communication is not included, and "
                    "weights are sharded over the measured processes only",
                    *("planned for", planned, here),
                )
            every = session.config.eval_freq
            when = f"every {count(every, 'epoch')}" if every else "before and after the run"
            logger.info("%-21s %s, %s", "evaluation", self.describe(session), when)
            with (
                session.stop,
                tempfile.TemporaryDirectory() as folder,
                advice_when_short(self.advice(session)),
            ):
                tell(session, *self.measure(session, Path(folder)))
        except StopRequested as request:
            raise Stopped("the dry run was stopped; nothing was written") from request
        finally:
            session.close()
        session.accelerator.wait_for_everyone()
        session.accelerator.end_training()
        return session

    def measure(self, session: BaseSession, folder: Path) -> tuple[Measured, Work, float]:
        """Seconds of the parts, how often the run has them, and GiB of a process at its peak."""
        # it writes to a folder of its own, which the lock of the run does not cover
        small = replace(self.shrink(session, folder), dry=True, lock=None)
        work = self.count_work(session)
        done = self.count_work(small)
        logger.info(
            "%-21s %d of %d batches sampled, scored and trained, %d of %d of an evaluation, twice"
            "%s",
            *("measured", done.batches, work.batches),
            *(min(2, work.eval_batches), work.eval_batches),
            each_process(session.accelerator.num_processes),
        )
        first = max(session.progress.epoch, 0)
        totals = []
        for number in range(ROUNDS):
            epoch = self.run_epoch(small, first + number)
            evals = [
                self._evaluate(small, batches, work.eval_batches * session.plan.num_processes)
                for batches in (1, 2)[: work.eval_batches]
            ]
            totals.append(sum(epoch.seconds) + sum(evals))
        if epoch.remark:
            logger.info("%-21s %s", *epoch.remark)
        sampling, waiting, training = epoch.seconds
        measured = Measured(
            sample=sampling / done.batches,
            reward=reward_seconds(sampling, waiting, done.batches),
            train=training / done.micro_batches,
            first_eval=evals[0],
            next_eval=max(0.0, evals[-1] - evals[0]),
            warm_up=max(0.0, totals[0] - totals[-1]),
        )
        others = max(0, work.batches * (2 if work.ahead else 1) - done.batches)
        more = others * epoch.held / 2**30
        own = peak_memory_gb(session.accelerator.device) + more
        peak = torch.tensor([own], device=session.accelerator.device)
        return measured, work, session.accelerator.gather(peak).max().item()

    def _evaluate(self, small: BaseSession, batches: int, of: int) -> float:
        """Return the seconds of `batches` on each process, `of` all those of the plan."""
        every = getattr(small, self.tests)
        some = every[: math.ceil(len(every) * batches * small.plan.num_processes / of)]
        start = now(small.accelerator.device)
        self.evaluate(replace(small, **{self.tests: some}), 0)  # which ends where rewards fail
        return now(small.accelerator.device) - start


def build_quietly(
    config: Unchecked,
    check: Callable[[Unchecked], Any],
    build: Callable[..., BaseSession],
    num_processes: int | None = None,
) -> BaseSession:
    """A session, with nothing written: no folder, lock, tracker or cache."""
    settings = check(config)
    asked = to_json(settings)

    def look(accelerator: Accelerator, *_: Any) -> tuple[Start, None]:
        """A run of this name is found or refused as always; its lock is given back at once."""
        with ExitStack() as at_once:
            start, _ = find_start(accelerator, asked, at_once)
        return start, None

    written = {"log_with", "prompt_cache"} & {each.name for each in fields(settings)}
    settings = replace(settings, **dict.fromkeys(written, ""))
    return build(settings, begin=look, num_processes=num_processes)


def describe_start(session: BaseSession) -> str:
    done, folder = session.progress.epoch, session.folder
    if not folder.exists():
        source = f", which goes on from {session.config.resume}" if done >= 0 else ""
        return f"{folder} would be a new run{source}"
    return f"{folder} would go on after epoch {done}" if done >= 0 else f"{folder} would start anew"


def refuse_outage(small: BaseSession, rewards: dict[str, np.ndarray]) -> None:
    limit = small.config.max_failed_fraction
    if outage := describe_outage(small.accelerator, small.reward, rewards, limit):
        raise RewardOutage(f"dry run: {outage}")


def tensor_bytes(value: Any) -> int:
    """What all tensors in it take."""
    if isinstance(value, Tensor):
        return value.nbytes
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, dict):
        value = list(value.values())
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def tell(session: BaseSession, measured: Measured, work: Work, peak: float) -> None:
    device = session.accelerator.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        where = f"{total:.1f} GiB of the GPU"
    else:
        total = psutil.virtual_memory().total / 2**30
        where = f"{total:.1f} GiB of this machine"
    each = each_process(session.plan.num_processes)
    logger.info("%-21s %.1f GiB at the peak%s, of %s", "memory", peak, each, where)
    logger.info(describe(measured, work))


def each_process(number: int) -> str:
    """Return a suffix for per-process figures; empty for one process."""
    return f", on each of {number} processes" if number > 1 else ""
