"""Runs that are stopped or killed, or that fill the disk, can be resumed."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import fault_injection
import pytest
import torch
from malicious_files import rewrite_manifest, write_malicious_pickle
from runner import FORK_SERVER, Runner, run_script
from safetensors.torch import load_file
from server_process import wait_until
from test_deepspeed import zero_launch_options

# the moving average is restored too
SHORT = {"eval_freq": 2, "save_freq": 2, "num_checkpoint_limit": 0, "train__ema_update_interval": 1}
# called after the last update of an epoch, before anything is saved
IN_EPOCH = "flow_grpo.training.session:training_metrics"


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return weights, moving average and optimizer state by name."""
    optimizer = torch.load(checkpoint / "state/optimizer.bin")["state"]
    average = load_file(checkpoint / "state/ema.safetensors")
    return {
        **load_file(checkpoint / "state/trained.safetensors"),
        **{f"{i}.{k}": v for i, moments in optimizer.items() for k, v in moments.items()},
        **{f"ema.{name}": v for name, v in average.items()},
        **load_file(checkpoint / "lora/pytorch_lora_weights.safetensors"),
    }


def assert_same_state(a: Path, b: Path) -> None:
    first, second = state_of(a), state_of(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_same_metrics(a: list[dict], b: list[dict]) -> None:
    assert [line["epoch"] for line in a] == [line["epoch"] for line in b]
    for one, other in zip(a, b, strict=True):
        names = {n for n in one if not n.startswith(("time/", "perf/"))}
        assert names == {n for n in other if not n.startswith(("time/", "perf/"))}
        for name in names:
            assert one[name] == other[name], name


@pytest.fixture(scope="module")
def uninterrupted(short_runs, tmp_path_factory) -> Runner:
    """An uninterrupted run of four epochs."""
    runner = Runner(tmp_path_factory.mktemp("whole"), **short_runs)
    done = runner(num_epochs=4, **SHORT)
    assert done.returncode == 0, done.stderr
    return runner


def latest(runner: Runner, run_name: str = "run") -> Path:
    return (runner.logdir / run_name / "checkpoints/latest").resolve()


def test_two_epochs_and_two_resumed_epochs_equal_four(train, uninterrupted):
    half = train(num_epochs=2, **SHORT)
    assert half.returncode == 0, half.stderr
    resumed = run_script(
        "scripts/train.py", "--resume", train.logdir / "run", "--config.num_epochs=4"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "num_epochs=4 instead of 2" in resumed.stdout
    assert_same_state(latest(uninterrupted), latest(train))
    assert_same_metrics(uninterrupted.metrics(), train.metrics())

    # resume=PATH: a new run that starts from a checkpoint of another
    shutil.rmtree(latest(train))  # the checkpoint of epoch 4
    (train.logdir / "run/checkpoints/latest").unlink()
    (train.logdir / "run/checkpoints/latest").symlink_to("checkpoint-4")
    branch = train(
        run_name="branch",
        num_epochs=4,
        resume=train.logdir / "run/checkpoints/latest",
        **SHORT,
    )
    assert branch.returncode == 0, branch.stderr
    assert_same_state(latest(uninterrupted), latest(train, "branch"))
    assert_same_metrics(uninterrupted.metrics(), train.metrics("branch"))

    finished = train(run_name="branch", num_epochs=4, resume="auto", **SHORT)
    assert finished.returncode == 0, finished.stderr
    assert len(train.metrics()) == 5


@pytest.mark.slow
def test_a_run_killed_three_times_at_random_times_equals_an_uninterrupted_one(train, uninterrupted):
    """Each process is killed up to 2.5 s after its run directory is created."""
    random_times = random.Random(0)
    for _ in range(3):
        process = train.start(num_epochs=4, resume="auto", launcher=FORK_SERVER, **SHORT)
        for line in process.stdout:
            if line.startswith("run directory"):
                break
        time.sleep(random_times.uniform(0, 2.5))
        process.kill()
        process.communicate()
    done = train(num_epochs=4, resume="auto", **SHORT)
    assert done.returncode == 0, done.stderr
    assert_same_state(latest(uninterrupted), latest(train))
    assert_same_metrics(uninterrupted.metrics(), train.metrics())


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {
            **{"algorithm": "awm", "awm__times": 2, "sample__num_image_per_prompt": 8},
            **{"train__keep_best_worst": 2, "sample__explore_steps": 2},
        },
        {
            **{"algorithm": "dpo", "dpo__times": 2, "sample__async_depth": 1},
            **{"train__lr_scheduler": "cosine", "train__lr_warmup_steps": 1},
        },
    ],
    ids=["awm-keep", "dpo-async"],
)
def test_a_killed_run_resumes_bit_identically(train, method):
    """test_algorithm_invariants.py resumes further methods, in float64 without a kill."""
    fields = {"num_epochs": 2, "state_freq": 1, **SHORT, **method}
    done = train(run_name="whole", **fields)
    assert done.returncode == 0, done.stderr
    killed = run_script(fault_injection.__file__, IN_EPOCH, 2, *train.command(**fields))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(train.metrics()) == 2
    done = train(resume="auto", **fields)
    assert done.returncode == 0, done.stderr
    assert_same_state(latest(train, "whole"), latest(train))
    assert_same_metrics(train.metrics("whole"), train.metrics())
    if "train__lr_scheduler" in method:  # at the second of the two updates of each epoch
        rates = [line["train/lr"] / 3e-4 for line in train.metrics()[1:]]
        assert rates == pytest.approx([1, 0.25])


def test_a_damaged_checkpoint_is_skipped(train, uninterrupted):
    shutil.copytree(uninterrupted.logdir, train.logdir, symlinks=True)
    newest = train.logdir / "run/checkpoints/checkpoint-8"
    optimizer = newest / "state/optimizer.bin"
    optimizer.write_bytes(bytes(optimizer.stat().st_size))
    (newest.parent / ".partial-checkpoint-10").mkdir()
    resumed = train(num_epochs=4, resume="auto", **SHORT)
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoint-8 is incomplete or damaged (state/optimizer.bin " in resumed.stdout
    assert_same_state(latest(uninterrupted), latest(train))


def test_only_one_of_two_concurrently_resumed_runs_writes(train, tmp_path, monkeypatch):
    """Both compete for a run whose lock a killed process has left behind.

    The rewards of the winner block until the other process has ended.
    """
    (tmp_path / "gate.py").write_text(
        "import pathlib, time\n"
        "def score(images, prompts, metadata):\n"
        f"    while not pathlib.Path({str(tmp_path / 'open')!r}).exists():\n"
        "        time.sleep(.1)\n"
        "    return [1.0] * len(images)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    gate = {"reward_fn": "{'gate': 1.0}", "custom_rewards": "{'gate': 'gate:score'}"}
    killed = run_script(fault_injection.__file__, IN_EPOCH, 1, *train.command(eval_freq=0))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    lock = json.loads((train.logdir / ".run.lock").read_text())
    assert [p.name for p in sorted(train.logdir.iterdir())] == [".run.lock", "run"]
    fields = {"num_epochs": 1, "resume": "auto", "resume_changed": True, "eval_freq": 0, **gate}
    both = [train.start(launcher=FORK_SERVER, **fields) for _ in range(2)]
    wait_until(lambda: any(process.poll() is not None for process in both), 300)
    (tmp_path / "open").touch()
    ended = [(process.communicate(timeout=300), process.returncode) for process in both]
    assert sorted(code for _, code in ended) == [0, 2], ended
    [(_, stderr)] = [output for output, code in ended if code == 2]
    assert stderr.startswith(f"error: {train.logdir}/run is in use by process "), stderr
    assert len(stderr.splitlines()) == 1, stderr
    [(stdout, _)] = [output for output, code in ended if code == 0]
    assert f"took over from process {lock['pid']} on" in stdout
    assert [line["epoch"] for line in train.metrics()] == [0, 1]
    assert [p.name for p in train.logdir.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("signal_number", "state_freq"), [(signal.SIGTERM, 1), (signal.SIGINT, 1000)]
)
def test_a_signal_stops_the_run_with_a_checkpoint(
    train, signal_number, state_freq, tmp_path, monkeypatch
):
    """The signal arrives while the run waits for rewards, so the previous epoch has to be saved.

    An epoch has two batches of four images, so it is sent by the last reward of the second epoch.
    """
    (tmp_path / "signalling.py").write_text(
        "import os\n"
        "sizes = []\n"
        "def score(images, prompts, metadata):\n"
        "    sizes.append(len(images))\n"
        "    if sizes.count(4) == 4:\n"
        f"        os.kill(os.getpid(), {int(signal_number)})\n"
        "    return [float(i) for i, _ in enumerate(images)]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = train(
        num_epochs=10_000,
        eval_freq=0,
        state_freq=state_freq,
        save_freq=0,
        reward_fn="{'signalling': 1.0}",
        custom_rewards="{'signalling': 'signalling:score'}",
        eval_reward_fn="{'jpeg_compressibility': 1.0}",
    )
    assert done.returncode == 75
    stderr = done.stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("stopped in epoch ")
    assert last.endswith(f"--resume {train.logdir}/run")
    assert "Traceback" not in stderr
    lines = train.metrics()
    assert [line["epoch"] for line in lines] == [0, 1]
    assert (train.logdir / "run/report.html").is_file()
    checkpoint = latest(train)
    progress = json.loads((checkpoint / "state/progress.json").read_text())
    assert progress["epoch"] == len(lines) - 1


def test_a_full_disk_is_reported_and_leaves_checkpoints_intact(train, tmp_path):
    train.logdir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(train.logdir)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting the small disk that this test fills requires root")
    try:
        done = train(num_epochs=50, save_freq=1, eval_freq=0, num_checkpoint_limit=0)
        assert done.returncode == 2
        last = done.stderr.strip().splitlines()[-1]
        assert "No space left on device" in last
        # of a checkpoint, or of metrics.jsonl while a checkpoint filled the disk
        assert f"{train.logdir}/run/" in last
        checkpoints = train.logdir / "run/checkpoints"
        assert not list(checkpoints.glob(".partial*"))
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", str(train.logdir)], check=True)


@pytest.mark.slow
def test_a_resumed_deepspeed_run_uses_changed_fields_and_executes_no_code(
    train, tmp_path, monkeypatch
):
    """DeepSpeed's own loader would unpickle arbitrary code."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launched = zero_launch_options(1, processes=1)
    first = train(**launched, eval_freq=0)
    assert first.returncode == 0, first.stderr
    changed = {"num_epochs": 2, "train__learning_rate": 1e-5, "eval_freq": 0, "resume": "auto"}
    second = train(**launched, **changed)
    assert second.returncode == 0, second.stderr
    assert "train.learning_rate=1e-05 instead of 0.0003" in second.stdout
    assert [line.get("train/lr") for line in train.metrics()] == [None, 3e-4, 1e-5]

    [path] = latest(train).glob("state/pytorch_model/*optim_states.pt")
    trace = tmp_path / "trace"
    write_malicious_pickle(path, trace, zipped=True)
    rewrite_manifest(latest(train))
    third = train(**launched, **changed)
    assert third.returncode != 0
    assert f"pytorch_model/{path.name} " in third.stderr
    assert not trace.exists()


def test_a_run_that_cannot_be_resumed_is_an_error_with_its_reason(train):
    without_name = train(run_name="", resume="auto")
    assert without_name.returncode == 2
    assert "resume='auto' needs a run_name" in without_name.stderr
    without_run = train(resume="no/such/run")
    assert without_run.returncode == 2
    assert "resume='no/such/run' " in without_run.stderr
    assert train().returncode == 0
    other = train(resume="auto", num_epochs=2, train__lora_rank=4)
    assert other.returncode == 2
    assert "train.lora_rank=4 " in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1, other.stderr
    assert len(train.metrics()) == 2  # the run itself is unchanged
