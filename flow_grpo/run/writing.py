"""What a run leaves on the disk after each epoch: metrics, pictures, checkpoints."""

import logging
import math
from pathlib import Path

from accelerate.utils import DistributedType

from flow_grpo.rewards import TOTAL
from flow_grpo.run import tracking
from flow_grpo.run.checkpoint import STATE, save_checkpoint
from flow_grpo.run.session import Session

logger = logging.getLogger("flow_grpo")


def is_due(epoch: int, every: int, last: int) -> bool:
    return epoch == last or (every > 0 and epoch % every == 0)


def finish_epoch(
    session: Session, epoch: int, metrics: dict[str, float], timer: tracking.Timer
) -> None:
    """Write down what the epoch did, so that a run that is killed goes on from here."""
    config, progress = session.config, session.progress
    session.check_lock()
    score = metrics.get(f"eval/{TOTAL}", math.nan)
    is_best = score > (-math.inf if progress.best is None else progress.best)  # NaN never is
    progress.epoch = epoch
    progress.best = score if is_best else progress.best
    progress.kept = epoch > 0 and (is_best or is_due(epoch, config.save_freq, config.num_epochs))
    progress.record = tracking.record(epoch, progress.step, metrics, timer)
    if progress.kept or (epoch % config.state_freq == 0 and can_save(session)):
        with timer("save"):
            save(session, best=is_best)
    log(session, tracking.record(epoch, progress.step, metrics, timer))


def can_save(session: Session) -> bool:
    """Torch takes an empty step of Adam to collect the state of an FSDP optimizer that has taken
    none, which changes its first real one."""
    fsdp = session.accelerator.distributed_type == DistributedType.FSDP
    return session.progress.step > 0 or not fsdp


def save(session: Session, *, best: bool = False) -> Path:
    """Write a checkpoint of everything as it is now; returns its folder."""
    accelerator, policy = session.accelerator, session.policy
    session.check_lock()

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


def log(session: Session, record: dict[str, float | None]) -> None:
    if session.accelerator.is_main_process:
        tracking.append_metrics(session.folder / "metrics.jsonl", record)
    session.accelerator.log(record, step=record["step"])
    shown = {k: v for k, v in record.items() if k == "reward/avg" or is_eval_mean(k)}
    line = "  ".join(f"{name} {value:.4f}" for name, value in shown.items() if value is not None)
    logger.info("epoch %d/%d  %s", record["epoch"], session.config.num_epochs, line)


def is_eval_mean(name: str) -> bool:
    return name.startswith("eval/") and name.count("/") == 1 and name != "eval/failed"
