"""Where the numbers and samples of an epoch go: files of the run folder, and wandb, tensorboard and
the like, through accelerate, with prompts, rewards and advantages under the pictures."""

import importlib
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from PIL import Image

from flow_grpo import disk
from flow_grpo.config.trackers import TRACKERS
from flow_grpo.errors import UserError, first_line
from flow_grpo.files import dotted
from flow_grpo.rewards.failure import NotAsked
from flow_grpo.rewards.frames import Sample
from flow_grpo.run.metrics import Timer
from flow_grpo.show.console import shown_rewards
from flow_grpo.show.grid import paired_grid, save_sample, score_text, still

logger = logging.getLogger("flow_grpo")


def start(accelerator: Accelerator, project: str, folder: Path, config: dict[str, Any]) -> None:
    """Start those that the accelerator was told of; what they write goes into the run folder where
    they let us choose. Where one cannot start, the main process raises a UserError, and a new run
    leaves no folder behind, so that the same command can be given again."""
    is_new = not folder.exists()
    accelerator.project_configuration.logging_dir = str(folder)
    flat = {_plain(k): v if isinstance(v, int | float | str) else str(v) for k, v in dotted(config)}
    settings = {
        "wandb": {"dir": str(folder), "name": folder.name},
        "swanlab": {"logdir": str(folder / "swanlab"), "experiment_name": folder.name},
        "trackio": {"name": folder.name},
        "mlflow": {"run_name": folder.name},
    }
    try:
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        accelerator.init_trackers(project, config=flat, init_kwargs=settings)
    except Exception as error:  # each has errors of its own
        names = [str(name) for name in accelerator.log_with]
        started = [tracker.name for tracker in accelerator.trackers if _has_started(tracker)]
        failed = next((name for name in names if name not in started), ",".join(names))
        close(accelerator)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        told = [f"log_with={failed}: {first_line(error).rstrip('.')}", TRACKERS.get(failed, "")]
        raise UserError("; ".join(filter(None, told))) from error


def close(accelerator: Accelerator) -> None:
    """End all trackers, once: some take a second end amiss."""
    while accelerator.trackers:
        tracker = accelerator.trackers.pop()
        if _has_started(tracker):
            tracker.finish()


def _has_started(tracker: GeneralTracker) -> bool:
    return hasattr(tracker, "tracker")  # made when it starts


def log(accelerator: Accelerator, record: dict[str, float | None]) -> None:
    """Send the numbers of an epoch to all trackers."""
    step = record["step"]  # the axis of all, and a name that trackio keeps for itself
    values = {k: v for k, v in record.items() if v is not None and k != "step"}
    for tracker in accelerator.trackers:
        named = {_of_mlflow(name): v for name, v in values.items()}
        with _kept_going(tracker):
            tracker.log(named if tracker.name == "mlflow" else values, step=step)


def record(
    epoch: int, step: int, metrics: dict[str, float], timer: Timer
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


def save_samples(
    folder: Path,
    images: list[Sample | None],
    sources: Sequence[Sequence[Image.Image]] = (),
    **columns: Sequence,
) -> None:
    """PNG files, or GIF files of clips, and a samples.jsonl that says what each is: a score that
    failed is null there, one that its prompt does not ask for is left out. Columns may be longer
    than images, and a sample may have no image. `sources`: what each was made from, a file for
    each picture, however many samples share it."""
    every = {id(picture): picture for own in sources for picture in own}
    names = {key: f"source-{number:04d}.png" for number, key in enumerate(every)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for key, name in names.items():
            every[key].save(folder / name)
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            for i, image in enumerate(images):
                row = {name: values[i] for name, values in columns.items()}
                record = {name: _jsonable(v) for name, v in row.items() if v != NotAsked()}
                files = {} if image is None else save_sample(image, folder, f"{i:04d}")
                if sources and sources[i]:
                    files["sources"] = [names[id(picture)] for picture in sources[i]]
                file.write(json.dumps({**files, **record}) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error


def _jsonable(value: Any) -> Any:
    if isinstance(value, int | str | np.integer):
        return value if isinstance(value, str) else int(value)
    return float(value) if math.isfinite(value) else None


@contextmanager
def _kept_going(tracker: GeneralTracker) -> Iterator[None]:
    """What a tracker misses is in the run folder too, so that it may fail."""
    try:
        yield
    except Exception as error:
        logger.warning("log_with=%s failed, the run goes on: %s", tracker.name, first_line(error))


@dataclass(frozen=True)
class Shown:
    """A picture, its prompt, and its rewards and advantage as text."""

    image: Image.Image
    prompt: str
    scores: tuple[str, ...]

    def caption(self) -> str:
        """Scores first: a long prompt is cut short by most of those who show it."""
        return f"{', '.join(self.scores)} | {self.prompt}"


def log_pictures(
    accelerator: Accelerator,
    kind: str,  # "train" or "eval"
    images: list[Sample],
    columns: dict[str, Sequence],
    *,
    epoch: int,
    step: int,
) -> None:
    """Send pictures with their captions to all trackers; on the main process."""
    if not images or not accelerator.trackers:
        return
    scores = shown_rewards(name for name in columns if name not in (*TEXTS, "advantage"))
    names = [*scores, *(["advantage"] if "advantage" in columns else [])]
    texts = [name for name in TEXTS if name in columns]
    rows = [
        Shown(
            still(image),
            " ".join(word for name in texts for word in columns[name][i].split()),
            tuple(f"{name} {score_text(float(columns[name][i]))}" for name in names),
        )
        for i, image in enumerate(images)
        if image is not None
    ]
    for tracker in accelerator.trackers:
        with _kept_going(tracker):
            SHOW[tracker.name](tracker, kind, rows, epoch, step)


def _show_list(tracker: GeneralTracker, kind: str, rows: list[Shown], _: int, step: int) -> None:
    picture = importlib.import_module(tracker.name).Image
    pictures = [picture(row.image, caption=row.caption()) for row in rows]
    tracker.log({f"samples/{kind}": pictures}, step=step)


def _show_each(tracker: GeneralTracker, kind: str, rows: list[Shown], _: int, step: int) -> None:
    picture = importlib.import_module(tracker.name).Image
    named = {_key(kind, i): picture(r.image, caption=r.caption()) for i, r in enumerate(rows)}
    tracker.log(named, step=step)


def _show_in_tensorboard(
    tracker: GeneralTracker, kind: str, rows: list[Shown], epoch: int, step: int
) -> None:
    """It has no captions: they are drawn, and whole prompts are in a text of the same name."""
    sheets = {_key(kind, i): np.asarray(_sheet(r, epoch))[None] for i, r in enumerate(rows)}
    tracker.log_images(sheets, step=step, dataformats="NHWC")
    # indented, Markdown takes it as code, which it shows as it is
    lines = [f"    {i:02d}  {row.caption()}" for i, row in enumerate(rows)]
    tracker.log({f"samples/{kind}": "\n".join(lines)}, step=step)


def _show_in_mlflow(
    tracker: GeneralTracker, kind: str, rows: list[Shown], epoch: int, step: int
) -> None:
    """It has no captions either."""
    import mlflow

    for i, row in enumerate(rows):
        mlflow.log_image(_sheet(row, epoch), key=_key(kind, i), step=step)
    texts = [{"prompt": row.prompt, "scores": list(row.scores)} for row in rows]
    mlflow.log_dict({"samples": texts}, f"samples/{kind}-{epoch:05d}.json")


TEXTS = ("prompt", "answer", "truth")  # columns of samples that are no numbers
SHOW = {
    "wandb": _show_list,
    "swanlab": _show_list,
    "trackio": _show_each,
    "tensorboard": _show_in_tensorboard,
    "mlflow": _show_in_mlflow,
}


def _key(kind: str, place: int) -> str:
    return f"samples/{kind}/{place:02d}"


def _sheet(row: Shown, epoch: int) -> Image.Image:
    heading = f"epoch {epoch}"
    return paired_grid({heading: [row.image]}, [row.prompt], {heading: [list(row.scores)]})


def _of_mlflow(name: str) -> str:
    """In a store of files a metric cannot have another below it: reward/ocr and reward/ocr/std."""
    group, _, rest = name.partition("/")
    return _plain(f"{group}/{rest.replace('/', '.')}" if rest else group)


def _plain(name: str) -> str:
    """mlflow refuses other characters, and a reward may be called anything."""
    return re.sub(r"[^\w\-. :/]", "_", name)
