import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from power import Disk

from flow_grpo.disk import make_folders
from flow_grpo.errors import UserError
from flow_grpo.run.checkpoint import (
    FULL,
    STATE,
    Progress,
    is_intact,
    list_checkpoints,
    newest_intact,
    repair_links,
    save_checkpoint,
    weights_in,
)
from flow_grpo.run.export import Source


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


def test_the_newest_are_kept_by_number_not_by_name(save, tmp_path):
    for step in (9, 10, 99, 100):
        save(step, keep=2)
    assert names(tmp_path) == ["checkpoint-99", "checkpoint-100"]
    assert (tmp_path / "latest" / "weights").read_text() == "of 100"


def test_zero_keeps_all(save, tmp_path):
    for step in range(5):
        save(step)
    assert len(names(tmp_path)) == 5


def test_the_best_stays(save, tmp_path):
    for step in range(5):
        save(step, keep=1, best=step == 1)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-4"]
    assert (tmp_path / "best" / "weights").read_text() == "of 1"


def test_what_is_only_there_to_resume_from_goes_with_the_next(save, tmp_path):
    for step in range(6):
        save(step, keep=2, kept=step % 2 == 0)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_a_failed_save_leaves_no_checkpoint_and_no_loss(save, tmp_path):
    save(1, keep=1)
    message = "cannot save .*checkpoint-2: .*No space left on device; .*checkpoint-1 is intact"
    with pytest.raises(UserError, match=message):
        save(2, keep=1, fails=True)
    assert names(tmp_path) == ["checkpoint-1"]
    assert not list(tmp_path.glob(".partial*"))
    save(2, keep=1)
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize(
    "damage", ["truncated", "missing", "changed", "no manifest", "broken manifest", "no progress"]
)
def test_a_damaged_checkpoint_is_passed_over_and_replaced(save, tmp_path, caplog, damage):
    save(1)
    newest = save(2)
    if damage == "truncated":
        (newest / "weights").write_text("of")
    elif damage == "missing":
        (newest / "weights").unlink()
    elif damage == "changed":
        (newest / "weights").write_text("of 3")
    elif damage == "no progress":
        (newest / STATE / "files.json").write_text("{}")
        (newest / STATE / "progress.json").write_bytes(bytes(10))
    elif damage == "no manifest":
        (newest / STATE / "files.json").unlink()
    else:
        (newest / STATE / "files.json").write_text('{"weights"')
    assert newest_intact(tmp_path).name == "checkpoint-1"
    assert "checkpoint-2 is incomplete or damaged" in caplog.text
    save(2)
    assert newest_intact(tmp_path) == newest
    assert not list(tmp_path.glob(".damaged*"))


def test_a_damaged_checkpoint_stays_until_another_is_in_its_place(save, tmp_path):
    folder = save(1)
    (folder / "weights").write_text("precious?")
    with pytest.raises(UserError):
        save(1, fails=True)
    assert (folder / "weights").read_text() == "precious?"
    save(1)
    assert (folder / "weights").read_text() == "of 1"


def test_nothing_goes_that_was_not_superseded(save, tmp_path):
    """The run fell back from 6, of which LoRA is good, to 4; then it saves 5 and passes 6."""
    for step in (4, 6):
        save(step, keep=1)
    (tmp_path / "checkpoint-6" / STATE / "progress.json").write_bytes(bytes(10))
    save(5, keep=1)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    save(7, keep=2)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-7"]
    save(8, keep=2)
    assert names(tmp_path) == ["checkpoint-7", "checkpoint-8"]


def test_what_is_ahead_of_a_run_that_fell_back_stays_until_it_is_passed(save, tmp_path):
    save(4)
    (save(6, kept=False) / "weights").write_text("damaged")
    save(5, keep=1)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    save(7, keep=1)
    assert names(tmp_path) == ["checkpoint-7"]


def test_of_a_checkpoint_that_was_moved_only_the_link_goes(save, tmp_path):
    moved = save(1).rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-1").symlink_to(moved)
    save(2, keep=1)
    assert names(tmp_path) == ["checkpoint-2"]
    assert is_intact(moved)


def test_a_manifest_of_sizes_is_still_good(save):
    folder = save(1)
    manifest = folder / STATE / "files.json"
    sizes = {name: size for name, (size, _) in json.loads(manifest.read_text()).items()}
    manifest.write_text(json.dumps(sizes))
    assert is_intact(folder)
    (folder / "weights").write_text("of")
    assert not is_intact(folder)


def test_a_checkpoint_that_is_there_is_not_written_again(save):
    folder = save(3)
    assert save(3, fails=True) == folder
    assert is_intact(folder)
    size, checksum = json.loads((folder / STATE / "files.json").read_text())["weights"]
    assert size == 4
    assert checksum == hashlib.sha256(b"of 3").hexdigest()


def test_weights_are_found_in_runs_checkpoints_and_folders(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10"):
        for kind in ("lora", "ema_lora"):
            folder = tmp_path / "checkpoints" / name / kind
            folder.mkdir(parents=True)
            (folder / "weights.safetensors").touch()
    newest = tmp_path / "checkpoints" / "checkpoint-10"
    assert weights_in(tmp_path) == weights_in(newest) == newest / "ema_lora"
    assert weights_in(newest / "lora") == newest / "lora"
    with pytest.raises(UserError, match="no checkpoint at"):
        weights_in(tmp_path / "checkpoints")


def test_damaged_weights_are_not_taken(save, tmp_path):
    """Of a run the newest that are whole; those that are named are refused."""
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        (folder / "lora").mkdir(parents=True)
        (folder / "lora" / "w.safetensors").write_text("good")
        (folder / STATE).mkdir()
        good = [4, hashlib.sha256(b"good").hexdigest()]
        (folder / STATE / "files.json").write_text(json.dumps({"lora/w.safetensors": good}))
    (folder / "lora" / "w.safetensors").write_text("baad")
    assert weights_in(tmp_path).parent.name == "checkpoint-1"
    with pytest.raises(UserError, match=r"2/lora is damaged: lora/w\.safetensors has"):
        weights_in(folder / "lora")
    with pytest.raises(UserError, match=r"2/lora is damaged: lora/w\.safetensors has"):
        Source.find(folder / "lora", raw=True)
    (folder / "lora" / "w.safetensors").unlink()
    assert weights_in(tmp_path).parent.name == "checkpoint-1"
    (folder / "ema_lora").mkdir()
    (folder / "ema_lora" / "w.safetensors").touch()  # whole, unlike what `raw` asks for
    assert Source.find(folder).weights.name == "ema_lora"
    with pytest.raises(UserError, match=r"2/lora is damaged: .*No such file"):
        Source.find(folder, raw=True)


def test_the_remains_of_a_killed_save_are_not_part_of_the_next(save, tmp_path):
    (tmp_path / ".partial-checkpoint-1").mkdir()
    (tmp_path / ".partial-checkpoint-1" / "old").touch()
    (tmp_path / ".latest").touch()
    folder = save(1)
    assert sorted(p.name for p in folder.iterdir()) == [STATE, "weights"]
    assert (tmp_path / "latest").resolve() == folder


def test_what_tells_the_state_of_a_checkpoint_can_be_read_by_a_person(save):
    folder = save(1)
    assert (folder / STATE / "progress.json").read_text() == (
        '{\n "epoch": 1,\n "step": 1,\n "skipped": 0,\n "skipped_in_a_row": 0,\n "passes": 0,\n'
        ' "best": null,\n "algorithm": {},\n "questions": [],\n "record": {},\n "kept": true\n}\n'
    )


def test_no_checkpoint_is_the_best_unless_it_is_said(accelerator, tmp_path):
    save_checkpoint(accelerator, tmp_path, 1, Progress().write, keep=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "latest"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("\ndisk quota\nexceeded"), "disk quota"), (RuntimeError(), "RuntimeError")],
)
def test_a_first_save_that_fails_is_told_and_its_traceback_is_kept_for_debugging(
    accelerator, tmp_path, caplog, error, reason
):
    def write(folder):
        raise error

    caplog.set_level("DEBUG", "flow_grpo")
    with pytest.raises(UserError) as told:
        save_checkpoint(accelerator, tmp_path, 1, write, keep=0)
    assert str(told.value) == (
        f"cannot save {tmp_path}/checkpoint-1: {reason}; there is no earlier checkpoint"
    )
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("DEBUG", "saving failed")
    assert record.exc_info[0] is RuntimeError


@pytest.mark.parametrize(
    ("free", "reason", "told"),
    [
        (FULL - 1, "cannot serialize", "No space left on device (cannot serialize)"),
        (FULL, "cannot serialize", "cannot serialize"),
        (0, "No space left on device: 'a'", "No space left on device: 'a'"),
        (0, None, "No space left on device ([Errno 2] No such file or directory: "),
    ],
)
def test_a_full_disk_is_told_whatever_a_library_says(
    accelerator, tmp_path, monkeypatch, free, reason, told
):
    def write(folder):
        shutil.rmtree(folder)  # so that the rest fails if this does not
        if reason:
            raise RuntimeError(reason)

    monkeypatch.setattr("shutil.disk_usage", {tmp_path: SimpleNamespace(free=free)}.__getitem__)
    with pytest.raises(UserError) as caught:
        save_checkpoint(accelerator, tmp_path, 1, write, keep=0)
    assert str(caught.value).startswith(f"cannot save {tmp_path}/checkpoint-1: {told}")


def test_a_checkpoint_is_on_the_disk_once_it_is_saved(accelerator, tmp_path):
    disk = Disk(tmp_path / "disk", mount=False)
    with disk.held, disk.watched():
        make_folders(disk.folder / "run")
        save_checkpoint(accelerator, disk.folder / "run/checkpoints", 1, Progress().write, keep=0)
        with disk.left("lazy") as left:
            assert is_intact(left / "run/checkpoints/latest")


@pytest.mark.parametrize(
    ("name", "content", "damage"),
    [
        ("weights", "of", "weights has not the 4 bytes it was written with"),
        ("weights", "of 3", "weights has another checksum than when it was written"),
        ("weights", None, "{folder}/weights: No such file or directory"),
        ("state/files.json", "[]", "state/files.json does not list state/progress.json"),
        ("state/files.json", "{}", "state/files.json does not list state/progress.json"),
        ("state/files.json", "", "state cannot be read: files.json is empty"),
        ("state/files.json", "\0" * 200, "state cannot be read: files.json is empty"),
        (  # of a device as endless as /dev/zero no checksum is taken
            "state/files.json",
            '{"/dev/null": [0, ""], "state/progress.json": 0}',
            "/dev/null has not the 0 bytes it was written with",
        ),
    ],
)
def test_damage_is_told_with_the_file(save, tmp_path, caplog, name, content, damage):
    folder = save(1)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert newest_intact(tmp_path) is None
    damage = damage.format(folder=folder)
    assert caplog.messages == [
        f"{folder} is incomplete or damaged ({damage}); trying the one before"
    ]


@pytest.mark.parametrize("name", ["files.json", "progress.json"])
def test_a_state_of_any_depth_or_size_is_told_in_one_line(save, tmp_path, caplog, name):
    folder, path = save(1), save(2) / STATE / name
    if name == "progress.json":  # which the manifest would tell
        (path.parent / "files.json").write_text(json.dumps({f"{STATE}/{name}": 1 << 20}))
    path.write_text("[" * (1 << 20))
    assert newest_intact(tmp_path) == folder
    with path.open("r+b") as file:  # takes no room on the disk
        file.truncate(1 << 40)
    if name == "progress.json":
        (path.parent / "files.json").write_text(json.dumps({f"{STATE}/{name}": 1 << 40}))
    assert newest_intact(tmp_path) == folder
    deep, large = caplog.messages
    assert f"(state cannot be read: {name} is no JSON that we wrote: " in deep
    assert f"(state cannot be read: {name} has more than 16777216 bytes)" in large
    assert "\n" not in deep + large


@pytest.mark.parametrize("content", ["", "[" * 100_000, '{"": 1}', '{"lora/w.safetensors": 4}'])
def test_weights_beside_a_manifest_that_cannot_be_read_can_be_used(tmp_path, content):
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "w.safetensors").write_text("good")
    (tmp_path / STATE).mkdir()
    (tmp_path / STATE / "files.json").write_text(content)
    assert weights_in(tmp_path) == lora


def test_what_cannot_be_removed_is_told_and_stays(save, tmp_path, caplog, monkeypatch):
    folder = save(1)

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", busy)
    save(2, keep=1)
    assert caplog.messages == [f"cannot remove {folder}: Device or resource busy"]
    assert is_intact(folder)
    with pytest.raises(UserError, match="No space left on device"):
        save(3, fails=True)


def test_each_kind_of_weights_is_preferred_to_those_before(tmp_path):
    for kind in ("model", "ema_model", "transformer", "ema_transformer", "lora", "ema_lora"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "model.safetensors").touch()
        assert weights_in(tmp_path) == tmp_path / kind


def test_damaged_weights_that_are_passed_over_are_told(tmp_path, caplog):
    for step in (1, 2):
        lora = tmp_path / "checkpoints" / f"checkpoint-{step}" / "lora"
        lora.mkdir(parents=True)
        (lora / "w.safetensors").write_text("good")
    (lora.parent / STATE).mkdir()
    (lora.parent / STATE / "files.json").write_text('{"lora/w.safetensors": 5}')
    assert weights_in(tmp_path).parent.name == "checkpoint-1"
    reason = "lora/w.safetensors has not the 5 bytes it was written with"
    assert caplog.messages == [f"{lora} is damaged ({reason})"]


def test_a_folder_without_weights_is_told_with_what_may_be_named(tmp_path):
    with pytest.raises(UserError) as told:
        weights_in(tmp_path)
    assert str(told.value) == (
        f"no checkpoint at {tmp_path}: name a run, a checkpoint or a folder in one"
    )


def test_links_are_repaired_to_the_newest_and_the_first_of_the_best(tmp_path, caplog):
    """As it was when they were made: a second of the same score is no improvement."""
    folders = [tmp_path / f"checkpoint-{step}" for step in range(5)]
    for step, score in enumerate((0.25, 0.5, 0.5, None, 0.5)):
        (folders[step] / STATE).mkdir(parents=True)
        best = 0.5 if step < 4 else None
        Progress(step=step, best=best, record={"eval/avg": score}).write(folders[step])

    def links(newest):
        caplog.clear()
        repair_links(newest)
        return [str((tmp_path / link).readlink()) for link in ("latest", "best")]

    assert links(folders[3]) == ["checkpoint-3", "checkpoint-1"]
    assert caplog.messages == [
        f"{tmp_path}/latest did not point to checkpoint-3; now it does",
        f"{tmp_path}/best did not point to checkpoint-1; now it does",
    ]
    assert links(folders[3]) == ["checkpoint-3", "checkpoint-1"]
    assert not caplog.messages
    (tmp_path / "best").unlink()
    assert links(folders[1]) == ["checkpoint-1", "checkpoint-1"]
    assert links(folders[4]) == ["checkpoint-4", "checkpoint-1"]  # which knows of no score
    (folders[1] / STATE / "progress.json").write_text("")
    (folders[2] / STATE / "progress.json").write_text('{"record": 1}')
    assert links(folders[3]) == ["checkpoint-3", "checkpoint-1"]  # nobody knows better
