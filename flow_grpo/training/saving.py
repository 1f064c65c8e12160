"""Save the state of a run: copy it to host memory, and write the copy in the background."""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils.constants import OPTIMIZER_NAME, SCALER_NAME

from flow_grpo import atomic_io
from flow_grpo.errors import UserError
from flow_grpo.training.checkpoint import EMA_PREFIX, PROGRESS_FILE, STATE_DIR
from flow_grpo.training.checkpoint_writer import finish_checkpoint, save_checkpoint
from flow_grpo.training.distributed import needs_equal_passes
from flow_grpo.training.finite import find_nonfinite
from flow_grpo.training.state_copies import StateCopies, Write, count_bytes, fits_in_memory

if TYPE_CHECKING:
    from flow_grpo.training.session import BaseSession

logger = logging.getLogger("flow_grpo")


def save_session(session: "BaseSession", *, best: bool = False) -> Path:
    """Write a checkpoint of the current state and return it. Call it on all processes."""
    checkpoint = start_saving(session, best=best)
    finish_saving(session)
    return checkpoint


def start_saving(session: "BaseSession", *, best: bool = False) -> Path:
    """Copy the current state, and write a checkpoint of it in the background.

    Call it on all processes. It waits until the previous checkpoint is complete.

    Returns:
        The directory that the checkpoint will have.

    Raises:
        UserError: If the state is not finite, or this or the previous checkpoint cannot be saved.
    """
    session.check_lock()
    average = session.ema.named() if session.ema is not None else {}
    if found := find_nonfinite(session.policy.trained_parameters(), session.optimizer, average):
        raise UserError(
            f"cannot save a checkpoint of step {session.progress.step}: {found} contains NaN or "
            f"infinite values; {session.describe_last_checkpoint()}"
        )
    return save_checkpoint(
        session.accelerator,
        session.folder / "checkpoints",
        session.progress.step,
        partial(copy_state, session),
        keep=session.config.num_checkpoint_limit,
        best=best,
        writer=session.writer,
        check=session.check_folder,
    )


def finish_saving(session: "BaseSession") -> None:
    """Wait until the last checkpoint is complete. Call it on all processes.

    Raises:
        UserError: If it could not be saved.
    """
    finish_checkpoint(session.accelerator, session.folder / "checkpoints", session.writer)


def copy_state(session: "BaseSession", folder: Path) -> Write:
    """Copy the state of a run, and return a function that writes the copies to `folder`.

    Call it on all processes, and the function on the main process. DeepSpeed and FSDP write their
    files at once. So do all others if the copies do not fit in memory.
    """
    accelerator, policy = session.accelerator, session.policy
    main, state = accelerator.is_main_process, folder / STATE_DIR
    has_own_files = needs_equal_passes(accelerator)  # DeepSpeed, FSDP
    if has_own_files:
        accelerator.save_state(str(state), exclude_frozen_parameters=True)
    parts = [
        partial(policy.copy_trained, state, with_weights=not has_own_files),
        *(partial(snapshot.copy_to_host, state) for snapshot in policy.snapshots),
        partial(policy.copy_exported, folder),
    ]
    if session.ema is not None:
        average = session.ema.by_parameter()
        parts.append(partial(policy.copy_exported, folder, prefix=EMA_PREFIX, replaced=average))
    if main and not has_own_files:
        parts.append(partial(_copy_optimizer, session, state))
    if main:
        parts.append(partial(_copy_progress, session, folder))

    at_once = main and not _copies_fit(session, with_optimizer=not has_own_files)
    copies, writes = StateCopies(keep=main), []
    for copy in parts:
        write = copy(copies=StateCopies() if at_once else copies)
        if at_once:
            write()
        else:
            writes.append(write)

    def write_copies() -> None:
        for write in writes:
            write()

    return write_copies


def _copies_fit(session: "BaseSession", *, with_optimizer: bool) -> bool:
    """Return whether copies of the state fit in host memory; log the first time they do not."""
    if session.copies_fit:
        size = count_bytes(session.policy.trained_parameters())
        size *= 1 + len(session.policy.snapshots)
        size += count_bytes(session.optimizer.state_dict()) if with_optimizer else 0
        session.copies_fit = fits_in_memory(size)
        if not session.copies_fit:
            logger.info(
                "checkpoints are written before training continues: a copy of the state needs "
                "%.1f GiB of host memory",
                size / 2**30,
            )
    return session.copies_fit


def _copy_optimizer(session: "BaseSession", folder: Path, copies: StateCopies) -> Write:
    """Copy the state of the optimizer and of fp16 loss scaling, in the files of accelerate."""
    states = {f"{OPTIMIZER_NAME}.bin": copies.copy_nested(session.optimizer.state_dict())}
    if session.accelerator.scaler is not None:
        states[SCALER_NAME] = copies.copy_nested(session.accelerator.scaler.state_dict())

    def write() -> None:
        for name, state in states.items():
            torch.save(state, folder / name)

    return write


def _copy_progress(session: "BaseSession", folder: Path, copies: StateCopies) -> Write:
    text = session.progress.dumps()
    return lambda: atomic_io.write_text_atomic(folder / PROGRESS_FILE, text)
