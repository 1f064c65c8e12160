"""What every run has and does beside its algorithm: update, evaluate, write, save, stop."""

import logging
import math
import re
import time
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
from flow_grpo.config.saved import CONFIG
from flow_grpo.errors import RewardOutage, Stopped, UserError
from flow_grpo.rewards import TOTAL, WeightedReward, close_scorers
from flow_grpo.rewards.calling.guard import NO_PICTURE
from flow_grpo.rewards.frames import Sample
from flow_grpo.run import trackers
from flow_grpo.run.building import advice_when_short
from flow_grpo.run.checkpoint import STATE, Progress, newest_intact, save_checkpoint
from flow_grpo.run.distributed import on_all_or_none
from flow_grpo.run.finite import (
    clip_gradients,
    find_nonfinite,
    loss_scale,
    step_if_finite,
)
from flow_grpo.run.lock import RETRY, RunLock
from flow_grpo.run.metrics import Timer, TrainingStats, score_metrics
from flow_grpo.run.plan import Plan
from flow_grpo.run.policy import BasePolicy
from flow_grpo.run.snapshot import Ema
from flow_grpo.run.stopping import StopRequested, StopSignals
from flow_grpo.show.console import Lines, Pace, epoch_line, progress_bar
from flow_grpo.show.grid import still, strip
from flow_grpo.show.health import LEAST_SCALE, examine
from flow_grpo.show.page import write_at_end
from flow_grpo.show.reading import read_metrics

logger = logging.getLogger("flow_grpo")


@dataclass(kw_only=True)
class BaseSession:
    """What lives as long as a run, whatever it trains."""

    config: SharedFields
    accelerator: Accelerator
    reward: WeightedReward
    eval_reward: WeightedReward
    plan: Plan
    policy: BasePolicy
    optimizer: Optimizer
    learning_rate: Callable[[int], float]  # of the next update, by how many there were
    ema: Ema | None
    folder: Path
    progress: Progress
    stop: StopSignals
    lock: RunLock | None  # on the main process
    pace: Pace = field(default_factory=Pace)
    lines: Lines = field(default_factory=Lines)
    closed: bool = False
    dry: bool = False  # a small part of a run, to be measured

    def averaged(self) -> AbstractContextManager:
        """The weights to evaluate: their moving average, where there is one."""
        return self.ema.applied() if self.ema is not None else nullcontext()

    def held_out_share(self) -> float:
        """Return the share of test prompts or questions that are not trained on."""
        raise NotImplementedError

    def how_to_go_on(self) -> str:
        return f"go on with --resume {self.folder}"

    def close(self) -> None:
        """End the run, also one that was stopped: what trackers hold is written, and the report.
        A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        try:
            close_scorers(self.reward, self.eval_reward)
            trackers.close(self.accelerator)
            if self.lock is not None:
                write_at_end(self.folder, self.lock.check)
        finally:
            if self.lock is not None:
                self.lock.release()

    def check_lock(self) -> None:
        """Check before anything is written that the folder still exists and is this run's. Call it
        on all processes."""
        on_all_or_none(self.accelerator, self._check_folder)

    def _check_folder(self) -> None:
        if self.lock is None:
            return
        self.lock.check()
        until = time.monotonic() + RETRY
        while not (self.folder / CONFIG).is_file():
            if time.monotonic() > until:
                raise UserError(
                    f"the run directory {self.folder} was removed or replaced during the run: it "
                    f"has no {CONFIG}; restore it and resume, or start a new run"
                )
            time.sleep(0.1)  # a network disk may be unavailable for a moment

    def bar(self, items: Iterable, name: str, total: int | None = None) -> Iterable:
        shown = self.accelerator.is_main_process
        name = re.sub(r"^(epoch \d+ )?", "dry run: ", name) if self.dry else name
        return progress_bar(items, name, total, shown=shown, lines=self.lines)


AnySession = TypeVar("AnySession", bound=BaseSession)


def carry_out(
    session: AnySession, train: Callable[[AnySession], None], advice: list[str]
) -> AnySession:
    """Train to the end, or until a signal; then everything is saved. `advice`: what needs less
    memory."""
    logger.info("run directory         %s", session.folder)
    logger.info(session.plan.describe())
    done, epochs = session.progress.epoch, session.config.num_epochs
    if done >= epochs:
        logger.info(
            "it has all its %d epochs; for more, add --config.num_epochs=%d", done, 2 * done
        )
    try:
        with session.stop:
            try:
                with advice_when_short(advice):
                    train(session)
                session.check_lock()
            except StopRequested as request:
                # else the epoch is redone
                if session.progress.record.get("step") == session.progress.step:
                    save(session)
                where = f"in epoch {session.progress.epoch + 1}"
                raise Stopped(f"stopped {where}; {session.how_to_go_on()}") from request
            finally:
                session.close()
            session.accelerator.wait_for_everyone()
            session.accelerator.end_training()
    except KeyboardInterrupt as interrupt:  # the second: it does not wait for the step at hand
        raise Stopped(f"stopped at once; {session.how_to_go_on()}") from interrupt
    if session.stop.received:
        raise Stopped(f"stopped at the end: the last epoch and the report are in {session.folder}")
    if session.progress.skipped and session.accelerator.is_main_process:
        logger.warning(
            "%d of %d updates were skipped because of a NaN or infinite gradient",
            *(session.progress.skipped, session.progress.step),
        )
    logger.info("finished: %s/report.html to look at, checkpoints/latest to use", session.folder)
    return session


def take_update(session: BaseSession, stats: TrainingStats) -> None:
    """Take the optimizer step once the gradients of all micro-batches are accumulated.

    An update with a non-finite gradient is skipped on all processes: weights, optimizer state,
    moving average and learning rate do not change. Too many in a row end the run.
    """
    accelerator, progress = session.accelerator, session.progress
    max_norm = session.config.train.max_grad_norm
    norm = clip_gradients(accelerator, session.policy.parameters(), max_norm)
    applied = step_if_finite(accelerator, session.optimizer, norm)
    progress.step += 1
    if applied:
        progress.skipped_in_a_row = 0
        session.policy.moved()
        if session.ema is not None:
            session.ema.update(progress.applied)
    else:
        progress.skipped += 1
        loss = accelerator.reduce(stats.update_loss().to(accelerator.device))
        _report_skipped(session, norm, loss.item())
    scale = loss_scale(accelerator)
    stats.end_update(norm, max_norm, applied=applied, loss_scale=scale)
    session.stop.check()


def set_learning_rates(session: BaseSession) -> None:
    """Set the learning rates of the next update. Call it before the backward passes: DeepSpeed
    steps within the last one."""
    rate = session.learning_rate(session.progress.applied)
    for group in session.optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def _report_skipped(session: BaseSession, norm: float, loss: float) -> None:
    """Log the skipped update; raise a UserError after too many in a row."""
    progress, scale = session.progress, loss_scale(session.accelerator)
    of_loss = "the loss is finite" if math.isfinite(loss) else f"the loss is {loss}"
    cause = f"the gradient norm is {norm} and {of_loss}"
    if scale is not None and scale >= LEAST_SCALE:  # usual at the start of fp16 training
        logger.info("update %d was skipped: %s; loss scale %g", progress.step, cause, scale)
        return
    progress.skipped_in_a_row += 1
    limit = session.config.train.max_skipped_updates
    if session.accelerator.is_main_process:
        row = progress.skipped_in_a_row
        logger.warning("update %d was skipped (%d in a row): %s", progress.step, row, cause)
    if 0 < limit <= progress.skipped_in_a_row:
        half = session.config.mixed_precision != "no"
        raise UserError(
            f"{progress.skipped_in_a_row} updates in a row were skipped, up to update "
            f"{progress.step} (train.max_skipped_updates={limit}): {cause}; {last_good(session)}; "
            "the same settings would fail again: resume with a smaller train.learning_rate"
            f"{' or mixed_precision=no' if half else ''}"
        )


def last_good(session: BaseSession) -> str:
    """Return a phrase that names the last checkpoint. Call it on all processes."""
    found = None
    if session.accelerator.is_main_process:
        found = newest_intact(session.folder / "checkpoints")
    found = gather_object([found])[0]
    return f"the last good checkpoint is {found}" if found else "there is no checkpoint yet"


def training_metrics(session: BaseSession, stats: TrainingStats) -> dict[str, float]:
    metrics = stats.metrics(session.accelerator)
    return {**metrics, "train/lr": session.optimizer.param_groups[0]["lr"]}


def describe_outage(
    accelerator: Accelerator,
    reward: WeightedReward,
    scores: dict[str, np.ndarray],  # gathered: the same on all processes
    limit: float,
) -> str | None:
    """Which reward failed for more than a share `limit` of the samples, and why; None if none did.

    Call it on all processes: the error may have happened on any. Raises a UserError if the samples
    themselves are non-finite, which is not the fault of a reward.
    """
    for name in reward.weights:
        failed = np.isnan(scores[name])
        if failed.mean() > limit or failed.all():
            errors = gather_object([reward.last_errors.get(name, "")])
            if NO_PICTURE.reason in errors:
                raise UserError(
                    f"{failed.sum()} of {len(failed)} {reward.kind}s have NaN or infinite pixels "
                    f"(max_failed_fraction={limit:g}): the weights or activations of the model "
                    "overflow; use mixed_precision=bf16 or no, or an earlier checkpoint and a "
                    "smaller train.learning_rate"
                )
            last = next((error for error in errors if error), "none recorded")
            return (
                f"reward {name!r} gave no score for {failed.sum()} of {len(failed)} {reward.kind}s "
                f"(max_failed_fraction={limit:g}); last error: {last}"
            )
    reward.forget_errors()
    return None


def stop_at_outage(session: BaseSession, epoch: int, rewards: dict[str, np.ndarray]) -> None:
    """Where too many of the scores of an epoch are missing; saves first."""
    limit = session.config.max_failed_fraction
    outage = describe_outage(session.accelerator, session.reward, rewards, limit)
    if outage:
        raise RewardOutage(
            f"epoch {epoch}: {outage}; saved {save(session)}; {session.how_to_go_on()}"
        )


def evaluation_metrics(
    session: BaseSession, epoch: int, scores: dict[str, np.ndarray], sets: Sequence[str] = ()
) -> dict[str, float]:
    limit = session.config.max_failed_fraction
    outage = describe_outage(session.accelerator, session.eval_reward, scores, limit)
    if outage and epoch == 0:
        raise RewardOutage(f"evaluation before training: {outage}")
    metrics = score_metrics("eval", scores, sets)
    metrics["data/held_out"] = session.held_out_share()
    if outage:
        logger.warning("evaluation after epoch %d: %s", epoch, outage)
        metrics[f"eval/{TOTAL}"] = math.nan  # what is left is no measure of the model
    return metrics


def is_due(epoch: int, every: int, last: int) -> bool:
    return epoch == last or (every > 0 and epoch % every == 0)


def finish_epoch(
    session: BaseSession, epoch: int, metrics: dict[str, float], timer: Timer, *, ends: bool = False
) -> None:
    """Write down what the epoch did, so that a run that is killed goes on from here. `ends`: the
    run does, before its time."""
    config, progress = session.config, session.progress
    session.check_lock()
    score = metrics.get(f"eval/{TOTAL}", math.nan)
    is_best = score > (-math.inf if progress.best is None else progress.best)  # NaN never is
    progress.epoch = epoch
    progress.best = score if is_best else progress.best
    last = epoch if ends else config.num_epochs
    progress.kept = epoch > 0 and (is_best or is_due(epoch, config.save_freq, last))
    progress.record = trackers.record(epoch, progress.step, metrics, timer)
    if progress.kept or (epoch % config.state_freq == 0 and can_save(session)):
        with timer("save"):
            save(session, best=is_best)
    log(session, trackers.record(epoch, progress.step, metrics, timer))


def can_save(session: BaseSession) -> bool:
    """Torch takes an empty step of Adam to collect the state of an FSDP optimizer that has taken
    none, which changes its first real one."""
    fsdp = session.accelerator.distributed_type == DistributedType.FSDP
    return session.progress.applied > 0 or not fsdp


def save(session: BaseSession, *, best: bool = False) -> Path:
    """Write a checkpoint of everything as it is now; returns its folder."""
    accelerator, policy = session.accelerator, session.policy
    session.check_lock()
    average = session.ema.named() if session.ema is not None else {}
    if found := find_nonfinite(policy.trained(), session.optimizer, average):
        raise UserError(
            f"no checkpoint of step {session.progress.step} was written: {found} contains NaN or "
            f"infinite values; {last_good(session)}"
        )

    def write(folder: Path) -> None:
        accelerator.save_state(str(folder / STATE), exclude_frozen_parameters=True)
        policy.save(folder)
        if session.ema is not None:
            with session.ema.applied():
                policy.save(folder, prefix="ema_")
        if accelerator.is_main_process:
            session.progress.write(folder)

    return save_checkpoint(
        accelerator,
        session.folder / "checkpoints",
        session.progress.step,
        write,
        keep=session.config.num_checkpoint_limit,
        best=best,
    )


def log(session: BaseSession, record: dict[str, float | None]) -> None:
    main = session.accelerator.is_main_process
    metrics = session.folder / "metrics.jsonl"
    on_all_or_none(session.accelerator, lambda: main and trackers.append_metrics(metrics, record))
    if main:
        say_health(session.folder, record["epoch"])
    trackers.log(session.accelerator, record)
    last, rewards = session.config.num_epochs, session.reward.weights
    left = session.pace.left(record, last)
    logger.info(epoch_line(record, rewards, session.eval_reward.weights, last, left))


def say_health(folder: Path, epoch: int) -> None:
    """What began in this epoch; the rest was said when it began."""
    try:
        found = examine(read_metrics(folder))
    except UserError as error:  # a file that was damaged is no reason to stop
        logger.warning("health is not known: %s", error)
        return
    for finding in found:
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
    """Write some samples with their scores to samples/, and images to the trackers. Call it on all
    processes; only the main process writes."""
    main = session.accelerator.is_main_process
    folder = session.folder / "samples" / f"{kind}-{epoch:05d}"
    session.check_lock()
    on_all_or_none(
        session.accelerator,
        lambda: main and trackers.save_samples(folder, images, sources, **columns),
    )
    if not main:
        return
    step = session.progress.step
    columns = {name: values for name, values in columns.items() if name != "group"}
    shown = [strip([*own, still(i)]) if own else i for i, own in zip_longest(images, sources)]
    trackers.log_pictures(session.accelerator, kind, shown, columns, epoch=epoch, step=step)
