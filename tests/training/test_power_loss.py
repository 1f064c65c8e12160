"""Power loss: data is on the disk before anything depends on it."""

import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from accelerate import Accelerator
from sessions import short_config
from simulated_disk import Disk, can_mount

from flow_grpo.atomic_io import make_directories, write_text_atomic
from flow_grpo.training.checkpoint import Progress, find_latest_intact, is_intact
from flow_grpo.training.checkpoint_writer import (
    BackgroundWriter,
    Write,
    finish_checkpoint,
    save_checkpoint,
)
from flow_grpo.training.resume import find_start, prepare_run_directory

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train import main

MOUNT = can_mount()
WAYS = ["lazy", "hasty", *(["image"] if MOUNT else [])]


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_power_cut_never_costs_more_than_the_current_save(accelerator, tmp_path, way):
    disk, saved = Disk(tmp_path / "disk", mount=way == "image"), 0
    moments = {"rename", "symlink", "rmdir"} if way == "image" else None  # mounting takes a while

    def look(call: str) -> None:
        if not saved or (moments and call not in moments):
            return
        with disk.after_power_loss(way) as left:
            root = left / "run/checkpoints"
            found = find_latest_intact(root)
            assert found is not None, call
            assert int(found.name.removeprefix("checkpoint-")) >= saved, call
            for link in ("latest", "best"):
                assert is_intact((root / link).resolve()), (call, link)
                # no link points to a missing checkpoint
                assert is_intact(root / (disk.folder / "run/checkpoints" / link).readlink()), call

    def write(folder: Path) -> Write:
        """Write a file at once and two in the background."""
        (folder / "lora").mkdir()
        progress = Progress(step=step)

        def write_later() -> None:
            (folder / "lora/weights").write_text(f"of {progress.step}")
            progress.write(folder)

        (folder / "state/lora.json").write_text("[]")
        return write_later

    root, writer = disk.folder / "run/checkpoints", BackgroundWriter()
    with disk.resources:
        with disk.recording(look):
            make_directories(root.parent)
            for step in (1, 2, 3):
                options = {"keep": 1, "best": step != 2, "writer": writer}
                save_checkpoint(accelerator, root, step, write, **options)
                saved = step - 1  # is complete before the next one is started
            finish_checkpoint(accelerator, root, writer)
            saved = step
        moments = None
        look("the last save")


@pytest.mark.parametrize("way", WAYS)
def test_an_atomic_write_leaves_the_old_or_the_new_file(tmp_path, way):
    disk, moments = Disk(tmp_path / "disk", mount=way == "image"), []

    def look(call: str) -> None:
        with disk.after_power_loss(way) as left:
            content = (left / "file").read_text() if (left / "file").exists() else None
        moments.append((call, content))

    with disk.resources:
        with disk.recording(look):
            write_text_atomic(disk.folder / "file", "before")
            before = moments.copy()
            write_text_atomic(disk.folder / "file", "after")
        assert {content for _, content in before} <= {None, "before"}
        assert {content for _, content in moments[len(before) :]} == {"before", "after"}
        assert (before[-1][1], moments[-1][1]) == ("before", "after")
        assert [path.name for path in disk.folder.glob("*file*")] == ["file"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The disk of a run of two epochs, with a checkpoint before and after training."""
    disk = Disk(tmp_path_factory.mktemp("power") / "disk", mount=MOUNT)
    with disk.resources:
        with disk.recording():
            main(config_in(disk.folder / "new/logs"))
        yield disk


def config_in(logdir: Path, **fields):
    fields = {"num_epochs": 2, "num_checkpoint_limit": 1, "state_freq": 2, **fields}
    return short_config(logdir, "run", eval_prompts=1, eval_freq=0, **fields)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumes_after_a_power_cut(trained, accelerator, tmp_path, way):
    with trained.after_power_loss(way) as left:
        logs = shutil.copytree(left / "new/logs", tmp_path / "logs", symlinks=True)
    (logs / ".run.lock").unlink(missing_ok=True)  # it names this live process
    for name in ("config.json", "metrics.jsonl"):
        content = (trained.folder / "new/logs/run" / name).read_text()
        assert (logs / "run" / name).read_text() == content
    config = json.loads(config_in(logs, resume="auto").to_json_best_effort())
    with ExitStack() as cleanup:
        start, _ = find_start(accelerator, config, cleanup)
        prepare_run_directory(start, config)
    assert Progress.read(start.checkpoint).epoch == 2
    lines = (logs / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]
