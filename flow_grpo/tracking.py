"""What a run leaves on disk, and how long its parts took."""

import json
import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from PIL import Image

from flow_grpo.errors import UserError


def refuse_existing(logdir: str, run_name: str) -> None:
    folder = Path(logdir) / run_name
    if run_name and folder.exists():
        raise UserError(f"{folder} already exists; choose another run_name or remove it")


def make_run_folder(
    accelerator: Accelerator, logdir: str, run_name: str, config: dict[str, Any]
) -> Path:
    """Create logs/<run_name> (by default the date and time) with config.json."""
    name = [run_name or datetime.now().strftime("%Y.%m.%d_%H.%M.%S")]
    folder = Path(logdir) / broadcast_object_list(name)[0]
    if accelerator.is_main_process:
        refuse_existing(logdir, folder.name)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    return folder


def start_trackers(
    accelerator: Accelerator, project: str, folder: Path, config: dict[str, Any]
) -> None:
    """wandb or tensorboard, as the accelerator was told; their files go into the run folder."""
    accelerator.project_configuration.logging_dir = str(folder)
    flat = {k: v if isinstance(v, int | float | str) else str(v) for k, v in _dotted(config)}
    wandb = {"dir": str(folder), "name": folder.name}
    accelerator.init_trackers(project, config=flat, init_kwargs={"wandb": wandb})


def _dotted(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def append_metrics(path: Path, values: dict[str, float]) -> None:
    """One JSON object per logged step."""
    clean = {name: _jsonable(value) for name, value in values.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(clean) + "\n")


def save_samples(folder: Path, images: list[Image.Image], **columns: Sequence) -> None:
    """PNG files, and a samples.jsonl that says what each is; columns may be longer than images."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        for i, image in enumerate(images):
            record = {name: _jsonable(values[i]) for name, values in columns.items()}
            image.save(folder / f"{i:04d}.png")
            file.write(json.dumps({"file": f"{i:04d}.png", **record}) + "\n")


def _jsonable(value: Any) -> Any:
    """NaN has no JSON; null says that there is no value."""
    if isinstance(value, int | str):
        return value
    return float(value) if math.isfinite(value) else None


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
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
