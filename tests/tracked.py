"""What trackers wrote without a network, read back from their files."""

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
BLOCK, HEADER = 32768, struct.Struct("<IHB")  # of LevelDB's log: checksum, length, type


@dataclass
class Tracked:
    """By name and step; pictures with their captions."""

    scalars: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    pictures: dict[str, dict[int, list[tuple[Image.Image, Caption]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add_picture(self, name: str, step: int, picture: Path | io.BytesIO, caption: str) -> None:
        self.pictures[name][step].append((Image.open(picture).convert("RGB"), caption))


def wandb(folder: Path) -> Tracked:
    from wandb.proto.wandb_internal_pb2 import Record

    [run], found = folder.glob("wandb/offline-run-*"), Tracked()
    [file] = run.glob("*.wandb")
    for data in log_records(file):
        record = Record.FromString(data)
        step = record.history.step.num
        items = {tuple(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for name, *part in items:
            if not part:
                found.scalars[name][step] = items[(name,)]
            elif part == ["filenames"]:
                files, captions = items[name, "filenames"], items[name, "captions"]
                for path, caption in zip(files, captions, strict=True):
                    found.add_picture(name, step, run / "files" / path, caption)
    return found


def swanlab(folder: Path) -> Tracked:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    [run], found = folder.glob("swanlab/run-*"), Tracked()
    [file] = run.glob("*.swanlab")
    for data in log_records(file):
        record = Record.FromString(data)
        if record.HasField("scalar"):
            found.scalars[record.scalar.key][record.scalar.step] = record.scalar.value.number
        for item in record.media.value.items:
            path = run / "media/image" / item.filename
            found.add_picture(record.media.key, record.media.step, path, item.caption)
    return found


def log_records(path: Path) -> Iterator[bytes]:
    """Of a file in the format of LevelDB's log, after seven bytes of the tracker's own."""
    content, place, parts = path.read_bytes(), 7, b""
    while place < len(content):
        if BLOCK - place % BLOCK < HEADER.size:  # too little is left of the block
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, place)
        place += HEADER.size
        parts += content[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def trackio(folder: Path) -> Tracked:
    found = Tracked()
    [file] = folder.glob("*.db")
    for step, content in sqlite3.connect(file).execute("SELECT step, metrics FROM metrics"):
        for name, value in json.loads(content).items():
            if isinstance(value, dict):
                path = folder / "media" / value["file_path"]
                found.add_picture(name, step, path, value["caption"])
            else:
                found.scalars[name][step] = value
    return found


def tensorboard(folder: Path) -> Tracked:
    """Texts of pictures are in a text of their own, a line each."""
    events, texts, found = _events(folder), tensorboard_texts(folder), Tracked()
    for name in events.Tags()["scalars"]:
        found.scalars[name] = {e.step: e.value for e in events.Scalars(name)}
    for name in events.Tags()["images"]:
        group, _, place = name.rpartition("/")
        for event in events.Images(name):
            line = texts[group, event.step].splitlines()[int(place)].strip()
            assert line.startswith(f"{place}  ")
            picture = io.BytesIO(event.encoded_image_string)
            found.add_picture(name, event.step, picture, line.removeprefix(f"{place}  "))
    return found


def tensorboard_texts(folder: Path) -> dict[tuple[str, int], str]:
    """By name and step."""
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


def mlflow(uri: str, project: str) -> Tracked:
    """Texts of pictures are in a file for each evaluation."""
    from mlflow import MlflowClient

    client, found = MlflowClient(tracking_uri=uri), Tracked()
    [run] = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        found.scalars[name] = {metric.step: metric.value for metric in history}
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    epochs = {step: int(epoch) for step, epoch in found.scalars["epoch"].items()}
    for path in sorted((artifacts / "images").glob("*.png")):
        name, _, step = path.name.split("+")[:3]
        group, _, place = name.replace("~", "/").rpartition("/")
        texts = json.loads((artifacts / f"{group}-{epochs[int(step)]:05d}.json").read_text())
        text = texts["samples"][int(place)]
        caption = f"{', '.join(text['scores'])} | {text['prompt']}"
        found.add_picture(name.replace("~", "/"), int(step), path, caption)
    return found
