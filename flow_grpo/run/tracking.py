"""What a run leaves on disk, and how long its parts took."""

import json
import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from tqdm import tqdm

from flow_grpo import disk
from flow_grpo.errors import UserError
from flow_grpo.rewards.failure import NotAsked
from flow_grpo.rewards.frames import Sample
from flow_grpo.show.grid import save_sample


def record(
    epoch: int, step: int, metrics: dict[str, float], timer: "Timer"
) -> dict[str, float | None]:
    """What is logged of an epoch; None where there is no value, as NaN has no JSON."""
    values = {"epoch": epoch, "step": step, **metrics, **timer.metrics()}
    return {name: _jsonable(value) for name, value in values.items()}


def append_metrics(path: Path, record: dict[str, float | None]) -> None:
    """One JSON object per epoch; on the disk, as a later checkpoint has its own line only."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        disk.sync(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def save_samples(folder: Path, images: list[Sample | None], **columns: Sequence) -> None:
    """PNG files, or GIF files of clips, and a samples.jsonl that says what each is: a score that
    failed is null there, one that its prompt does not ask for is left out. Columns may be longer
    than images, and a sample may have no image."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            for i, image in enumerate(images):
                row = {name: values[i] for name, values in columns.items()}
                record = {name: _jsonable(v) for name, v in row.items() if v != NotAsked()}
                files = {} if image is None else save_sample(image, folder, f"{i:04d}")
                file.write(json.dumps({**files, **record}) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error


def _jsonable(value: Any) -> Any:
    if isinstance(value, int | str | np.integer):
        return value if isinstance(value, str) else int(value)
    return float(value) if math.isfinite(value) else None


class Bar(tqdm):
    monitor_interval = 0  # no thread that watches it and outlives the run


def progress_bar(
    items: Iterable, name: str, accelerator: Accelerator, total: int | None = None
) -> Bar:
    """On one process, and where somebody can look at it: not in a file."""
    hidden = None if accelerator.is_main_process else True  # None: tqdm asks what it writes to
    return Bar(items, desc=name, leave=False, disable=hidden, total=total, miniters=1)


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": value for name, value in self.seconds.items()}


def peak_memory_gb(device: torch.device) -> float:
    """What the process took of the device, whether or not all of it was in use."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def now(device: torch.device) -> float:
    """The time at which all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
