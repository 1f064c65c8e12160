"""State of a run and the operations shared by all trainers: evaluate, log, save, stop."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from PIL import Image
from torch.optim import Optimizer

from flow_grpo.config.fields import SharedFields
from flow_grpo.config.saved_config import CONFIG_FILE
from flow_grpo.data.seeding import seed_global_generators
from flow_grpo.errors import RewardOutage, StoppedBySignal, UserError
from flow_grpo.report.console import (
    ProgressLines,
    Record,
    RemainingTime,
    format_epoch,
    progress_bar,
)
from flow_grpo.report.grid import concatenate_images, middle_frame
from flow_grpo.report.health import run_checks
from flow_grpo.report.page import write_final_report
from flow_grpo.report.run_reader import read_metrics
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.frames import Sample
from flow_grpo.rewards.workers.guard import NON_FINITE_IMAGE
from flow_grpo.training import trackers
from flow_grpo.training.builder import suggest_on_oom
from flow_grpo.training.checkpoint import Progress, describe_latest_intact
from flow_grpo.training.checkpoint_writer import BackgroundWriter
from flow_grpo.training.distributed import raise_on_all_ranks
from flow_grpo.training.lock import RETRY_SECONDS, RunLock, retry
from flow_grpo.training.metrics import Timer, TrainingStats, score_metrics
from flow_grpo.training.plan import Plan
from flow_grpo.training.policy import BasePolicy
from flow_grpo.training.saving import finish_saving, save_session, start_saving
from flow_grpo.training.snapshot import Ema
from flow_grpo.training.stop_signals import StopRequested, StopSignals
from flow_grpo.training.time_estimate import is_due

logger = logging.getLogger("flow_grpo")


@dataclass(kw_only=True)
class BaseSession:
    """State that lives as long as a run; subclasses add models and data."""

    config: SharedFields
    accelerator: Accelerator
    reward: WeightedReward
    eval_reward: WeightedReward
    plan: Plan
    policy: BasePolicy
    optimizer: Optimizer
    learning_rate: Callable[[int], float]  # of the next update, by the number of applied ones
    ema: Ema | None
    folder: Path
    progress: Progress
    stop: StopSignals
    lock: RunLock | None  # on the main process only
    remaining_time: RemainingTime = field(default_factory=RemainingTime)
    progress_lines: ProgressLines = field(default_factory=ProgressLines)
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    copies_fit: bool = True  # whether a copy of the state fits in host memory
    closed: bool = False
    records: list[Record] | None = None  # rows of metrics.jsonl once read, on the main process
    is_dry_run: bool = False  # only a small part of a run is executed, to measure it

    def ema_weights(self) -> AbstractContextManager:
        """Return a context in which the EMA weights, if there are any, replace the trained ones."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    def held_out_share(self) -> float:
        """Return the fraction of test prompts or questions that are not in the training set."""
        raise NotImplementedError

    def resume_hint(self) -> str:
        """Return the hint of errors after which the run can be resumed."""
        return f"resume with --resume {self.folder}"

    def describe_last_checkpoint(self) -> str:
        """Return a phrase that names the newest intact checkpoint. Call it on all processes."""
        self.writer.join()
        return describe_latest_intact(self.accelerator, self.folder / "checkpoints")

    def close(self) -> None:
        """Complete the last checkpoint, write the report and release the lock. Idempotent."""
        if self.closed:
            return
        self.closed = True
        try:
            if problem := self.writer.wait():  # after another error
                logger.error(problem)
            close_scorers(self.reward, self.eval_reward)
            trackers.close_trackers(self.accelerator)
            if self.lock is not None:
                write_final_report(self.folder, self.lock.check)
        finally:
            if self.lock is not None:
                self.lock.release()

    def check_lock(self) -> None:
        """Raise a UserError if this run lost its directory. Call it on all ranks before writing."""
        raise_on_all_ranks(self.accelerator, self.check_folder)

    def check_folder(self) -> None:
        """Raise a UserError if the lock was taken over or config.json is gone, on the main process.

        The other processes have no lock, and do nothing.
        """
        if self.lock is None:
            return
        self.lock.check()
        if not retry((self.folder / CONFIG_FILE).is_file, RETRY_SECONDS):
            raise UserError(
                f"was removed or replaced during the run: it has no {CONFIG_FILE}",
                field=self.folder,
                hint="restore it and resume, or start a new run",
            )

    def bar(self, items: Iterable, name: str, total: int | None = None) -> Iterable:
        """Iterate over `items` with a progress bar, which the main process shows."""
        shown = self.accelerator.is_main_process
        name = re.sub(r"^(epoch \d+ )?", "dry run: ", name) if self.is_dry_run else name
        return progress_bar(items, name, total, shown=shown, lines=self.progress_lines)


AnySession = TypeVar("AnySession", bound=BaseSession)


def run_training(
    session: AnySession, train: Callable[[AnySession], None], advice: list[str]
) -> AnySession:
    """Train to the end or until a signal, then save, report and clean up.

    Args:
        session: State of the run.
        train: The training loop.
        advice: Settings that reduce memory use, suggested if the run goes out of memory.

    Raises:
        StoppedBySignal: If a signal stopped the run; it can be resumed.
    """
    logger.info("run directory         %s", session.folder)
    logger.info(session.plan.describe())
    done, epochs = session.progress.epoch, session.config.num_epochs
    if done >= epochs:
        logger.info(
            "all %d epochs are done; to train longer, add --config.num_epochs=%d", done, 2 * done
        )
    try:
        with session.stop:
            try:
                seed_custom_code(session)
                with suggest_on_oom(advice):
                    train(session)
                session.check_lock()
            except StopRequested as request:
                # an unfinished epoch is not saved: it is trained again after a resume
                if session.progress.record.get("step") == session.progress.step:
                    save_session(session)
                finish_saving(session)
                raise StoppedBySignal(
                    f"stopped in epoch {session.progress.epoch + 1}", hint=session.resume_hint()
                ) from request
            finally:
                session.close()
            session.accelerator.wait_for_everyone()
            session.accelerator.end_training()
    except KeyboardInterrupt as interrupt:  # a second Ctrl-C does not wait for the current step
        raise StoppedBySignal("stopped immediately", hint=session.resume_hint()) from interrupt
    if session.stop.received:
        raise StoppedBySignal(f"stopped after the last epoch; the results are in {session.folder}")
    if session.progress.skipped and session.accelerator.is_main_process:
        logger.warning(
            "%d of %d updates were skipped because of a NaN or infinite gradient",
            session.progress.skipped,
            session.progress.step,
        )
    logger.info("finished: %s/report.html (weights: checkpoints/latest)", session.folder)
    return session


def training_metrics(session: BaseSession, stats: TrainingStats) -> dict[str, float]:
    """Return the `train/` metrics of an epoch. Call it on all processes."""
    metrics = stats.metrics(session.accelerator)
    return {**metrics, "train/lr": session.optimizer.param_groups[0]["lr"]}


def find_outage(
    accelerator: Accelerator,
    reward: WeightedReward,
    scores: dict[str, np.ndarray],  # gathered: the same on all processes
    limit: float,
) -> str | None:
    """Return which reward failed on too many samples and why, or None. Call it on all processes.

    Args:
        reward: The reward that gave the scores.
        scores: Scores of all processes, (N,) each; NaN where scoring failed.
        limit: Largest tolerated fraction of failed scores (`max_failed_fraction`).

    Raises:
        UserError: If the samples themselves are not finite, which is not a failure of the reward.
    """
    for name in reward.weights:
        failed = np.isnan(scores[name])
        if failed.mean() > limit or failed.all():
            errors = gather_object([reward.last_errors.get(name, "")])
            if NON_FINITE_IMAGE.reason in errors:
                raise UserError(
                    f"was exceeded: {failed.sum()} of {len(failed)} {reward.kind}s have NaN or "
                    "infinite pixels because weights or activations overflow",
                    field="max_failed_fraction",
                    value=limit,
                    hint="use mixed_precision=bf16 or no, or an earlier checkpoint and a smaller "
                    "train.learning_rate",
                )
            last = next((error for error in errors if error), "none recorded")
            return (
                f"reward {name!r} gave no score for {failed.sum()} of {len(failed)} {reward.kind}s "
                f"(max_failed_fraction={limit:g}); last error: {last}"
            )
    reward.clear_errors()
    return None


def stop_on_outage(session: BaseSession, epoch: int, rewards: dict[str, np.ndarray]) -> None:
    """Save a checkpoint and raise RewardOutage if too many scores of an epoch are missing."""
    limit = session.config.max_failed_fraction
    outage = find_outage(session.accelerator, session.reward, rewards, limit)
    if outage:
        raise RewardOutage(
            f"epoch {epoch}: {outage}; saved {save_session(session)}", hint=session.resume_hint()
        )


def evaluation_metrics(
    session: BaseSession, epoch: int, scores: dict[str, np.ndarray], sets: Sequence[str] = ()
) -> dict[str, float]:
    """Return the metrics of an evaluation: `eval/` and `data/held_out`. Call it on all processes.

    Args:
        epoch: Epoch after which the evaluation runs; 0 is the one before training.
        scores: Scores of all test samples, (N,) each.
        sets: Prompt set of each sample, if there are several.

    Raises:
        RewardOutage: If too many scores are missing before training.
    """
    limit = session.config.max_failed_fraction
    outage = find_outage(session.accelerator, session.eval_reward, scores, limit)
    if outage and epoch == 0:
        raise RewardOutage(f"evaluation before training: {outage}")
    metrics = score_metrics("eval", scores, sets)
    metrics["data/held_out"] = session.held_out_share()
    if outage:
        logger.warning("evaluation after epoch %d: %s", epoch, outage)
        metrics[f"eval/{TOTAL}"] = math.nan  # the remaining scores are not representative
    return metrics


def finish_epoch(
    session: BaseSession, epoch: int, metrics: dict[str, float], timer: Timer, *, ends: bool = False
) -> None:
    """Record a finished epoch: start saving a checkpoint if due, then log its metrics.

    After the last epoch, it waits until the checkpoint is complete.

    Args:
        session: State of the run.
        epoch: Number of finished epochs.
        metrics: Metrics of the epoch, to which the duration of the previous save is added.
        timer: Times of the phases of the epoch, to which that of saving is added.
        ends: Whether the run ends with this epoch although more are configured.
    """
    config, progress = session.config, session.progress
    session.check_lock()
    metrics["perf/save_seconds"] = session.writer.seconds
    score = metrics.get(f"eval/{TOTAL}", math.nan)
    is_best = score > (-math.inf if progress.best is None else progress.best)  # False for NaN
    progress.epoch = epoch
    progress.best = score if is_best else progress.best
    last = epoch if ends else config.num_epochs
    progress.kept = epoch > 0 and (is_best or is_due(epoch, config.save_freq, last))
    progress.record = trackers.build_record(epoch, progress.step, metrics, timer)
    if progress.kept or (epoch % config.state_freq == 0 and can_save_optimizer(session)):
        with timer("save"):
            start_saving(session, best=is_best)
    log(session, trackers.build_record(epoch, progress.step, metrics, timer))
    seed_custom_code(session)
    if epoch >= last:
        finish_saving(session)


def seed_custom_code(session: BaseSession) -> None:
    """Seed the global random generators for the next epoch, so that checkpoints need no state."""
    # groups of processes that only train together sample on their own
    process = session.accelerator.process_index // session.plan.context_parallel
    seed_global_generators(session.config.seed, session.progress.epoch + 1, process)


def can_save_optimizer(session: BaseSession) -> bool:
    """Return whether saving the optimizer leaves it unchanged.

    To collect the state of an FSDP optimizer that has not stepped yet, torch takes an empty Adam
    step, which changes the first real one.
    """
    fsdp = session.accelerator.distributed_type == DistributedType.FSDP
    return session.progress.applied > 0 or not fsdp


def log(session: BaseSession, record: dict[str, float | None]) -> None:
    """Write the metrics of an epoch to metrics.jsonl, the trackers and the console.

    Call it on all processes.
    """
    main = session.accelerator.is_main_process
    metrics = session.folder / "metrics.jsonl"
    raise_on_all_ranks(
        session.accelerator, lambda: main and trackers.append_metrics(metrics, record)
    )
    if main:
        update_records(session, record)
        log_health(session.records or [], record["epoch"])
    trackers.log_metrics(session.accelerator, record)
    last, rewards = session.config.num_epochs, session.reward.weights
    left = session.remaining_time.left(record, last)
    logger.info(format_epoch(record, rewards, session.eval_reward.weights, last, left))


def update_records(session: BaseSession, record: Record) -> None:
    """Add `record`, the last row of metrics.jsonl, to the rows that the session keeps.

    The file is read once per run, because reading it in every epoch takes quadratic time.
    """
    if session.records is not None:
        session.records.append(record)
        return
    try:
        session.records = read_metrics(session.folder)
    except UserError as error:  # a damaged metrics file is no reason to stop
        logger.warning("cannot check the run's health: %s", error)


def log_health(records: Sequence[Record], epoch: int) -> None:
    """Warn about health findings that start in this epoch; earlier ones have been logged."""
    for finding in run_checks(records):
        if finding.epoch == epoch:
            logger.warning("health, epoch %d: %s; %s", epoch, finding.text, finding.advice)


def write_samples(
    session: BaseSession,
    kind: str,
    epoch: int,
    images: list[Sample],
    sources: Sequence[Sequence[Image.Image]] = (),
    **columns: Sequence,
) -> None:
    """Write samples with their scores to samples/ and their images to the trackers.

    Call it on all processes; only the main process writes.

    Args:
        session: State of the run.
        kind: "train" or "eval".
        epoch: Number in the name of the directory.
        images: Samples to write; None for one without an image.
        sources: Input images of each sample, for image editing.
        columns: Further columns of samples.jsonl, such as `prompt` and the scores.
    """
    main = session.accelerator.is_main_process
    folder = session.folder / "samples" / f"{kind}-{epoch:05d}"
    session.check_lock()
    raise_on_all_ranks(
        session.accelerator,
        lambda: main and trackers.save_samples(folder, images, sources, **columns),
    )
    if not main:
        return
    step = session.progress.step
    columns = {name: values for name, values in columns.items() if name != "group"}
    shown = [
        concatenate_images([*own, middle_frame(i)]) if own else i
        for i, own in zip_longest(images, sources)
    ]
    trackers.log_sample_images(session.accelerator, kind, shown, columns, epoch=epoch, step=step)
