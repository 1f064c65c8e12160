"""Read metrics and images back from the files of each tracker, without a network."""

import io
import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

Caption = str
BLOCK, HEADER = 32768, struct.Struct("<IHB")  # of LevelDB's log format: checksum, length, type


@dataclass
class TrackerLog:
    """Scalars, and images with captions, by name and step."""

    scalars: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    images: dict[str, dict[int, list[tuple[Image.Image, Caption]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add_image(self, name: str, step: int, image: Path | io.BytesIO, caption: str) -> None:
        self.images[name][step].append((Image.open(image).convert("RGB"), caption))


def wandb(folder: Path) -> TrackerLog:
    from wandb.proto.wandb_internal_pb2 import Record

    [run], log = folder.glob("wandb/offline-run-*"), TrackerLog()
    [file] = run.glob("*.wandb")
    for data in log_records(file):
        record = Record.FromString(data)
        step = record.history.step.num
        items = {tuple(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for name, *part in items:
            if not part:
                log.scalars[name][step] = items[(name,)]
            elif part == ["filenames"]:
                files, captions = items[name, "filenames"], items[name, "captions"]
                for path, caption in zip(files, captions, strict=True):
                    log.add_image(name, step, run / "files" / path, caption)
    return log


def swanlab(folder: Path) -> TrackerLog:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    [run], log = folder.glob("swanlab/run-*"), TrackerLog()
    [file] = run.glob("*.swanlab")
    for data in log_records(file):
        record = Record.FromString(data)
        if record.HasField("scalar"):
            log.scalars[record.scalar.key][record.scalar.step] = record.scalar.value.number
        for item in record.media.value.items:
            path = run / "media/image" / item.filename
            log.add_image(record.media.key, record.media.step, path, item.caption)
    return log


def log_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after a header of seven bytes."""
    content, offset, fragments = path.read_bytes(), 7, b""
    while offset < len(content):
        if BLOCK - offset % BLOCK < HEADER.size:  # the rest is padding
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, offset)
        offset += HEADER.size
        fragments += content[offset : offset + length]
        offset += length
        if kind in (1, 4):  # a complete record, or its last fragment
            yield fragments
            fragments = b""


def trackio(folder: Path) -> TrackerLog:
    log = TrackerLog()
    [file] = folder.glob("*.db")
    for step, content in sqlite3.connect(file).execute("SELECT step, metrics FROM metrics"):
        for name, value in json.loads(content).items():
            if isinstance(value, dict):
                path = folder / "media" / value["file_path"]
                log.add_image(name, step, path, value["caption"])
            else:
                log.scalars[name][step] = value
    return log


def tensorboard(folder: Path) -> TrackerLog:
    """Read a run of TensorBoard; captions are a separate text with one line per image."""
    events, texts, log = _events(folder), tensorboard_texts(folder), TrackerLog()
    for name in events.Tags()["scalars"]:
        log.scalars[name] = {e.step: e.value for e in events.Scalars(name)}
    for name in events.Tags()["images"]:
        group, _, index = name.rpartition("/")
        for event in events.Images(name):
            line = texts[group, event.step].splitlines()[int(index)].strip()
            assert line.startswith(f"{index}  ")
            image = io.BytesIO(event.encoded_image_string)
            log.add_image(name, event.step, image, line.removeprefix(f"{index}  "))
    return log


def tensorboard_texts(folder: Path) -> dict[tuple[str, int], str]:
    """Return texts by name and step."""
    events = _events(folder)
    return {
        (name.removesuffix("/text_summary"), event.step): event.tensor_proto.string_val[0].decode()
        for name in events.Tags()["tensors"]
        for event in events.Tensors(name)
    }


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = folder.glob("events.out.tfevents.*")
    return EventAccumulator(str(file), {"images": 0, "tensors": 0, "scalars": 0}).Reload()


def mlflow(uri: str, project: str) -> TrackerLog:
    """Read a run of MLflow; captions are in one JSON file per evaluation."""
    from mlflow import MlflowClient

    client, log = MlflowClient(tracking_uri=uri), TrackerLog()
    [run] = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        log.scalars[name] = {metric.step: metric.value for metric in history}
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    epochs = {step: int(epoch) for step, epoch in log.scalars["epoch"].items()}
    for path in sorted((artifacts / "images").glob("*.png")):
        name, _, step = path.name.split("+")[:3]
        group, _, index = name.replace("~", "/").rpartition("/")
        texts = json.loads((artifacts / f"{group}-{epochs[int(step)]:05d}.json").read_text())
        text = texts["samples"][int(index)]
        caption = f"{', '.join(text['scores'])} | {text['prompt']}"
        log.add_image(name.replace("~", "/"), int(step), path, caption)
    return log
