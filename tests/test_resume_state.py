"""What a run does with the state it finds: damaged, dangerous, in use, or of other settings."""

import json
import os
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
from ml_collections import ConfigDict
from PIL import Image
from planted import plant, renew_manifest
from safetensors.torch import load_file
from train import main

from flow_grpo.config.saved import config_of_run
from flow_grpo.draw.export import export
from flow_grpo.draw.fields import DRAW, get_config
from flow_grpo.draw.models import load_adapter
from flow_grpo.draw.session import Session, build_session
from flow_grpo.errors import UserError
from flow_grpo.run.checkpoint import STATE, weights_in
from flow_grpo.run.distributed import accumulated
from flow_grpo.run.export import Source
from flow_grpo.run.lock import RunLock
from flow_grpo.run.origin import fingerprints
from flow_grpo.run.resume import Start, find_start, prepare_folder, refuse_code
from flow_grpo.run.session import save
from flow_grpo.run.trackers import save_samples

# every file that a run reads when it is resumed
STATE_FILES = {
    *(
        "trained.safetensors",
        "ema.safetensors",
        "reference.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
    ),
    *("progress.json", "lora.json", "files.json"),
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
    """The folder of a run of two epochs, of two updates each."""
    config = config.copy_and_resolve_references()
    config.logdir = str(tmp_path_factory.mktemp("logs"))
    return main(config).folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "logs" / "run", symlinks=True)


@pytest.fixture
def resume(config, tmp_path):
    """Builds the session of a run that goes on."""
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
    """Only looks where a run would begin."""

    def find(**fields) -> Start:
        values = {**json.loads(config.to_json_best_effort()), "logdir": str(tmp_path / "logs")}
        with ExitStack() as until:
            return find_start(Accelerator(cpu=True), values | fields, until)[0]

    return find


def test_the_list_of_files_is_complete(finished):
    state = finished / NEWEST / STATE
    assert {str(p.relative_to(state)) for p in state.rglob("*")} == STATE_FILES


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "name", [*sorted(f"{NEWEST}/{STATE}/{n}" for n in STATE_FILES), "config.json", "metrics.jsonl"]
)
def test_no_file_that_a_run_loads_can_run_code(run, resume, tmp_path, caplog, name, zipped):
    trace = tmp_path / "trace"
    plant(run / name, trace, zipped=zipped)
    if not name.endswith("files.json"):
        renew_manifest(run / NEWEST)
    passed_over = {"progress.json", "files.json", "metrics.jsonl"}  # with a warning
    if Path(name).name in passed_over:
        resume()
        assert "checkpoint-4 is incomplete or damaged" in caplog.text or "left out" in caplog.text
    else:
        with pytest.raises(UserError, match=r"^cannot (resume from|read) .*") as told:
            resume()
        assert "\n" not in str(told.value)
    assert not trace.exists()


@pytest.mark.parametrize("zipped", [False, True])
def test_no_weights_that_are_evaluated_or_exported_can_run_code(run, tmp_path, tiny_sd3, zipped):
    trace, name = tmp_path / "trace", "pytorch_lora_weights"
    for extra in (".bin", ".safetensors"):
        plant(run / NEWEST / "ema_lora" / (name + extra), trace, zipped=zipped)
    shutil.rmtree(run / NEWEST / STATE)  # it may come without
    with pytest.raises(UserError, match="cannot read"):
        export(Source.find(run), str(tiny_sd3), tmp_path / "out")
    with pytest.raises(Exception, match=r"(?i)header|safetensors|cannot"):
        load_adapter(str(tiny_sd3)).load_weights(weights_in(run))
    assert not trace.exists()


def test_the_index_of_sharded_files_can_run_no_code(tmp_path):
    """FSDP's, which torch reads with plain pickle."""
    state, trace = tmp_path / "checkpoint-2" / STATE, tmp_path / "trace"
    tensors = {"model": {"w": torch.ones(3), "step": 1}, "lr": 0.1}
    dcp.save(tensors, checkpoint_id=state / "model_0", no_dist=True)
    refuse_code(Accelerator(cpu=True), tmp_path / "checkpoint-2")
    plant(state / "model_0" / ".metadata", trace, zipped=False)
    with pytest.raises(UserError, match=r"state/model_0/\.metadata is damaged, of another"):
        refuse_code(Accelerator(cpu=True), tmp_path / "checkpoint-2")
    assert not trace.exists()


@pytest.mark.parametrize("name", sorted(STATE_FILES - {"files.json"}))
@pytest.mark.parametrize("damage", ["zeros", "noise"])
def test_damage_of_the_same_size_leads_to_the_checkpoint_before(run, find, caplog, name, damage):
    path = run / NEWEST / STATE / name
    content = bytearray(path.read_bytes())
    if damage == "zeros":
        content = bytes(len(content))
    else:  # 4 KiB, or what fits
        middle = len(content) // 2
        noise = bytes(255 - b for b in content[middle : middle + 4096])
        content[middle : middle + 4096] = noise
    path.write_bytes(content)
    assert find().checkpoint == run / "checkpoints/checkpoint-2"
    assert f"checkpoint-4 is incomplete or damaged (state/{name} has another" in caplog.text


@pytest.mark.parametrize("name", ["trained.safetensors", "optimizer.bin", "ema.safetensors"])
def test_damage_that_an_old_manifest_cannot_tell_is_one_line(run, resume, name):
    state = run / NEWEST / STATE
    (state / name).write_bytes(bytes((state / name).stat().st_size))
    manifest = json.loads((state / "files.json").read_text())
    (state / "files.json").write_text(json.dumps({n: size for n, (size, _) in manifest.items()}))
    with pytest.raises(UserError, match=f"cannot resume from .*{NEWEST}") as told:
        resume()
    assert "\n" not in str(told.value)


def test_when_no_checkpoint_is_whole_nothing_is_touched(run, resume):
    for checkpoint in (run / "checkpoints").glob("checkpoint-*"):
        (checkpoint / STATE / "optimizer.bin").write_bytes(b"")
    before = snapshot(run)
    with pytest.raises(UserError, match=f"none of the 3 checkpoints in {run}/checkpoints is whole"):
        resume()
    assert snapshot(run) == before
    assert list(run.parent.iterdir()) == [run]  # no lock either


def test_metrics_without_a_checkpoint_are_kept(run, resume, caplog):
    lines = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "checkpoints")
    session = resume()
    assert session.progress.epoch == -1
    assert (run / "metrics.jsonl.1").read_text() == lines
    assert f"its metrics so far are {run}/metrics.jsonl.1" in caplog.text


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
def test_a_changed_setting_is_used_and_told(run, resume, caplog, way):
    where = {} if way == "auto" else {"run_name": "branch", "resume": str(run)}
    session = resume(**CHANGED, **where)
    [group] = session.optimizer.param_groups
    used = group["lr"], group["betas"], group["weight_decay"], group["eps"]
    assert used == (1e-5, (0.5, 0.6), 0.7, 1e-3)
    assert (session.ema.decay, session.ema.every) == (0.25, 3)
    told = json.loads((session.folder / "config.json").read_text())
    for name, value in CHANGED.items():
        name = name.replace("__", ".")
        assert f"resumed with another {name}: {value!r}, it was" in caplog.text
        section, _, key = name.rpartition(".")
        assert (told[section] if section else told)[key] == value
    assert "run_name" not in caplog.text
    assert session.progress.step == 4
    state = session.optimizer.state_dict()["state"]
    saved = torch.load(run / NEWEST / STATE / "optimizer.bin")["state"]
    assert torch.equal(state[0]["exp_avg"], saved[0]["exp_avg"])


@pytest.mark.parametrize("way", ["auto", "path"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train__lora_rank": 32}, "train.lora_rank=32 but .* was trained with 1;"),
        ({"train__lora_alpha": 64}, "train.lora_alpha=64 but .* was trained with 2;"),
        ({"use_lora": False}, "use_lora=False but .* was trained with True;"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(run, find, config, fields, message, way):
    values = config.copy_and_resolve_references()
    values.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    where = {} if way == "auto" else {"run_name": "branch", "resume": str(run)}
    with pytest.raises(UserError, match=message):
        find(train=values.train.to_dict(), use_lora=values.use_lora, **where)


GOALS = [
    {"algorithm": "grpo_guard"},
    {"pretrained__model": "assets/tiny-sd3"},
    {"dataset": "dataset/ocr"},
    {"reward_fn": {"jpeg_incompressibility": 1.0}},
    {"eval_reward_fn": {"jpeg_incompressibility": 1.0}},
    {"custom_rewards": {"mine": "ill_rewards:short"}},
]


@pytest.mark.parametrize("way", ["auto", "path", "before its first checkpoint"])
@pytest.mark.parametrize("fields", GOALS, ids=lambda fields: next(iter(fields)))
def test_another_goal_is_refused_unless_it_is_meant(run, resume, caplog, fields, way):
    where = {"run_name": "branch", "resume": str(run)} if way == "path" else {}
    if way.startswith("before"):
        shutil.rmtree(run / "checkpoints")
    [(name, value)] = fields.items()
    name, before = name.replace("__", "."), snapshot(run)
    back = f"go on as it was with --resume {run}" if way != "path" else "set it back"
    with pytest.raises(UserError) as told:
        resume(**fields, **where)
    assert str(told.value).startswith(f"{run} had another goal: {name}=")
    assert str(told.value).endswith(
        f"); {back}, or, to change it on purpose, add --config.resume_changed=True"
    )
    assert snapshot(run) == before
    assert not (run.parent / "branch").exists()
    if name == "reward_fn":
        session = resume(**fields, **where, resume_changed=True)
        assert session.reward.weights == value
        assert "resumed with another reward_fn: {'jpeg_incompressibility': 1.0}, it" in caplog.text
        assert "resume_changed" not in caplog.text


def test_another_method_is_refused_before_its_settings_are(run, resume):
    """nft's noise levels are more than these steps."""
    with pytest.raises(UserError, match="had another goal: algorithm='nft'"):
        resume(algorithm="nft")


def test_other_prompts_under_the_same_name_are_another_goal(run, resume, caplog, tmp_path):
    (tmp_path / "train.txt").write_text("a cat\n")
    cat = fingerprints(str(tmp_path))
    (tmp_path / "train.txt").write_text("a dog\n")
    assert fingerprints(str(tmp_path)).keys() == cat.keys()
    assert fingerprints(str(tmp_path)) != cat
    start = json.loads((run / "start.json").read_text())
    [name, _] = sorted(start["prompts"])  # of test and training
    start["prompts"] |= {name: "6 0123"}
    (run / "start.json").write_text(json.dumps(start))
    with pytest.raises(UserError) as told:
        resume()
    assert str(told.value) == (
        f"{run} had another goal: the prompts in {name} changed; bring the prompts back, or, to "
        "change it on purpose, add --config.resume_changed=True"
    )
    resume(resume_changed=True).close()
    assert f"resumed with other prompts: {name} changed" in caplog.text
    resume()  # which are the run's own now


def test_a_run_finds_its_files_from_any_folder(run, tmp_path, monkeypatch):
    """Those in the folder it was started in, which is none that was sent with it."""
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
        read = config_of_run(run, DRAW)
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


def test_a_model_under_another_name_is_the_same(run, resume, config, tmp_path):
    (tmp_path / "link").symlink_to(config.pretrained.model)
    resume(pretrained__model=str(tmp_path / "link"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_rank": 32}, r"LoRA has rank and alpha \[\[1, 2\]\] there and \[\[32, 2\]\] here"),
        ({"lora_alpha": 64}, r"LoRA has rank and alpha \[\[1, 2\]\] there and \[\[1, 64\]\] here"),
        ({"shape": 32}, r".* has the shape \[.*1.*\] there and \[.*32.*\] here"),
        ({"model": 1}, "only this model has weights named .*"),
    ],
)
def test_a_state_is_held_against_the_model_itself(run, resume, changed, message):
    """Also where no config tells, and where a LoRA that was loaded brought its own rank."""
    (run / "config.json").unlink()
    fields = {f"train__{k}": v for k, v in changed.items() if k.startswith("lora")}
    if "shape" in changed:  # a checkpoint from before rank and alpha were written down
        (run / NEWEST / STATE / "lora.json").unlink()
        fields = {"train__lora_rank": 32}
    if "model" in changed:
        (run / NEWEST / STATE / "lora.json").write_text("[]")
        fields = {"use_lora": False}
    manifest = run / NEWEST / STATE / "files.json"
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({n: e for n, e in known.items() if "lora.json" not in n}))
    with pytest.raises(UserError, match=f"cannot resume from .*{NEWEST}: {message}"):
        resume(**fields)


def test_an_average_can_be_switched_on(run, resume, caplog):
    (run / NEWEST / STATE / "ema.safetensors").unlink()
    manifest = run / NEWEST / STATE / "files.json"
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({n: e for n, e in known.items() if "ema.saf" not in n}))
    session = resume()
    assert "has no ema weights; they begin with those trained" in caplog.text
    trained = load_file(run / NEWEST / STATE / "trained.safetensors")
    for name, average in zip(session.ema.names, session.ema.copy, strict=True):
        assert torch.equal(average, trained[name])


def test_micro_steps_are_counted_from_the_start_of_an_update(run, resume):
    """accelerate would restore its count, which is of another number of processes or batch size."""
    session = resume()
    session.accelerator.step = 3
    session.progress.step += 1
    save(session)
    session.close()
    accelerator, module = resume().accelerator, session.policy.module
    ends = [accelerator.sync_gradients for _ in accumulated(accelerator, module, "abcd", 4)]
    assert ends == [False, False, False, True]


@pytest.mark.parametrize("link", ["latest", "best"])
def test_the_links_can_be_named(run, find, link):
    start = find(run_name="branch", resume=str(run / "checkpoints" / link))
    assert start.checkpoint == (run / "checkpoints" / link).resolve()


def test_links_that_a_kill_left_behind_are_repaired(run, find, caplog):
    """It came between the rename of checkpoint-4 and its links, or after the first of these."""
    root = run / "checkpoints"
    right = {link: (root / link).readlink() for link in ("latest", "best")}
    assert right["latest"] == Path("checkpoint-4")
    for wrong in ("checkpoint-0", "checkpoint-2", "checkpoint-4", "gone", None):
        for link in right:
            (root / link).unlink()
            if wrong is not None:
                (root / link).symlink_to(wrong)
        caplog.clear()
        prepare_folder(find(), {"dataset": "none"})
        (run / "config.json").unlink()  # there is no need of a whole one
        assert {link: (root / link).readlink() for link in right} == right
        told = [f"{root / link} did not point to {right[link]}; now it does" for link in right]
        repaired = [
            text for link, text in zip(right, told, strict=True) if wrong != str(right[link])
        ]
        assert [m for m in caplog.messages if "did not point" in m] == repaired


def test_after_a_fall_back_the_links_are_those_of_then(run, resume):
    (run / NEWEST / STATE / "optimizer.bin").write_bytes(b"")
    for link in ("latest", "best"):
        (run / "checkpoints" / link).unlink()
        (run / "checkpoints" / link).symlink_to("checkpoint-4")
    resume()
    assert (run / "checkpoints/latest").readlink() == Path("checkpoint-2")
    assert (run / "checkpoints/best").readlink() == Path("checkpoint-0")  # 2 was not evaluated


@pytest.mark.parametrize("way", ["auto", "path"])
def test_a_config_that_was_cut_is_told(run, find, way):
    (run / "config.json").write_bytes((run / "config.json").read_bytes()[:100])
    where = {} if way == "auto" else {"run_name": "branch", "resume": str(run)}
    with pytest.raises(UserError, match=rf"cannot read {run}/config\.json: .* remove it"):
        find(**where)


def test_lines_of_metrics_that_cannot_be_read_are_left_out_and_kept(run, resume, caplog):
    path = run / "metrics.jsonl"
    good = path.read_bytes()
    odd = b'\xff\xfe not UTF-8\n{"step": 1}\n[1]\n' + good + b'{"epoch": 3, "ste'
    path.write_bytes(odd)
    resume()
    assert path.read_bytes() == good
    assert (run / "metrics.jsonl.1").read_bytes() == odd
    assert f"line 1, 2, 3 of {run}/metrics.jsonl.1" in caplog.text


def test_a_run_has_one_writer(run, resume, config, tmp_path):
    first = resume()
    message = f"{run} is in use by process {os.getpid()} on"
    for way in ("auto", "none"):
        with pytest.raises(UserError, match=message):
            resume(resume=way)
    first.close()
    with pytest.raises(UserError, match="no model at"):
        resume(pretrained__model="assets/tiny", resume_changed=True)  # an error lets go of it
    resume().close()

    (tmp_path / "logs/.new.lock").touch()
    (tmp_path / "logs/.new.lock").write_text(first.lock.holder.dumps())
    with pytest.raises(UserError, match="in use by"):
        resume(run_name="new", resume="none")


def test_a_checkpoint_of_a_run_that_still_writes_is_not_started_from(run, find, tmp_path):
    """The run may remove it while it is read."""
    newest = (run / "checkpoints/latest").resolve()
    lock = RunLock(run)
    for path in (run, newest, run / "checkpoints/best"):
        with pytest.raises(UserError, match=f"resume='{path}' .*process {os.getpid()} on .*copy"):
            find(run_name="new", resume=str(path))
    copy = shutil.copytree(newest, tmp_path / newest.name)
    assert find(run_name="new", resume=str(copy)).checkpoint == copy
    lock.release()
    assert find(run_name="new", resume=str(run)).checkpoint == newest
    killed = replace(lock.holder, pid=2**22 + 1)  # beyond what Linux gives out
    lock.path.write_text(killed.dumps())
    assert find(run_name="new", resume=str(run)).checkpoint == newest
    lock.path.unlink()


def test_a_run_that_was_taken_over_writes_no_checkpoint(run, resume):
    session = resume()
    session.lock.path.write_text(replace(session.lock.holder, host="node-b").dumps())
    session.progress.step += 1
    with pytest.raises(UserError, match=r"run was taken over by .* on node-b"):
        save(session)


def test_a_state_with_a_pickled_average_is_refused_with_a_way_out(run, find):
    (run / NEWEST / STATE / "custom_checkpoint_0.pkl").touch()
    with pytest.raises(UserError, match=r"an older version wrote it.*--config.train.lora_path"):
        find()


@pytest.mark.parametrize("place", ["file", "/proc/no"])
def test_a_place_where_nothing_can_be_written_is_told_before_the_model_loads(
    resume, tmp_path, place
):
    (tmp_path / "file").touch()
    logdir = tmp_path / place
    with pytest.raises(UserError, match=f"cannot write to {logdir}/run: .*--config.logdir"):
        resume(logdir=str(logdir), pretrained__model="assets/tiny")


def test_a_disk_that_is_full_while_pictures_are_written_is_told(tmp_path):
    """A limit on the size of files stands in for it: the same error of the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(UserError, match=f"^cannot write {tmp_path}/samples: File too large$"):
            save_samples(tmp_path / "samples", [Image.effect_noise((64, 64), 50)], prompt=["a"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
