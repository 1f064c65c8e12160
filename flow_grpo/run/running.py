"""What every loop does beside its algorithm: stop, save, update, and tell what went wrong."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from flow_grpo.errors import RewardOutage, Stopped, UserError
from flow_grpo.rewards import TOTAL
from flow_grpo.run.base import Run
from flow_grpo.run.memory import advice_when_short
from flow_grpo.run.outage import describe_outage
from flow_grpo.run.stopping import StopRequested
from flow_grpo.run.writing import save
from flow_grpo.training.metrics import TrainingStats, score_metrics

logger = logging.getLogger("flow_grpo")
AnyRun = TypeVar("AnyRun", bound=Run)


def carry_out(session: AnyRun, train: Callable[[AnyRun], None], advice: list[str]) -> AnyRun:
    """Train to the end, or until a signal; then everything is saved. `advice`: what needs less
    memory."""
    try:
        with session.stop:
            try:
                with advice_when_short(advice):
                    train(session)
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
    logger.info("finished: %s/report.html to look at, checkpoints/latest to use", session.folder)
    return session


def stop_at_outage(session: Run, epoch: int, rewards: dict[str, np.ndarray]) -> None:
    """Where too many of the scores of an epoch are missing; saves first."""
    limit = session.config.max_failed_fraction
    outage = describe_outage(session.accelerator, session.reward, rewards, limit)
    if outage:
        raise RewardOutage(
            f"epoch {epoch}: {outage}; saved {save(session)}; {session.how_to_go_on()}"
        )


def evaluation_metrics(
    session: Run, epoch: int, scores: dict[str, np.ndarray], sets: Sequence[str] = ()
) -> dict[str, float]:
    limit = session.config.max_failed_fraction
    outage = describe_outage(session.accelerator, session.eval_reward, scores, limit)
    if outage and epoch == 0:
        raise RewardOutage(f"evaluation before training: {outage}")
    metrics = score_metrics("eval", scores, sets)
    if outage:
        logger.warning("evaluation after epoch %d: %s", epoch, outage)
        metrics[f"eval/{TOTAL}"] = math.nan  # what is left is no measure of the model
    return metrics


def take_update(session: Run, stats: TrainingStats) -> None:
    """Once the gradients of an update are there."""
    accelerator, progress = session.accelerator, session.progress
    if accelerator.sync_gradients:
        most = session.config.train.max_grad_norm
        norm = accelerator.clip_grad_norm_(session.policy.parameters(), most)
        stats.add_grad_norm(norm, most)
    session.optimizer.step()
    session.optimizer.zero_grad()
    if accelerator.sync_gradients:
        progress.step += 1
        session.policy.moved()
        if session.ema is not None and not accelerator.optimizer_step_was_skipped:
            session.ema.update(progress.step)
        session.stop.check()


def check_training(session: Run, metrics: dict[str, float]) -> None:
    """Of an epoch."""
    if not math.isfinite(metrics["train/loss"]):
        raise UserError(
            f"the loss is not finite after step {session.progress.step}; lower "
            "train.learning_rate or use mixed_precision=no; the last checkpoint is intact"
        )
