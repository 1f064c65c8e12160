"""What a run leaves on the disk after each epoch: metrics, pictures, checkpoints."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import Tensor

from flow_grpo.data.prompts import Draw
from flow_grpo.draw.session import Session
from flow_grpo.errors import UserError
from flow_grpo.rewards import TOTAL
from flow_grpo.rewards.frames import Sample, to_pil
from flow_grpo.run import trackers, tracking
from flow_grpo.run.base import Run
from flow_grpo.run.checkpoint import STATE, save_checkpoint
from flow_grpo.run.metrics import Scored
from flow_grpo.show.console import epoch_line
from flow_grpo.show.health import examine
from flow_grpo.show.reading import read_metrics

logger = logging.getLogger("flow_grpo")


def is_due(epoch: int, every: int, last: int) -> bool:
    return epoch == last or (every > 0 and epoch % every == 0)


def finish_epoch(
    session: Run,
    epoch: int,
    metrics: dict[str, float],
    timer: tracking.Timer,
    *,
    ends: bool = False,
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
    progress.record = tracking.record(epoch, progress.step, metrics, timer)
    if progress.kept or (epoch % config.state_freq == 0 and can_save(session)):
        with timer("save"):
            save(session, best=is_best)
    log(session, tracking.record(epoch, progress.step, metrics, timer))


def can_save(session: Run) -> bool:
    """Torch takes an empty step of Adam to collect the state of an FSDP optimizer that has taken
    none, which changes its first real one."""
    fsdp = session.accelerator.distributed_type == DistributedType.FSDP
    return session.progress.step > 0 or not fsdp


def save(session: Run, *, best: bool = False) -> Path:
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


def log(session: Run, record: dict[str, float | None]) -> None:
    if session.accelerator.is_main_process:
        tracking.append_metrics(session.folder / "metrics.jsonl", record)
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
    session: Run, kind: str, epoch: int, images: list[Sample], **columns: Sequence
) -> None:
    """Of an evaluation: files in samples/, and pictures for the trackers."""
    if not session.accelerator.is_main_process:
        return
    tracking.save_samples(session.folder / "samples" / f"{kind}-{epoch:05d}", images, **columns)
    step = session.progress.step
    columns = {name: values for name, values in columns.items() if name != "group"}
    trackers.log_pictures(session.accelerator, kind, images, columns, epoch=epoch, step=step)


def write_training_samples(
    session: Session,
    epoch: int,
    shown: list[tuple[Draw, Tensor]],
    scored: Scored,
    credit: np.ndarray,
) -> None:
    """The first of this process: at least one whole group, if the process drew one."""
    config, index = session.config, np.concatenate([draw.index for draw, _ in shown])
    count = max(config.log_images, session.plan.group_size) if config.log_images else 0
    write_samples(
        session,
        "train",
        epoch,
        to_pil(torch.cat([images for _, images in shown])[:count]),
        prompt=[session.prompts[row].prompt for draw, _ in shown for row in draw.row],
        **{name: values[index] for name, values in scored.rewards.items()},
        advantage=credit[index],
        group=scored.groups[index],
    )
