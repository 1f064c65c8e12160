"""The power fails: what a run needs is on the disk before anything relies on it."""

import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from accelerate import Accelerator
from power import Disk, can_mount
from sessions import short_config

from flow_grpo.disk import make_folders, write_text
from flow_grpo.run.checkpoint import Progress, is_intact, newest_intact, save_checkpoint
from flow_grpo.run.resume import find_start, prepare_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from train import main

MOUNT = can_mount()
WAYS = ["lazy", "hasty", *(["image"] if MOUNT else [])]


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.mark.parametrize("way", WAYS)
def test_at_no_moment_does_a_power_cut_cost_more_than_the_save_at_hand(accelerator, tmp_path, way):
    disk, saved = Disk(tmp_path / "disk", mount=way == "image"), 0
    moments = {"rename", "symlink", "rmdir"} if way == "image" else None  # mounting takes a while

    def look(call: str) -> None:
        if not saved or (moments and call not in moments):
            return
        with disk.left(way) as left:
            root = left / "run/checkpoints"
            found = newest_intact(root)
            assert found is not None, call
            assert int(found.name.removeprefix("checkpoint-")) >= saved, call
            for link in ("latest", "best"):
                assert is_intact((root / link).resolve()), (call, link)
                # no link points to what is not yet there
                assert is_intact(root / (disk.folder / "run/checkpoints" / link).readlink()), call

    def write(folder: Path) -> None:
        (folder / "lora").mkdir()
        (folder / "lora/weights").write_text(f"of {step}")
        Progress(step=step).write(folder)

    root = disk.folder / "run/checkpoints"
    with disk.held:
        with disk.watched(look):
            make_folders(root.parent)
            for step in (1, 2, 3):
                save_checkpoint(accelerator, root, step, write, keep=1, best=step != 2)
                saved = step
        moments = None
        look("the last save")


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_whole_before_it_is_written_and_there_afterwards(tmp_path, way):
    disk, moments = Disk(tmp_path / "disk", mount=way == "image"), []

    def look(call: str) -> None:
        with disk.left(way) as left:
            content = (left / "file").read_text() if (left / "file").exists() else None
        moments.append((call, content))

    with disk.held:
        with disk.watched(look):
            write_text(disk.folder / "file", "before")
            before = moments.copy()
            write_text(disk.folder / "file", "after")
        assert {content for _, content in before} <= {None, "before"}
        assert {content for _, content in moments[len(before) :]} == {"before", "after"}
        assert (before[-1][1], moments[-1][1]) == ("before", "after")
        assert [path.name for path in disk.folder.glob("*file*")] == ["file"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The disk of a run of two epochs, with a checkpoint before and after."""
    disk = Disk(tmp_path_factory.mktemp("power") / "disk", mount=MOUNT)
    with disk.held:
        with disk.watched():
            main(config_in(disk.folder / "new/logs"))
        yield disk


def config_in(logdir: Path, **fields):
    fields = {"num_epochs": 2, "num_checkpoint_limit": 1, "state_freq": 2, **fields}
    return short_config(logdir, "run", eval_prompts=1, eval_freq=0, **fields)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_after_a_power_cut(trained, accelerator, tmp_path, way):
    with trained.left(way) as left:
        logs = shutil.copytree(left / "new/logs", tmp_path / "logs", symlinks=True)
    (logs / ".run.lock").unlink(missing_ok=True)  # it names this process, which lives on
    for name in ("config.json", "metrics.jsonl"):
        content = (trained.folder / "new/logs/run" / name).read_text()
        assert (logs / "run" / name).read_text() == content
    config = json.loads(config_in(logs, resume="auto").to_json_best_effort())
    with ExitStack() as until:
        start, _ = find_start(accelerator, config, until)
        prepare_folder(start, config)
    assert Progress.read(start.checkpoint).epoch == 2
    lines = (logs / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]
