"""Write metrics and samples of an epoch to the run directory and to trackers such as wandb."""

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

from flow_grpo import atomic_io
from flow_grpo.config.trackers import TRACKER_HINTS
from flow_grpo.errors import UserError, first_line
from flow_grpo.report.console import displayed_rewards
from flow_grpo.report.grid import comparison_grid, format_score, middle_frame, save_sample_files
from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.rewards.frames import Sample
from flow_grpo.training.metrics import Timer
from flow_grpo.untrusted_files import flatten_fields

logger = logging.getLogger("flow_grpo")


def start_trackers(
    accelerator: Accelerator, project: str, folder: Path, config: dict[str, Any]
) -> None:
    """Start the accelerator's trackers; they write to the run directory if they support that.

    Raises:
        UserError: On the main process, if a tracker cannot start. A new run directory is removed,
            so that the same command can be repeated.
    """
    is_new = not folder.exists()
    accelerator.project_configuration.logging_dir = str(folder)
    flat = {
        _sanitize_name(k): v if isinstance(v, int | float | str) else str(v)
        for k, v in flatten_fields(config)
    }
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
    except Exception as error:  # each tracker has its own error types
        names = [str(name) for name in accelerator.log_with]
        started = [tracker.name for tracker in accelerator.trackers if _has_started(tracker)]
        failed = next((name for name in names if name not in started), ",".join(names))
        close_trackers(accelerator)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"cannot start: {first_line(error).rstrip('.')}",
            field="log_with",
            value=failed,
            hint=TRACKER_HINTS.get(failed, ""),
        ) from error


def close_trackers(accelerator: Accelerator) -> None:
    """Finish all trackers exactly once; some fail if they are finished twice."""
    while accelerator.trackers:
        tracker = accelerator.trackers.pop()
        if _has_started(tracker):
            tracker.finish()


def _has_started(tracker: GeneralTracker) -> bool:
    return hasattr(tracker, "tracker")  # set when it starts


def log_metrics(accelerator: Accelerator, record: dict[str, float | None]) -> None:
    """Send the metrics of an epoch to all trackers."""
    step = record["step"]  # the x-axis, and a name that trackio reserves
    values = {k: v for k, v in record.items() if v is not None and k != "step"}
    for tracker in accelerator.trackers:
        named = {_mlflow_name(name): v for name, v in values.items()}
        with _warn_on_error(tracker):
            tracker.log(named if tracker.name == "mlflow" else values, step=step)


def build_record(
    epoch: int, step: int, metrics: dict[str, float], timer: Timer
) -> dict[str, float | None]:
    """Return the line of metrics.jsonl for an epoch; NaN becomes None, as JSON has no NaN."""
    values = {"epoch": epoch, "step": step, **metrics, **timer.metrics()}
    return {name: _to_jsonable(value) for name, value in values.items()}


def append_metrics(path: Path, record: dict[str, float | None]) -> None:
    """Append a JSON line and flush it to disk: a checkpoint contains its own line only."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        atomic_io.fsync_path(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def save_samples(
    folder: Path,
    images: list[Sample | None],
    sources: Sequence[Sequence[Image.Image]] = (),
    **columns: Sequence,
) -> None:
    """Write images as PNG, videos as MP4 or GIF with WAV, and a line per sample to samples.jsonl.

    A failed score is null there; one that the prompt does not request is omitted.

    Args:
        folder: Directory to write to.
        images: Samples to write; None for one without an image.
        sources: Input images of each sample. An image shared by several samples is written once.
        columns: Values by column; a column may be longer than `images`.
    """
    unique = {id(image): image for own in sources for image in own}
    names = {key: f"source-{number:04d}.png" for number, key in enumerate(unique)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for key, name in names.items():
            unique[key].save(folder / name)
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            for i, image in enumerate(images):
                row = {name: values[i] for name, values in columns.items()}
                record = {name: _to_jsonable(v) for name, v in row.items() if v != NotApplicable()}
                files = {} if image is None else save_sample_files(image, folder, f"{i:04d}")
                if sources and sources[i]:
                    files["sources"] = [names[id(source)] for source in sources[i]]
                file.write(json.dumps({**files, **record}) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, int | str | np.integer):
        return value if isinstance(value, str) else int(value)
    return float(value) if math.isfinite(value) else None


@contextmanager
def _warn_on_error(tracker: GeneralTracker) -> Iterator[None]:
    """Log an error of a tracker and continue, because the run directory has the same data."""
    try:
        yield
    except Exception as error:
        logger.warning(
            "log_with=%s failed, training continues: %s", tracker.name, first_line(error)
        )


@dataclass(frozen=True)
class CaptionedImage:
    """An image, its prompt, and its rewards and advantage as text."""

    image: Image.Image
    prompt: str
    scores: tuple[str, ...]

    def caption(self) -> str:
        """Return the caption, scores first because most viewers truncate long prompts."""
        return f"{', '.join(self.scores)} | {self.prompt}"


def log_sample_images(
    accelerator: Accelerator,
    kind: str,  # "train" or "eval"
    images: list[Sample],
    columns: dict[str, Sequence],
    *,
    epoch: int,
    step: int,
) -> None:
    """Send images with captions to all trackers. Call it on the main process."""
    if not images or not accelerator.trackers:
        return
    scores = displayed_rewards(name for name in columns if name not in (*TEXT_COLUMNS, "advantage"))
    names = [*scores, *(["advantage"] if "advantage" in columns else [])]
    texts = [name for name in TEXT_COLUMNS if name in columns]
    rows = [
        CaptionedImage(
            middle_frame(image),
            " ".join(word for name in texts for word in columns[name][i].split()),
            tuple(f"{name} {format_score(float(columns[name][i]))}" for name in names),
        )
        for i, image in enumerate(images)
        if image is not None
    ]
    for tracker in accelerator.trackers:
        with _warn_on_error(tracker):
            SAMPLE_LOGGERS[tracker.name](tracker, kind, rows, epoch, step)


def _log_image_list(
    tracker: GeneralTracker, kind: str, rows: list[CaptionedImage], _: int, step: int
) -> None:
    image_class = importlib.import_module(tracker.name).Image
    images = [image_class(row.image, caption=row.caption()) for row in rows]
    tracker.log({f"samples/{kind}": images}, step=step)


def _log_single_images(
    tracker: GeneralTracker, kind: str, rows: list[CaptionedImage], _: int, step: int
) -> None:
    """Log each captioned image under a separate key, for trackers with an `Image` class."""
    image_class = importlib.import_module(tracker.name).Image
    named = {
        _sample_key(kind, i): image_class(row.image, caption=row.caption())
        for i, row in enumerate(rows)
    }
    tracker.log(named, step=step)


def _log_to_tensorboard(
    tracker: GeneralTracker, kind: str, rows: list[CaptionedImage], epoch: int, step: int
) -> None:
    """Log images with drawn captions, which tensorboard lacks, and the full prompts as text."""
    sheets = {
        _sample_key(kind, i): np.asarray(_captioned_image(r, epoch))[None]
        for i, r in enumerate(rows)
    }
    tracker.log_images(sheets, step=step, dataformats="NHWC")
    # indented, so that Markdown shows it verbatim as code
    lines = [f"    {i:02d}  {row.caption()}" for i, row in enumerate(rows)]
    tracker.log({f"samples/{kind}": "\n".join(lines)}, step=step)


def _log_to_mlflow(
    tracker: GeneralTracker, kind: str, rows: list[CaptionedImage], epoch: int, step: int
) -> None:
    """Log images with drawn captions, which mlflow lacks, and the full prompts as JSON."""
    import mlflow

    for i, row in enumerate(rows):
        mlflow.log_image(_captioned_image(row, epoch), key=_sample_key(kind, i), step=step)
    texts = [{"prompt": row.prompt, "scores": list(row.scores)} for row in rows]
    mlflow.log_dict({"samples": texts}, f"samples/{kind}-{epoch:05d}.json")


TEXT_COLUMNS = ("prompt", "answer", "truth")  # columns of samples that are not numbers
SAMPLE_LOGGERS = {
    "wandb": _log_image_list,
    "swanlab": _log_image_list,
    "trackio": _log_single_images,
    "tensorboard": _log_to_tensorboard,
    "mlflow": _log_to_mlflow,
}


def _sample_key(kind: str, index: int) -> str:
    return f"samples/{kind}/{index:02d}"


def _captioned_image(row: CaptionedImage, epoch: int) -> Image.Image:
    heading = f"epoch {epoch}"
    return comparison_grid({heading: [row.image]}, [row.prompt], {heading: [list(row.scores)]})


def _mlflow_name(name: str) -> str:
    """Return a name mlflow's file store accepts: reward/ocr cannot contain reward/ocr/std."""
    group, _, rest = name.partition("/")
    return _sanitize_name(f"{group}/{rest.replace('/', '.')}" if rest else group)


def _sanitize_name(name: str) -> str:
    """Replace characters that mlflow rejects; a reward name may contain any."""
    return re.sub(r"[^\w\-. :/]", "_", name)
