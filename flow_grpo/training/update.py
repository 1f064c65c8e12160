"""Optimizer updates that non-finite gradients cannot reach."""

import logging
import math

from accelerate.utils import DistributedType

from flow_grpo.errors import UserError
from flow_grpo.report.health import MIN_LOSS_SCALE
from flow_grpo.training.finite import clip_gradients, loss_scale, step_if_finite
from flow_grpo.training.metrics import TrainingStats
from flow_grpo.training.session import BaseSession

logger = logging.getLogger("flow_grpo")


def optimizer_step(session: BaseSession, stats: TrainingStats) -> None:
    """Clip gradients and take an optimizer step. Call it after the last micro-batch of an update.

    A non-finite gradient skips the update on all processes: weights, optimizer state, moving
    average and learning rate do not change. Too many skipped updates in a row end the run.
    """
    accelerator, progress = session.accelerator, session.progress
    max_norm = session.config.train.max_grad_norm
    groups = session.policy.clipped_together()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # it clips them together
        groups = groups[:1]
    norm = math.hypot(*(clip_gradients(accelerator, group, max_norm) for group in groups))
    applied = step_if_finite(accelerator, session.optimizer, norm)
    progress.step += 1
    if applied:
        progress.skipped_in_a_row = 0
        session.policy.on_weights_updated()
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
    """Set the learning rates of the next update.

    Call it before the backward passes, because DeepSpeed steps within the last one.
    """
    rate = session.learning_rate(session.progress.applied)
    for group in session.optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def _report_skipped(session: BaseSession, norm: float, loss: float) -> None:
    """Log a skipped update; raise a UserError after `train.max_skipped_updates` in a row."""
    progress, scale = session.progress, loss_scale(session.accelerator)
    loss_text = "the loss is finite" if math.isfinite(loss) else f"the loss is {loss}"
    cause = f"the gradient norm is {norm} and {loss_text}"
    if scale is not None and scale >= MIN_LOSS_SCALE:  # expected at the start of fp16 training
        logger.info("update %d was skipped: %s; loss scale %g", progress.step, cause, scale)
        return
    progress.skipped_in_a_row += 1
    limit = session.config.train.max_skipped_updates
    in_a_row = progress.skipped_in_a_row
    if session.accelerator.is_main_process:
        logger.warning("update %d was skipped (%d in a row): %s", progress.step, in_a_row, cause)
    if 0 < limit <= in_a_row:
        is_half = session.config.mixed_precision != "no"
        raise UserError(
            f"was reached: the last {in_a_row} updates (up to update {progress.step}) were "
            f"skipped, because {cause}; {session.describe_last_checkpoint()}",
            field="train.max_skipped_updates",
            value=limit,
            hint="the same settings would fail again: resume with a smaller train.learning_rate"
            + (" or mixed_precision=no" if is_half else ""),
        )
