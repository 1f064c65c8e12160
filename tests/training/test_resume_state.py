"""Resuming from state that is damaged, malicious, in use, or written with other settings."""

import json
import os
import pickle
import resource
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from malicious_files import rewrite_manifest, write_malicious_pickle
from ml_collections import ConfigDict
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from train import main
from user_errors import raises_user_error

from flow_grpo.config.saved_config import load_run_config
from flow_grpo.diffusion.export import export
from flow_grpo.diffusion.fields import DIFFUSION_SPEC, get_config
from flow_grpo.diffusion.models import load_adapter
from flow_grpo.diffusion.session import Session, build_session
from flow_grpo.training.checkpoint import STATE_DIR, find_weights
from flow_grpo.training.distributed import accumulate_gradients
from flow_grpo.training.export import ExportSource
from flow_grpo.training.lock import RunLock
from flow_grpo.training.provenance import data_settings, fingerprints
from flow_grpo.training.resume import RunStart, find_start, prepare_run_directory
from flow_grpo.training.safe_loading import reject_unsafe_files
from flow_grpo.training.saving import save_session
from flow_grpo.training.trackers import save_samples

# every file that a resumed run reads
STATE_FILES = {
    "trained.safetensors",
    "ema.safetensors",
    "reference.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",  # of earlier versions
    "progress.json",
    "lora.json",
    "files.json",
}
NEWEST = "checkpoints/checkpoint-4"


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def config(tiny_sd3, prompt_folder) -> ConfigDict:
    config = get_config()
    config.run_name, config.device, config.resume = "run", "cpu", "auto"
    config.pretrained.model, config.dataset = str(tiny_sd3), str(prompt_folder)
    config.resolution, config.max_sequence_length = 32, 8
    config.num_epochs, config.save_freq, config.num_checkpoint_limit = 2, 1, 0
    config.eval_prompts = config.log_images = 1
    config.sample.num_steps = config.sample.eval_num_steps = 3
    config.sample.train_batch_size = config.sample.num_image_per_prompt = 4
    config.sample.num_batches_per_epoch, config.train.batch_size = 2, 4
    config.train.gradient_accumulation_steps = 1
    config.train.lora_rank, config.train.lora_alpha = 1, 2
    return config


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory) -> Path:
    """The directory of a run of two epochs with two updates each."""
    config = config.copy_and_resolve_references()
    config.logdir = str(tmp_path_factory.mktemp("logs"))
    folder = main(config).folder
    add_random_states(folder / NEWEST)
    return folder


def add_random_states(checkpoint: Path) -> None:
    """Add a file that earlier versions saved."""
    path = checkpoint / STATE_DIR / "files.json"
    save_accelerator_state(checkpoint / STATE_DIR, [], [], [], [], process_index=0, step=0)
    names = {**json.loads(path.read_text()), f"{STATE_DIR}/random_states_0.pkl": None}
    path.write_text(json.dumps(names))
    rewrite_manifest(checkpoint)


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "logs" / "run", symlinks=True)


@pytest.fixture
def resume(config, tmp_path):
    """Build the session of a resumed run."""
    sessions = []

    def resume(**fields) -> Session:
        changed = config.copy_and_resolve_references()
        changed.logdir = str(tmp_path / "logs")
        changed.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
        sessions.append(build_session(changed))
        return sessions[-1]

    yield resume
    for session in sessions:
        session.close()


@pytest.fixture
def find(config, tmp_path):
    """Only find where a run would start."""

    def find(**fields) -> RunStart:
        values = {**json.loads(config.to_json_best_effort()), "logdir": str(tmp_path / "logs")}
        with ExitStack() as cleanup:
            return find_start(Accelerator(cpu=True), values | fields, cleanup)[0]

    return find


def test_the_list_of_files_is_complete(finished):
    state = finished / NEWEST / STATE_DIR
    assert {str(p.relative_to(state)) for p in state.rglob("*")} == STATE_FILES


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "name",
    [*sorted(f"{NEWEST}/{STATE_DIR}/{n}" for n in STATE_FILES), "config.json", "metrics.jsonl"],
)
def test_no_file_that_a_run_loads_can_run_code(run, resume, tmp_path, caplog, name, zipped):
    trace = tmp_path / "trace"
    write_malicious_pickle(run / name, trace, zipped=zipped)
    if not name.endswith("files.json"):
        rewrite_manifest(run / NEWEST)
    skipped = {"progress.json", "files.json", "metrics.jsonl"}  # with a warning
    if Path(name).name in skipped:
        resume()
        assert "checkpoint-4" in caplog.text or "metrics.jsonl" in caplog.text
    else:
        with raises_user_error(Path(name).name if name == "config.json" else run / NEWEST):
            resume()
    assert not trace.exists()


@pytest.mark.parametrize("zipped", [False, True])
def test_no_weights_that_are_evaluated_or_exported_can_run_code(run, tmp_path, tiny_sd3, zipped):
    trace, name = tmp_path / "trace", "pytorch_lora_weights"
    for extra in (".bin", ".safetensors"):
        write_malicious_pickle(run / NEWEST / "ema_lora" / (name + extra), trace, zipped=zipped)
    shutil.rmtree(run / NEWEST / STATE_DIR)  # weights may come without
    with raises_user_error(run / NEWEST / "ema_lora" / f"{name}.safetensors", "cannot"):
        export(ExportSource.find(run), str(tiny_sd3), tmp_path / "out")
    with pytest.raises(Exception, match=r"(?i)header|safetensors|cannot"):
        load_adapter(str(tiny_sd3)).load_weights(find_weights(run))
    assert not trace.exists()


def test_the_index_of_sharded_files_can_run_no_code(tmp_path):
    """FSDP's index, which torch reads with plain pickle."""
    state, trace = tmp_path / "checkpoint-2" / STATE_DIR, tmp_path / "trace"
    tensors = {"model": {"w": torch.ones(3), "step": 1}, "lr": 0.1}
    dcp.save(tensors, checkpoint_id=state / "model_0", no_dist=True)
    reject_unsafe_files(Accelerator(cpu=True), tmp_path / "checkpoint-2")
    write_malicious_pickle(state / "model_0" / ".metadata", trace, zipped=False)
    with raises_user_error(field=str(state / "model_0" / ".metadata")):
        reject_unsafe_files(Accelerator(cpu=True), tmp_path / "checkpoint-2")
    assert not trace.exists()


@pytest.mark.parametrize("place", ["model_0/.metadata", "optimizer.bin"])
def test_enumerations_in_pickles_of_early_python_3_11_are_data(tmp_path, place):
    """Python 3.11.0 to 3.11.3 pickles a member of an enumeration as `getattr(type, name)`."""

    class Pickled:
        def __init__(self, *arguments):
            self.arguments = arguments

        def __reduce__(self):
            return getattr, self.arguments

    path = tmp_path / "checkpoint-2" / STATE_DIR / place
    path.parent.mkdir(parents=True)
    kind = _MEM_FORMAT_ENCODING

    def write(*arguments):
        if place.endswith(".metadata"):
            path.write_bytes(pickle.dumps(Pickled(*arguments)))
        else:
            torch.save(Pickled(*arguments), path)

    with torch.serialization.safe_globals([kind, torch.Size]):
        write(kind, "TORCH_CHANNELS_LAST")
        reject_unsafe_files(Accelerator(cpu=True), tmp_path / "checkpoint-2")
        for arguments in ((torch.Size, "count"), (kind, "mro"), (kind.TORCH_CHANNELS_LAST, "name")):
            write(*arguments)
            with raises_user_error(field=str(path)):
                reject_unsafe_files(Accelerator(cpu=True), tmp_path / "checkpoint-2")


@pytest.mark.parametrize("name", sorted(STATE_FILES - {"files.json"}))
@pytest.mark.parametrize("damage", ["zeros", "noise"])
def test_damage_of_the_same_size_falls_back_to_the_checkpoint_before(
    run, find, caplog, name, damage
):
    path = run / NEWEST / STATE_DIR / name
    content = bytearray(path.read_bytes())
    if damage == "zeros":
        content = bytes(len(content))
    else:  # 4 KiB, or as much as fits
        middle = len(content) // 2
        noise = bytes(255 - b for b in content[middle : middle + 4096])
        content[middle : middle + 4096] = noise
    path.write_bytes(content)
    assert find().checkpoint == run / "checkpoints/checkpoint-2"
    assert any(
        str(run / NEWEST) in message and f"state/{name} " in message for message in caplog.messages
    )


@pytest.mark.parametrize("name", ["trained.safetensors", "optimizer.bin", "ema.safetensors"])
def test_damage_that_an_old_manifest_cannot_detect_is_a_one_line_error(run, resume, name):
    state = run / NEWEST / STATE_DIR
    (state / name).write_bytes(bytes((state / name).stat().st_size))
    manifest = json.loads((state / "files.json").read_text())
    (state / "files.json").write_text(json.dumps({n: size for n, (size, _) in manifest.items()}))
    with raises_user_error(run / NEWEST):
        resume()


def test_without_an_intact_checkpoint_nothing_is_changed(run, resume):
    for checkpoint in (run / "checkpoints").glob("checkpoint-*"):
        (checkpoint / STATE_DIR / "optimizer.bin").write_bytes(b"")
    before = snapshot(run)
    with raises_user_error("3", field=str(run / "checkpoints")):
        resume()
    assert snapshot(run) == before
    assert list(run.parent.iterdir()) == [run]  # no lock either


def test_metrics_of_a_run_without_a_checkpoint_are_moved_aside(run, resume, caplog):
    lines = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "checkpoints")
    session = resume()
    assert session.progress.epoch == -1
    assert (run / "metrics.jsonl.1").read_text() == lines
    assert f"{run}/metrics.jsonl.1" in caplog.text


CHANGED = {
    "train__learning_rate": 1e-5,
    "train__adam_beta1": 0.5,
    "train__adam_beta2": 0.6,
    "train__adam_weight_decay": 0.7,
    "train__adam_epsilon": 1e-3,
    "train__ema_decay": 0.25,
    "train__ema_update_interval": 3,
    "seed": 7,
}


@pytest.mark.parametrize("way", ["auto", "path"])
def test_a_changed_setting_is_used_and_logged(run, resume, caplog, way):
    where = {} if way == "auto" else {"run_name": "branch", "resume": str(run)}
    session = resume(**CHANGED, **where)
    [group] = session.optimizer.param_groups
    used = group["lr"], group["betas"], group["weight_decay"], group["eps"]
    assert used == (1e-5, (0.5, 0.6), 0.7, 1e-3)
    assert (session.ema.decay, session.ema.every) == (0.25, 3)
    saved = json.loads((session.folder / "config.json").read_text())
    for name, value in CHANGED.items():
        name = name.replace("__", ".")
        assert f"{name}={value!r} " in caplog.text
        section, _, key = name.rpartition(".")
        assert (saved[section] if section else saved)[key] == value
    assert "run_name" not in caplog.text
    assert session.progress.step == 4
    state = session.optimizer.state_dict()["state"]
    saved = torch.load(run / NEWEST / STATE_DIR / "optimizer.bin")["state"]
    assert torch.equal(state[0]["exp_avg"], saved[0]["exp_avg"])


@pytest.mark.parametrize("way", ["auto", "path"])
@pytest.mark.parametrize(
    ("fields", "name", "before", "now"),
    [
        ({"train__lora_rank": 32}, "train.lora_rank", 1, 32),
        ({"train__lora_alpha": 64}, "train.lora_alpha", 2, 64),
        ({"train__lora_target_modules": "to_q"}, "train.lora_target_modules", "''", "to_q"),
        ({"use_lora": False}, "use_lora", True, False),
    ],
)
def test_an_immutable_setting_is_rejected(run, find, config, fields, name, before, now, way):
    values = config.copy_and_resolve_references()
    values.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    where = {} if way == "auto" else {"run_name": "branch", "resume": str(run)}
    with raises_user_error(before, run / NEWEST, field=name, value=now):
        find(train=values.train.to_dict(), use_lora=values.use_lora, **where)


def test_lora_layers_may_be_named_in_another_order(run, find, config):
    """An earlier version's config does not have the setting."""
    file, train = run / "config.json", config.train.to_dict()
    saved = json.loads(file.read_text())
    saved["train"]["lora_target_modules"] = "attn.to_v,attn.to_q"
    file.write_text(json.dumps(saved))
    find(train={**train, "lora_target_modules": "['attn.to_q', 'attn.to_v']"})
    del saved["train"]["lora_target_modules"]
    file.write_text(json.dumps(saved))
    find(train=train)
    with raises_user_error("''", field="train.lora_target_modules", value="attn.to_q"):
        find(train={**train, "lora_target_modules": "attn.to_q"})


GOALS = [
    {"algorithm": "grpo_guard"},
    {"pretrained__model": "assets/tiny-sd3"},
    {"dataset": "dataset/ocr"},
    {"eval_dataset": "dataset/ocr"},
    {"reward_fn": {"jpeg_incompressibility": 1.0}},
    {"eval_reward_fn": {"jpeg_incompressibility": 1.0}},
    {"custom_rewards": {"mine": "degenerate_rewards:short"}},
]


@pytest.mark.parametrize("way", ["auto", "path", "before its first checkpoint"])
@pytest.mark.parametrize("fields", GOALS, ids=lambda fields: next(iter(fields)))
def test_a_changed_goal_is_rejected_unless_confirmed(run, resume, caplog, fields, way):
    where = {"run_name": "branch", "resume": str(run)} if way == "path" else {}
    if way.startswith("before"):
        shutil.rmtree(run / "checkpoints")
    [(name, value)] = fields.items()
    name, before = name.replace("__", "."), snapshot(run)
    hint = f"--resume {run}" if way != "path" else "set it back"
    with raises_user_error(f"{name}=", hint, "--config.resume_changed=True", field=str(run)):
        resume(**fields, **where)
    assert snapshot(run) == before
    assert not (run.parent / "branch").exists()
    if name == "reward_fn":
        session = resume(**fields, **where, resume_changed=True)
        assert session.reward.weights == value
        assert "reward_fn={'jpeg_incompressibility': 1.0} " in caplog.text
        assert "resume_changed" not in caplog.text


def test_a_changed_method_is_rejected_before_its_settings(run, resume):
    """nft has more noise levels than the run has steps."""
    with raises_user_error("algorithm='nft'", field=str(run)):
        resume(algorithm="nft")


def test_changed_prompts_under_the_same_name_are_a_changed_goal(run, resume, caplog, tmp_path):
    (tmp_path / "train.txt").write_text("a cat\n")
    cat = fingerprints(str(tmp_path))
    (tmp_path / "train.txt").write_text("a dog\n")
    assert fingerprints(str(tmp_path)).keys() == cat.keys()
    assert fingerprints(str(tmp_path)) != cat
    (tmp_path / "votes.jsonl").write_text("{}\n")
    assert "preferences/votes.jsonl" in fingerprints("", preferences=str(tmp_path))
    assert data_settings({"preferences": {"data": "votes"}})["preferences"] == "votes"
    start = json.loads((run / "start.json").read_text())
    [name, _] = sorted(start["prompts"])  # test and training
    start["prompts"] |= {name: "6 0123"}
    (run / "start.json").write_text(json.dumps(start))
    with raises_user_error(name, "--config.resume_changed=True", field=str(run)):
        resume()
    resume(resume_changed=True).close()
    assert any(name in message for message in caplog.messages)
    resume()  # they are the run's own prompts now


def test_a_run_finds_its_files_from_any_working_directory(run, tmp_path, monkeypatch):
    """But not in a directory that came with the run."""
    home, config = tmp_path / "home", json.loads((run / "config.json").read_text())
    (home / "sets/a").mkdir(parents=True)
    (home / "sets/b.txt").write_text("a cat\n")
    (home / "mine.py").write_text("def reward(images, prompts, metadata): ...\n")
    config |= {"dataset": "sets/a:0.7, sets/b.txt:0.3,owner/name"}
    config |= {"custom_rewards": {"file": "mine.py:reward", "module": "mine:reward"}}
    (run / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def found(folder: Path) -> tuple[str, dict]:
        (run / "start.json").write_text(json.dumps({"folders": [str(folder)], "prompts": {}}))
        read = load_run_config(run, DIFFUSION_SPEC)
        return read.dataset, read.custom_rewards.to_dict()

    monkeypatch.chdir(tmp_path)
    dataset, rewards = found(home)
    assert dataset == f"{home}/sets/a:0.7, {home}/sets/b.txt:0.3,owner/name"
    assert rewards == {"file": f"{home}/mine.py:reward", "module": "mine:reward"}
    assert str(home) in sys.path
    monkeypatch.chdir(home)
    assert found(home) == (config["dataset"], config["custom_rewards"])
    shutil.copytree(home, run / "home")
    monkeypatch.chdir(tmp_path)
    assert found(run / "home") == (config["dataset"], config["custom_rewards"])
    assert str(run / "home") not in sys.path


def test_a_model_under_another_path_is_the_same(run, resume, config, tmp_path):
    (tmp_path / "link").symlink_to(config.pretrained.model)
    resume(pretrained__model=str(tmp_path / "link"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_rank": 32}, ["[[1, 2]]", "[[32, 2]]"]),
        ({"lora_alpha": 64}, ["[[1, 2]]", "[[1, 64]]"]),
        ({"shape": 32}, ["shape (1, ", "(32, "]),
        ({"model": 1}, ["lora_A"]),
    ],
)
def test_the_state_is_compared_with_the_model_itself(run, resume, changed, message):
    """Also without a config, and with a loaded LoRA that has its own rank."""
    (run / "config.json").unlink()
    fields = {f"train__{k}": v for k, v in changed.items() if k.startswith("lora")}
    if "shape" in changed:  # a checkpoint from before rank and alpha were recorded
        (run / NEWEST / STATE_DIR / "lora.json").unlink()
        fields = {"train__lora_rank": 32}
    if "model" in changed:
        (run / NEWEST / STATE_DIR / "lora.json").write_text("[]")
        fields = {"use_lora": False}
    manifest = run / NEWEST / STATE_DIR / "files.json"
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({n: e for n, e in known.items() if "lora.json" not in n}))
    with raises_user_error(run / NEWEST, *message):
        resume(**fields)


def test_an_average_can_be_enabled(run, resume, caplog):
    (run / NEWEST / STATE_DIR / "ema.safetensors").unlink()
    manifest = run / NEWEST / STATE_DIR / "files.json"
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({n: e for n, e in known.items() if "ema.saf" not in n}))
    session = resume()
    assert "ema" in caplog.text
    trained = load_file(run / NEWEST / STATE_DIR / "trained.safetensors")
    for name, average in zip(session.ema.names, session.ema.copy, strict=True):
        assert torch.equal(average, trained[name])


def test_micro_steps_are_counted_from_the_start_of_an_update(run, resume):
    """accelerate would restore its count, which belongs to another world or batch size."""
    session = resume()
    session.accelerator.step = 3
    session.progress.step += 1
    save_session(session)
    session.close()
    accelerator, module = resume().accelerator, session.policy.module
    ends = [
        accelerator.sync_gradients for _ in accumulate_gradients(accelerator, module, "abcd", 4)
    ]
    assert ends == [False, False, False, True]


@pytest.mark.parametrize("link", ["latest", "best"])
def test_a_run_resumes_from_its_links(run, find, link):
    start = find(run_name="branch", resume=str(run / "checkpoints" / link))
    assert start.checkpoint == (run / "checkpoints" / link).resolve()


def test_links_left_behind_by_a_kill_are_repaired(run, find, caplog):
    """The run was killed between renaming checkpoint-4 and linking it, or after the first link."""
    root = run / "checkpoints"
    right = {link: (root / link).readlink() for link in ("latest", "best")}
    assert right["latest"] == Path("checkpoint-4")
    for wrong in ("checkpoint-0", "checkpoint-2", "checkpoint-4", "gone", None):
        for link in right:
            (root / link).unlink()
            if wrong is not None:
                (root / link).symlink_to(wrong)
        caplog.clear()
        prepare_run_directory(find(), {"dataset": "none"})
        (run / "config.json").unlink()  # an incomplete one was written
        assert {link: (root / link).readlink() for link in right} == right
        repaired = [str(root / link) for link in right if wrong != str(right[link])]
        messages = [m for m in caplog.messages if "did not point" in m]
        assert [message.split()[0] for message in messages] == repaired


def test_after_a_fallback_the_links_point_to_older_checkpoints(run, resume):
    (run / NEWEST / STATE_DIR / "optimizer.bin").write_bytes(b"")
    for link in ("latest", "best"):
        (run / "checkpoints" / link).unlink()
        (run / "checkpoints" / link).symlink_to("checkpoint-4")
    resume()
    assert (run / "checkpoints/latest").readlink() == Path("checkpoint-2")
    assert (run / "checkpoints/best").readlink() == Path("checkpoint-0")  # 2 was not evaluated


@pytest.mark.parametrize("way", ["auto", "path"])
def test_a_truncated_config_is_rejected(run, find, way):
    (run / "config.json").write_bytes((run / "config.json").read_bytes()[:100])
    where = {} if way == "auto" else {"run_name": "branch", "resume": str(run)}
    with raises_user_error(run / "config.json"):
        find(**where)


def test_unreadable_metrics_lines_are_dropped_and_kept_aside(run, resume, caplog):
    path = run / "metrics.jsonl"
    good = path.read_bytes()
    damaged = b'\xff\xfe not UTF-8\n{"step": 1}\n[1]\n' + good + b'{"epoch": 3, "ste'
    path.write_bytes(damaged)
    resume()
    assert path.read_bytes() == good
    assert (run / "metrics.jsonl.1").read_bytes() == damaged
    assert f"1, 2, 3 of {run}/metrics.jsonl.1" in caplog.text


def test_a_run_has_one_writer(run, resume, config, tmp_path):
    first = resume()
    for way in ("auto", "none"):
        with raises_user_error(f"process {os.getpid()} on", field=str(run)):
            resume(resume=way)
    first.close()
    with raises_user_error("assets/tiny"):
        resume(pretrained__model="assets/tiny", resume_changed=True)  # an error releases the lock
    resume().close()

    (tmp_path / "logs/.new.lock").touch()
    (tmp_path / "logs/.new.lock").write_text(first.lock.holder.dumps())
    with raises_user_error(field=str(tmp_path / "logs/new")):
        resume(run_name="new", resume="none")


def test_a_checkpoint_of_an_active_run_is_rejected(run, find, tmp_path):
    """The run may remove it while it is read."""
    newest = (run / "checkpoints/latest").resolve()
    lock = RunLock(run)
    for path in (run, newest, run / "checkpoints/best"):
        with raises_user_error(
            f"process {os.getpid()} on", "copy", field="resume", value=str(path)
        ):
            find(run_name="new", resume=str(path))
    copy = shutil.copytree(newest, tmp_path / newest.name)
    assert find(run_name="new", resume=str(copy)).checkpoint == copy
    lock.release()
    assert find(run_name="new", resume=str(run)).checkpoint == newest
    killed = replace(lock.holder, pid=2**22 + 1)  # above Linux's largest PID
    lock.path.write_text(killed.dumps())
    assert find(run_name="new", resume=str(run)).checkpoint == newest
    lock.path.unlink()


def test_a_run_that_was_taken_over_writes_no_checkpoint(run, resume):
    session = resume()
    session.lock.path.write_text(replace(session.lock.holder, host="node-b").dumps())
    session.progress.step += 1
    with raises_user_error("node-b", field=str(run)):
        save_session(session)


def test_a_pickled_average_is_rejected_with_a_hint(run, find):
    (run / NEWEST / STATE_DIR / "custom_checkpoint_0.pkl").touch()
    with raises_user_error("--config.train.lora_path", field=str(run / NEWEST)):
        find()


@pytest.mark.parametrize("place", ["file", "/proc/no"])
def test_an_unwritable_logdir_is_rejected_before_the_model_loads(resume, tmp_path, place):
    (tmp_path / "file").touch()
    logdir = tmp_path / place
    with raises_user_error(logdir / "run", "--config.logdir"):
        resume(logdir=str(logdir), pretrained__model="assets/tiny")


def test_a_full_disk_while_samples_are_written_is_a_one_line_error(tmp_path):
    """Simulated by a limit on file sizes, which gives the same kind of error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with raises_user_error(tmp_path / "samples", "File too large"):
            save_samples(tmp_path / "samples", [Image.effect_noise((64, 64), 50)], prompt=["a"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
