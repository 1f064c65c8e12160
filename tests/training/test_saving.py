"""Checkpoints are written in the background from a copy of the state."""

import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from user_errors import raises_user_error

from flow_grpo.data.seeding import seed_global_generators
from flow_grpo.training import distributed, saving
from flow_grpo.training.checkpoint import Progress, find_latest_intact, is_intact, list_checkpoints
from flow_grpo.training.checkpoint_writer import BackgroundWriter, save_checkpoint
from flow_grpo.training.policy import BasePolicy
from flow_grpo.training.saving import finish_saving, save_session, start_saving
from flow_grpo.training.snapshot import Ema, Reference

EMA_KEEP = 0.25


class Model(nn.Module):
    """A linear layer that PEFT can adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def add_adapter(self, config: LoraConfig, adapter_name: str) -> None:
        from peft import inject_adapter_in_model

        inject_adapter_in_model(config, self, adapter_name)


class Policy(BasePolicy):
    """A policy that saves its weights in plain safetensors files."""

    def __init__(self, *, use_lora: bool) -> None:
        self.network = self.module = Model()
        lora = LoraConfig(r=2, target_modules=["layer"], init_lora_weights=False)
        super().__init__(self.network, lora if use_lora else None)

    def _write_lora(self, folder, weights):
        folder.mkdir()
        save_file(weights, folder / "lora.safetensors")

    def _write_model(self, folder, prefix, weights):
        (folder / f"{prefix}model").mkdir()
        save_file(weights, folder / f"{prefix}model/model.safetensors")


@pytest.fixture
def build(tmp_path):
    """Build what `start_saving` needs of a session that has taken two steps."""

    def build(*, use_lora: bool = True) -> SimpleNamespace:
        accelerator = Accelerator(cpu=True)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            policy = Policy(use_lora=use_lora)
        optimizer = policy.prepare(accelerator, torch.optim.AdamW(policy.parameters(), lr=0.1))
        ema = Ema(policy.trained_parameters(), decay=EMA_KEEP, every=1)
        for snapshot in (ema, Reference(policy.trained_parameters())):
            policy.add_snapshot(snapshot, accelerator)
        (tmp_path / "run").mkdir(exist_ok=True)
        session = SimpleNamespace(
            accelerator=accelerator,
            policy=policy,
            optimizer=optimizer,
            ema=ema,
            folder=tmp_path / "run",
            progress=Progress(),
            config=SimpleNamespace(num_checkpoint_limit=0),
            writer=BackgroundWriter(),
            copies_fit=True,
            check_lock=lambda: None,
            check_folder=lambda: None,
        )
        train(session)
        train(session)
        return session

    return build


def train(session: SimpleNamespace) -> None:
    for parameter in session.policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    session.optimizer.step()
    session.ema.blend(EMA_KEEP)
    session.progress.step += 1


def contents(checkpoint: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint, without the manifest."""
    paths = [p for p in checkpoint.rglob("*") if p.is_file() and p.name != "files.json"]
    return {str(p.relative_to(checkpoint)): p.read_bytes() for p in paths}


@pytest.mark.parametrize("use_lora", [True, False])
def test_a_checkpoint_has_the_state_at_the_time_of_saving(build, use_lora):
    """Training continues while it is written, and so does the step after next."""
    session, proceed = build(use_lora=use_lora), threading.Event()
    expected = contents(save_session(session))
    state = {name for name in expected if name.startswith("state/")}
    assert {Path(name).name for name in state} == {
        *("trained.safetensors", "ema.safetensors", "reference.safetensors", "optimizer.bin"),
        *("lora.json", "progress.json"),
    }
    ema, exported = ("state/ema", "ema_lora/lora") if use_lora else ("state/ema", "ema_model/model")
    folder = session.folder / "checkpoints/checkpoint-2"
    average, weights = (load_file(folder / f"{name}.safetensors") for name in (ema, exported))
    assert average.keys() == weights.keys()
    assert all(torch.equal(average[name], weights[name]) for name in average)

    session = build(use_lora=use_lora)
    session.folder = session.folder.parent / "other"
    session.folder.mkdir()
    session.check_folder = proceed.wait  # called after the copies are written
    blocked = session.policy.copy_trained

    def copy_trained(*args, **options):
        write = blocked(*args, **options)
        return lambda: (proceed.wait(), write())

    session.policy.copy_trained = copy_trained
    saved = start_saving(session)
    train(session)
    assert session.writer.is_busy
    assert not saved.exists()
    proceed.set()
    finish_saving(session)
    assert contents(saved) == expected
    assert session.writer.seconds > 0


def test_without_memory_for_copies_the_same_files_are_written_at_once(build, monkeypatch, caplog):
    caplog.set_level("INFO", "flow_grpo")
    expected = contents(save_session(build()))
    session = build()
    session.folder = session.folder.parent / "other"
    session.folder.mkdir()
    monkeypatch.setattr(saving, "fits_in_memory", lambda size: size == 0)
    threads = []
    write_lora = session.policy._write_lora

    def record_thread(folder, weights):
        threads.append(threading.current_thread())
        write_lora(folder, weights)

    session.policy._write_lora = record_thread
    assert contents(save_session(session)) == expected
    train(session)
    save_session(session)
    assert set(threads) == {threading.main_thread()}
    [message] = caplog.messages
    assert "GiB of host memory" in message


def test_a_failure_in_the_background_ends_the_run_at_the_next_save(build):
    """The checkpoint before stays, and the error is the same as without a background thread."""
    session = build()
    save_session(session)
    train(session)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    session.check_folder = fail
    failed = start_saving(session)
    train(session)
    with raises_user_error(failed, "No space left on device", "checkpoint-2"):
        start_saving(session)
    left = {path.name for path in (session.folder / "checkpoints").iterdir()}
    assert left == {"checkpoint-2", "latest"}
    start_saving(session)
    with raises_user_error("checkpoint-4", "No space left on device"):  # at the end of the run
        finish_saving(session)
    finish_saving(session)


def test_a_failure_in_the_background_is_raised_on_all_processes(tmp_path, monkeypatch):
    """The others receive it before they write, instead of waiting for the main process."""
    other = SimpleNamespace(is_main_process=False, num_processes=2)
    gathered = iter([[(False, "cannot save checkpoint-1: disk quota exceeded")], ["checkpoint-0"]])
    monkeypatch.setattr(distributed, "gather_object", lambda _: next(gathered))
    written = []
    with raises_user_error("checkpoint-1: disk quota exceeded", "checkpoint-0"):
        save_checkpoint(other, tmp_path, 2, written.append, keep=0, writer=BackgroundWriter())
    assert not written


def test_checkpoints_are_written_one_at_a_time_in_order(tmp_path):
    accelerator, writer, running = Accelerator(cpu=True), BackgroundWriter(), []

    def write(folder: Path):
        progress = Progress(step=step)
        running.append(step)
        assert len(running) == 1

        def write_later() -> None:
            progress.write(folder)
            assert running.pop() == progress.step

        return write_later

    for step in range(1, 6):
        save_checkpoint(accelerator, tmp_path, step, write, keep=2, writer=writer)
        if step > 1:
            assert is_intact(tmp_path / f"checkpoint-{step - 1}")
    assert writer.wait() is None
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-5"]
    assert find_latest_intact(tmp_path).name == "checkpoint-5"


def test_a_run_that_lost_its_directory_does_not_publish_a_checkpoint(build):
    session = build()

    def lost() -> None:
        raise OSError("is now locked by process 7")

    session.check_folder = lost
    with raises_user_error("is now locked by process 7"):
        save_session(session)
    assert list((session.folder / "checkpoints").iterdir()) == []


def test_custom_code_draws_the_same_numbers_in_an_epoch_whenever_the_run_was_started():
    def draw(*key: int) -> tuple[float, float, float]:
        seed_global_generators(*key)
        return random.random(), np.random.random(), torch.rand(1).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        first = draw(0, 3, 1)
        assert draw(0, 3, 1) == first
        for other in ((1, 3, 1), (0, 4, 1), (0, 3, 0)):
            assert all(a != b for a, b in zip(draw(*other), first, strict=True))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
