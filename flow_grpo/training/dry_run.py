"""Dry run (`--dry_run`): build the session, measure a few batches, estimate time and memory.

Nothing is written. Everything is measured twice, because the first round includes warm-up.
"""

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

from flow_grpo.config.fields import SharedFields
from flow_grpo.config.settings import to_json
from flow_grpo.config.trainer_spec import UncheckedConfig
from flow_grpo.errors import RewardOutage, StoppedBySignal
from flow_grpo.training.builder import suggest_on_oom
from flow_grpo.training.metrics import Timer, peak_memory_gb
from flow_grpo.training.resume import RunStart, find_start
from flow_grpo.training.session import BaseSession, find_outage
from flow_grpo.training.stop_signals import StopRequested
from flow_grpo.training.time_estimate import (
    MeasuredTimes,
    RemainingWork,
    count_evaluations,
    describe_times,
    estimate_reward_seconds,
    pluralize,
)

logger = logging.getLogger("flow_grpo")

NUM_ROUNDS = 2  # the first is warm-up


@dataclass(frozen=True)
class MeasuredEpoch:
    """Measurements of a reduced epoch on one process."""

    seconds: dict[str, float]  # "sample", "reward_wait", "train"
    bytes_per_batch: float  # memory that a sampled batch occupies until it is trained on
    remark: tuple[str, str] | None = None  # label and text of an additional line of output


class DryRun(ABC):
    """Runs the functions of a training script on a small part of their work.

    Attributes:
        test_set: Name of the session's attribute that holds the test set.
        evaluate: Evaluates a session after the given epoch.
    """

    test_set: ClassVar[str]
    evaluate: Callable[[BaseSession, int], dict[str, float]]

    @abstractmethod
    def build(self, config: UncheckedConfig, num_processes: int | None = None) -> BaseSession:
        """Build the session with `build_without_writing`, planned for `num_processes`."""

    @abstractmethod
    def describe(self, session: BaseSession) -> str:
        """Return a description of the work of an evaluation."""

    @abstractmethod
    def advice(self, session: BaseSession) -> list[str]:
        """Return settings that reduce memory use."""

    @abstractmethod
    def count_work(self, session: BaseSession) -> RemainingWork:
        """Return the remaining work; implementations call `work`."""

    @abstractmethod
    def shrink(self, session: BaseSession, folder: Path) -> BaseSession:
        """Return the session with a reduced epoch, which writes to `folder`."""

    @abstractmethod
    def run_epoch(self, small: BaseSession, epoch: int) -> MeasuredEpoch:
        """Sample, score and train a reduced epoch."""

    def work(self, session: BaseSession, *, eval_batch_size: int, **counts: int) -> RemainingWork:
        """Return the remaining work; `counts` are the `RemainingWork` fields of an epoch."""
        config, done = session.config, session.progress.epoch
        per_process = math.ceil(len(getattr(session, self.test_set)) / session.plan.num_processes)
        return RemainingWork(
            eval_batches=math.ceil(per_process / eval_batch_size),
            epochs=config.num_epochs - max(done, 0),
            evaluations=count_evaluations(
                done, config.num_epochs, config.eval_freq, before=config.eval_before_training
            ),
            **counts,
        )

    def dry_run(self, config: UncheckedConfig, world_size: int | None = None) -> BaseSession:
        """Measure a few batches without writing anything.

        Args:
            config: Settings of the run.
            world_size: Number of processes to plan for, if not the current one. The current
                processes measure batches of the planned size.
        """
        session = self.build(config, world_size)
        try:
            logger.info("%-21s %s; nothing is written now", "dry run", describe_run_start(session))
            logger.info(session.plan.describe())
            planned, here = session.plan.world_size, session.accelerator.num_processes
            if planned != here:
                logger.info(
                    "%-21s %d processes, measured on %d: communication is not included, and "
                    "weights are sharded over the measured processes only",
                    "planned for",
                    planned,
                    here,
                )
            when = describe_evaluations(session.config)
            logger.info("%-21s %s, %s", "evaluation", self.describe(session), when)
            with (
                session.stop,
                tempfile.TemporaryDirectory() as folder,
                suggest_on_oom(self.advice(session)),
            ):
                log_estimate(session, *self.measure(session, Path(folder)))
        except StopRequested as request:
            raise StoppedBySignal("the dry run was stopped; nothing was written") from request
        finally:
            session.close()
        session.accelerator.wait_for_everyone()
        session.accelerator.end_training()
        return session

    def measure(
        self, session: BaseSession, folder: Path
    ) -> tuple[MeasuredTimes, RemainingWork, float]:
        """Return the measured times, the remaining work and the peak memory of a process in GiB.

        Args:
            folder: Directory that the reduced session writes to.
        """
        session.reward.exclude_interactive()
        for name in session.reward.interactive_scorers:
            logger.info("%-21s asks nobody now; waiting for people is not included", name)
        # the run's lock does not cover `folder`
        small = replace(self.shrink(session, folder), is_dry_run=True, lock=None)
        work, done = self.count_work(session), self.count_work(small)
        logger.info(
            "%-21s %d of %d batches sampled, scored and trained, %d of %d of an evaluation, twice"
            "%s",
            "measured",
            done.batches,
            work.batches,
            min(2, work.eval_batches),
            work.eval_batches,
            per_process_suffix(session.accelerator.num_processes),
        )
        first = max(session.progress.epoch, 0)
        all_eval_batches = work.eval_batches * session.plan.num_processes
        totals = []
        for number in range(NUM_ROUNDS):
            epoch = self.run_epoch(small, first + number)
            evals = [
                self._time_evaluation(small, batches, all_eval_batches)
                for batches in (1, 2)[: work.eval_batches]
            ]
            totals.append(sum(epoch.seconds.values()) + sum(evals))
        if epoch.remark:
            logger.info("%-21s %s", *epoch.remark)
        sampling, waiting = epoch.seconds["sample"], epoch.seconds["reward_wait"]
        measured = MeasuredTimes(
            sample=sampling / done.batches,
            reward=estimate_reward_seconds(sampling, waiting, done.batches),
            train=epoch.seconds["train"] / done.micro_batches,
            first_eval=evals[0],
            next_eval=max(0.0, evals[-1] - evals[0]),
            warm_up=max(0.0, totals[0] - totals[-1]),
        )
        stored = work.batches * (2 if work.ahead else 1)  # batches in memory at the same time
        unmeasured_gb = max(0, stored - done.batches) * epoch.bytes_per_batch / 2**30
        own_peak = peak_memory_gb(session.accelerator.device) + unmeasured_gb
        peak = torch.tensor([own_peak], device=session.accelerator.device)
        return measured, work, session.accelerator.gather(peak).max().item()

    def _time_evaluation(self, small: BaseSession, batches: int, total: int) -> float:
        """Return the seconds to evaluate `batches` per process, of `total` over all processes."""
        tests = getattr(small, self.test_set)
        part = tests[: math.ceil(len(tests) * batches * small.plan.num_processes / total)]
        timer = Timer(small.accelerator.device)
        with timer("eval"):
            self.evaluate(replace(small, **{self.test_set: part}), 0)  # raises if rewards fail
        return timer.seconds["eval"]


def build_without_writing(
    config: UncheckedConfig,
    check: Callable[[UncheckedConfig], Any],
    build: Callable[..., BaseSession],
    num_processes: int | None = None,
) -> BaseSession:
    """Build a session without writing a run directory, lock, tracker or cache.

    Args:
        config: Settings of the run.
        check: Validates the settings.
        build: `build_session` of the trainer.
        num_processes: World size to plan for if not the current one.
    """
    settings = check(config)
    saved_settings = to_json(settings)

    def find_without_lock(accelerator: Accelerator, *_: Any) -> tuple[RunStart, None]:
        """Find or reject the run as usual, but release its lock immediately."""
        with ExitStack() as cleanup:
            start, _ = find_start(accelerator, saved_settings, cleanup)
        return start, None

    writing_fields = {"log_with", "prompt_cache"} & {each.name for each in fields(settings)}
    settings = replace(settings, **dict.fromkeys(writing_fields, ""))
    return build(settings, begin=find_without_lock, num_processes=num_processes)


def describe_evaluations(config: SharedFields) -> str:
    """Return when a run is evaluated."""
    if config.eval_freq:
        every = f"every {pluralize(config.eval_freq, 'epoch')}"
        return every if config.eval_before_training else f"{every}, not before the first"
    return "before and after the run" if config.eval_before_training else "after the run"


def describe_run_start(session: BaseSession) -> str:
    """Return where the run would start: new, resumed, or from another run's checkpoint."""
    done, folder = session.progress.epoch, session.folder
    if not folder.exists():
        source = f" from {session.config.resume}" if done >= 0 else ""
        return f"{folder} would be a new run{source}"
    if done >= 0:
        return f"{folder} would resume after epoch {done}"
    return f"{folder} would start from the beginning"


def raise_on_outage(small: BaseSession, rewards: dict[str, np.ndarray]) -> None:
    """Raise RewardOutage if too many scores of a reduced epoch are missing."""
    limit = small.config.max_failed_fraction
    if outage := find_outage(small.accelerator, small.reward, rewards, limit):
        raise RewardOutage(f"dry run: {outage}")


def tensor_bytes(value: Any) -> int:
    """Return the total size of all tensors in a nested structure."""
    if isinstance(value, Tensor):
        return value.nbytes
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, dict):
        value = list(value.values())
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def log_estimate(
    session: BaseSession, measured: MeasuredTimes, work: RemainingWork, peak: float
) -> None:
    """Log the estimated times, and the peak memory in GiB next to what is available."""
    device = session.accelerator.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        where = f"{total:.1f} GiB of the GPU"
    else:
        total = psutil.virtual_memory().total / 2**30
        where = f"{total:.1f} GiB of this machine"
    each = per_process_suffix(session.plan.world_size)
    logger.info("%-21s %.1f GiB at the peak%s, of %s", "memory", peak, each, where)
    logger.info(describe_times(measured, work))


def per_process_suffix(number: int) -> str:
    """Return a suffix for per-process figures; empty for one process."""
    return f", on each of {number} processes" if number > 1 else ""
