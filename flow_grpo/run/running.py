"""What every loop does beside its algorithm: stop, save, update, and tell what went wrong."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from flow_grpo.errors import RewardOutage, Stopped, UserError
from flow_grpo.rewards import TOTAL, WeightedReward
from flow_grpo.run.accelerator import advice_when_short
from flow_grpo.run.base import Run
from flow_grpo.run.metrics import TrainingStats, score_metrics
from flow_grpo.run.stopping import StopRequested
from flow_grpo.run.writing import save


def describe_outage(
    accelerator: Accelerator,
    reward: WeightedReward,
    scores: dict[str, np.ndarray],  # gathered: the same on all processes
    limit: float,
) -> str | None:
    """Which reward failed for more than a share `limit` of the samples, and why; None if none did.

    Call it on all processes: the error may have happened on any.
    """
    for name in reward.weights:
        failed = np.isnan(scores[name])
        if failed.mean() > limit or failed.all():
            errors = gather_object([reward.last_errors.get(name, "")])
            last = next((error for error in errors if error), "none recorded")
            return (
                f"reward {name!r} gave no score for {failed.sum()} of {len(failed)} {reward.kind}s "
                f"(max_failed_fraction={limit:g}); last error: {last}"
            )
    reward.forget_errors()
    return None


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
