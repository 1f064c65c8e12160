import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from simulated_disk import Disk
from user_errors import raises_user_error

from flow_grpo.atomic_io import make_directories
from flow_grpo.errors import UserError
from flow_grpo.training.checkpoint import (
    STATE_DIR,
    Progress,
    find_latest_intact,
    find_weights,
    is_intact,
    list_checkpoints,
    repair_links,
)
from flow_grpo.training.checkpoint_writer import MIN_FREE_BYTES, save_checkpoint
from flow_grpo.training.export import ExportSource


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def save(accelerator, tmp_path):
    def save(step, keep=0, kept=True, best=False, fails=False):
        def write(folder):
            (folder / "weights").write_text(f"of {step}")
            Progress(epoch=step, step=step, kept=kept).write(folder)
            if fails:
                raise OSError(28, "No space left on device")

        return save_checkpoint(accelerator, tmp_path, step, write, keep=keep, best=best)

    return save


def names(root):
    return [p.name for p in list_checkpoints(root)]


def test_the_newest_checkpoints_are_kept_by_number_not_by_name(save, tmp_path):
    for step in (9, 10, 99, 100):
        save(step, keep=2)
    assert names(tmp_path) == ["checkpoint-99", "checkpoint-100"]
    assert (tmp_path / "latest" / "weights").read_text() == "of 100"


def test_a_limit_of_0_keeps_all_checkpoints(save, tmp_path):
    for step in range(5):
        save(step)
    assert len(names(tmp_path)) == 5


def test_the_best_checkpoint_is_kept(save, tmp_path):
    for step in range(5):
        save(step, keep=1, best=step == 1)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-4"]
    assert (tmp_path / "best" / "weights").read_text() == "of 1"


def test_a_resume_only_checkpoint_is_removed_by_the_next(save, tmp_path):
    for step in range(6):
        save(step, keep=2, kept=step % 2 == 0)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_a_failed_save_leaves_no_checkpoint_and_no_loss(save, tmp_path):
    save(1, keep=1)
    with raises_user_error("checkpoint-2", "No space left on device", tmp_path / "checkpoint-1"):
        save(2, keep=1, fails=True)
    assert names(tmp_path) == ["checkpoint-1"]
    assert not list(tmp_path.glob(".partial*"))
    save(2, keep=1)
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize(
    "damage", ["truncated", "missing", "changed", "no manifest", "broken manifest", "no progress"]
)
def test_a_damaged_checkpoint_is_skipped_and_replaced(save, tmp_path, caplog, damage):
    save(1)
    newest = save(2)
    if damage == "truncated":
        (newest / "weights").write_text("of")
    elif damage == "missing":
        (newest / "weights").unlink()
    elif damage == "changed":
        (newest / "weights").write_text("of 3")
    elif damage == "no progress":
        (newest / STATE_DIR / "files.json").write_text("{}")
        (newest / STATE_DIR / "progress.json").write_bytes(bytes(10))
    elif damage == "no manifest":
        (newest / STATE_DIR / "files.json").unlink()
    else:
        (newest / STATE_DIR / "files.json").write_text('{"weights"')
    assert find_latest_intact(tmp_path).name == "checkpoint-1"
    assert "checkpoint-2 is incomplete or damaged" in caplog.text
    save(2)
    assert find_latest_intact(tmp_path) == newest
    assert not list(tmp_path.glob(".damaged*"))


def test_a_damaged_checkpoint_stays_until_another_is_in_its_place(save, tmp_path):
    folder = save(1)
    (folder / "weights").write_text("precious?")
    with pytest.raises(UserError):
        save(1, fails=True)
    assert (folder / "weights").read_text() == "precious?"
    save(1)
    assert (folder / "weights").read_text() == "of 1"


def test_only_superseded_checkpoints_are_removed(save, tmp_path):
    """The run fell back from 6, whose LoRA is intact, to 4; then it saves 5 and passes 6."""
    for step in (4, 6):
        save(step, keep=1)
    (tmp_path / "checkpoint-6" / STATE_DIR / "progress.json").write_bytes(bytes(10))
    save(5, keep=1)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    save(7, keep=2)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-7"]
    save(8, keep=2)
    assert names(tmp_path) == ["checkpoint-7", "checkpoint-8"]


def test_a_checkpoint_ahead_of_a_run_that_fell_back_stays_until_passed(save, tmp_path):
    save(4)
    (save(6, kept=False) / "weights").write_text("damaged")
    save(5, keep=1)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    save(7, keep=1)
    assert names(tmp_path) == ["checkpoint-7"]


def test_pruning_a_moved_checkpoint_removes_its_link_only(save, tmp_path):
    moved = save(1).rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-1").symlink_to(moved)
    save(2, keep=1)
    assert names(tmp_path) == ["checkpoint-2"]
    assert is_intact(moved)


def test_an_old_manifest_without_checksums_is_valid(save):
    folder = save(1)
    manifest = folder / STATE_DIR / "files.json"
    sizes = {name: size for name, (size, _) in json.loads(manifest.read_text()).items()}
    manifest.write_text(json.dumps(sizes))
    assert is_intact(folder)
    (folder / "weights").write_text("of")
    assert not is_intact(folder)


def test_an_existing_checkpoint_is_not_written_again(save):
    folder = save(3)
    assert save(3, fails=True) == folder
    assert is_intact(folder)
    size, checksum = json.loads((folder / STATE_DIR / "files.json").read_text())["weights"]
    assert size == 4
    assert checksum == hashlib.sha256(b"of 3").hexdigest()


def test_weights_are_found_in_runs_checkpoints_and_directories(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10"):
        for kind in ("lora", "ema_lora"):
            folder = tmp_path / "checkpoints" / name / kind
            folder.mkdir(parents=True)
            (folder / "weights.safetensors").touch()
    newest = tmp_path / "checkpoints" / "checkpoint-10"
    assert find_weights(tmp_path) == find_weights(newest) == newest / "ema_lora"
    assert find_weights(newest / "lora") == newest / "lora"
    with raises_user_error(field=str(tmp_path / "checkpoints")):
        find_weights(tmp_path / "checkpoints")


def test_damaged_weights_are_not_used(save, tmp_path):
    """A run falls back to its newest intact weights; weights given by path are rejected."""
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        (folder / "lora").mkdir(parents=True)
        (folder / "lora" / "w.safetensors").write_text("good")
        (folder / STATE_DIR).mkdir()
        good = [4, hashlib.sha256(b"good").hexdigest()]
        (folder / STATE_DIR / "files.json").write_text(json.dumps({"lora/w.safetensors": good}))
    (folder / "lora" / "w.safetensors").write_text("baad")
    assert find_weights(tmp_path).parent.name == "checkpoint-1"
    with raises_user_error("lora/w.safetensors", field=str(folder / "lora")):
        find_weights(folder / "lora")
    with raises_user_error("lora/w.safetensors", field=str(folder / "lora")):
        ExportSource.find(folder / "lora", raw=True)
    (folder / "lora" / "w.safetensors").unlink()
    assert find_weights(tmp_path).parent.name == "checkpoint-1"
    (folder / "ema_lora").mkdir()
    (folder / "ema_lora" / "w.safetensors").touch()  # intact, unlike the raw weights
    assert ExportSource.find(folder).weights.name == "ema_lora"
    with raises_user_error("No such file", field=str(folder / "lora")):
        ExportSource.find(folder, raw=True)


def test_the_remains_of_a_killed_save_are_not_part_of_the_next(save, tmp_path):
    (tmp_path / ".partial-checkpoint-1").mkdir()
    (tmp_path / ".partial-checkpoint-1" / "old").touch()
    (tmp_path / ".latest").touch()
    folder = save(1)
    assert sorted(p.name for p in folder.iterdir()) == [STATE_DIR, "weights"]
    assert (tmp_path / "latest").resolve() == folder


def test_progress_is_written_as_readable_json(save):
    folder = save(1)
    assert (folder / STATE_DIR / "progress.json").read_text() == (
        '{\n "epoch": 1,\n "step": 1,\n "skipped": 0,\n "skipped_in_a_row": 0,\n "passes": 0,\n'
        ' "best": null,\n "algorithm": {},\n "questions": [],\n "record": {},\n "kept": true\n}\n'
    )


def test_best_is_linked_only_on_request(accelerator, tmp_path):
    save_checkpoint(accelerator, tmp_path, 1, Progress().write, keep=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "latest"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("\ndisk quota\nexceeded"), "disk quota"), (RuntimeError(), "RuntimeError")],
)
def test_a_failed_first_save_is_one_line_with_its_traceback_in_the_debug_log(
    accelerator, tmp_path, caplog, error, reason
):
    def write(folder):
        raise error

    caplog.set_level("DEBUG", "flow_grpo")
    with raises_user_error(f"{tmp_path}/checkpoint-1: {reason};"):
        save_checkpoint(accelerator, tmp_path, 1, write, keep=0)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("DEBUG", "saving failed")
    assert record.exc_info[0] is RuntimeError


@pytest.mark.parametrize(
    ("free", "reason", "shown"),
    [
        (MIN_FREE_BYTES - 1, "cannot serialize", "No space left on device (cannot serialize)"),
        (MIN_FREE_BYTES, "cannot serialize", "cannot serialize"),
        (0, "No space left on device: 'a'", "No space left on device: 'a'"),
        (0, None, "No space left on device ([Errno 2] No such file or directory: "),
    ],
)
def test_a_full_disk_is_named_even_if_the_library_does_not(
    accelerator, tmp_path, monkeypatch, free, reason, shown
):
    def write(folder):
        shutil.rmtree(folder)  # so that the rest fails if this does not
        if reason:
            raise RuntimeError(reason)

    monkeypatch.setattr("shutil.disk_usage", {tmp_path: SimpleNamespace(free=free)}.__getitem__)
    with raises_user_error(f"{tmp_path}/checkpoint-1: {shown}"):
        save_checkpoint(accelerator, tmp_path, 1, write, keep=0)


def test_a_saved_checkpoint_is_flushed_to_disk(accelerator, tmp_path):
    disk = Disk(tmp_path / "disk", mount=False)
    with disk.resources, disk.recording():
        make_directories(disk.folder / "run")
        save_checkpoint(accelerator, disk.folder / "run/checkpoints", 1, Progress().write, keep=0)
        with disk.after_power_loss("lazy") as left:
            assert is_intact(left / "run/checkpoints/latest")


@pytest.mark.parametrize(
    ("name", "content", "damage"),
    [
        ("weights", "of", ["weights ", "4 bytes"]),
        ("weights", "of 3", ["weights ", "checksum"]),
        ("weights", None, ["{folder}/weights: No such file or directory"]),
        ("state/files.json", "[]", ["state/files.json", "state/progress.json"]),
        ("state/files.json", "{}", ["state/files.json", "state/progress.json"]),
        ("state/files.json", "", ["files.json is empty"]),
        ("state/files.json", "\0" * 200, ["files.json is empty"]),
        (  # not hashed: a device such as /dev/zero is endless
            "state/files.json",
            '{"/dev/null": [0, ""], "state/progress.json": 0}',
            ["/dev/null ", "0 bytes"],
        ),
    ],
)
def test_a_warning_names_the_damaged_file(save, tmp_path, caplog, name, content, damage):
    folder = save(1)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert find_latest_intact(tmp_path) is None
    [message] = caplog.messages
    assert message.startswith(f"{folder} ")
    assert all(part.format(folder=folder) in message for part in damage)


@pytest.mark.parametrize("name", ["files.json", "progress.json"])
def test_state_files_of_any_depth_or_size_are_rejected_in_one_line(save, tmp_path, caplog, name):
    folder, path = save(1), save(2) / STATE_DIR / name
    if name == "progress.json":  # otherwise the manifest would reveal it
        (path.parent / "files.json").write_text(json.dumps({f"{STATE_DIR}/{name}": 1 << 20}))
    path.write_text("[" * (1 << 20))
    assert find_latest_intact(tmp_path) == folder
    with path.open("r+b") as file:  # sparse
        file.truncate(1 << 40)
    if name == "progress.json":
        (path.parent / "files.json").write_text(json.dumps({f"{STATE_DIR}/{name}": 1 << 40}))
    assert find_latest_intact(tmp_path) == folder
    deep, large = caplog.messages
    assert f": {name} is " in deep
    assert f"{name} has more than 16777216 bytes" in large
    assert "\n" not in deep + large


@pytest.mark.parametrize("content", ["", "[" * 100_000, '{"": 1}', '{"lora/w.safetensors": 4}'])
def test_weights_beside_a_manifest_that_cannot_be_read_can_be_used(tmp_path, content):
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "w.safetensors").write_text("good")
    (tmp_path / STATE_DIR).mkdir()
    (tmp_path / STATE_DIR / "files.json").write_text(content)
    assert find_weights(tmp_path) == lora


def test_a_checkpoint_that_cannot_be_removed_stays_with_a_warning(
    save, tmp_path, caplog, monkeypatch
):
    folder = save(1)

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", busy)
    save(2, keep=1)
    assert caplog.messages == [f"cannot remove {folder}: Device or resource busy"]
    assert is_intact(folder)
    with raises_user_error("No space left on device"):
        save(3, fails=True)


def test_kinds_of_weights_have_an_order_of_preference(tmp_path):
    for kind in ("model", "ema_model", "transformer", "ema_transformer", "lora", "ema_lora"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "model.safetensors").touch()
        assert find_weights(tmp_path) == tmp_path / kind


def test_skipped_damaged_weights_are_logged(tmp_path, caplog):
    for step in (1, 2):
        lora = tmp_path / "checkpoints" / f"checkpoint-{step}" / "lora"
        lora.mkdir(parents=True)
        (lora / "w.safetensors").write_text("good")
    (lora.parent / STATE_DIR).mkdir()
    (lora.parent / STATE_DIR / "files.json").write_text('{"lora/w.safetensors": 5}')
    assert find_weights(tmp_path).parent.name == "checkpoint-1"
    [message] = caplog.messages
    assert all(part in message for part in (str(lora), "lora/w.safetensors", "5 bytes"))


def test_a_directory_without_weights_is_rejected(tmp_path):
    with raises_user_error(field=str(tmp_path)):
        find_weights(tmp_path)


def test_links_are_repaired_to_the_newest_and_the_first_best_checkpoint(tmp_path, caplog):
    """A later checkpoint with the same score is no improvement."""
    folders = [tmp_path / f"checkpoint-{step}" for step in range(5)]
    for step, score in enumerate((0.25, 0.5, 0.5, None, 0.5)):
        (folders[step] / STATE_DIR).mkdir(parents=True)
        best = 0.5 if step < 4 else None
        Progress(step=step, best=best, record={"eval/avg": score}).write(folders[step])

    def links(newest):
        caplog.clear()
        repair_links(newest)
        return [str((tmp_path / link).readlink()) for link in ("latest", "best")]

    assert links(folders[3]) == ["checkpoint-3", "checkpoint-1"]
    latest, best = caplog.messages
    assert latest.startswith(f"{tmp_path}/latest did not point to checkpoint-3")
    assert best.startswith(f"{tmp_path}/best did not point to checkpoint-1")
    assert links(folders[3]) == ["checkpoint-3", "checkpoint-1"]
    assert not caplog.messages
    (tmp_path / "best").unlink()
    assert links(folders[1]) == ["checkpoint-1", "checkpoint-1"]
    assert links(folders[4]) == ["checkpoint-4", "checkpoint-1"]  # has no best score
    (folders[1] / STATE_DIR / "progress.json").write_text("")
    (folders[2] / STATE_DIR / "progress.json").write_text('{"record": 1}')
    assert links(folders[3]) == ["checkpoint-3", "checkpoint-1"]  # no other is known
