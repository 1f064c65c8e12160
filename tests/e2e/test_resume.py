"""A run that is stopped, killed or starved, and goes on."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from light import LIGHT
from runner import Runner
from safetensors.torch import load_file
from test_distributed import TORCHRUN

SHORT = {"eval_freq": 2, "save_freq": 2, "num_checkpoint_limit": 0}


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights, moving average and optimizer, by name."""
    optimizer = torch.load(checkpoint / "state/optimizer.bin")["state"]
    average = torch.load(checkpoint / "state/custom_checkpoint_0.pkl")
    return {
        **load_file(checkpoint / "state/trained.safetensors"),
        **{f"{i}.{k}": v for i, moments in optimizer.items() for k, v in moments.items()},
        **{f"ema.{i}": v for i, v in enumerate(average["shadow_params"])},
        "ema.updates": torch.tensor(average["optimization_step"]),
        **load_file(checkpoint / "lora/pytorch_lora_weights.safetensors"),
    }


def assert_same_state(a: Path, b: Path, tolerance: float = 0.0) -> None:
    first, second = state_of(a), state_of(b)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=tolerance)


def assert_same_metrics(a: list[dict], b: list[dict], tolerance: float = 0.0) -> None:
    assert [line["epoch"] for line in a] == [line["epoch"] for line in b]
    for one, other in zip(a, b, strict=True):
        names = {n for n in one if not n.startswith(("time/", "perf/"))}
        assert names == {n for n in other if not n.startswith(("time/", "perf/"))}
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=0, abs=tolerance), name


@pytest.fixture(scope="module")
def whole(short_runs, tmp_path_factory) -> Runner:
    """A run of four epochs that nothing disturbs."""
    runner = Runner(tmp_path_factory.mktemp("whole"), **short_runs)
    done = runner(num_epochs=4, **SHORT)
    assert done.returncode == 0, done.stderr
    return runner


def latest(runner: Runner, run_name: str = "run") -> Path:
    return (runner.logdir / run_name / "checkpoints/latest").resolve()


def test_two_epochs_and_two_more_are_four_bit_for_bit(train, whole):
    half = train(num_epochs=2, **SHORT)
    assert half.returncode == 0, half.stderr
    rest = train(num_epochs=4, resume="auto", **SHORT)
    assert rest.returncode == 0, rest.stderr
    assert "resumed with another num_epochs: 4, it was 2" in rest.stdout
    assert_same_state(latest(whole), latest(train))
    assert_same_metrics(whole.metrics(), train.metrics())

    # a path: a new run that goes on from a checkpoint of another
    branch = train(
        run_name="branch",
        num_epochs=4,
        resume=train.logdir / "run/checkpoints/checkpoint-4",
        **SHORT,
    )
    assert branch.returncode == 0, branch.stderr
    assert_same_state(latest(whole), latest(train, "branch"))
    assert_same_metrics(whole.metrics(), train.metrics("branch"))

    finished = train(num_epochs=4, resume="auto", **SHORT)
    assert finished.returncode == 0, finished.stderr
    assert len(train.metrics()) == 5


@pytest.mark.slow
def test_two_processes_can_go_on_as_one(train):
    both = {"device": "cpu", "num_epochs": 4, **SHORT, **LIGHT}
    whole = train(run_name="whole", sample__train_batch_size=8, train__batch_size=8, **both)
    assert whole.returncode == 0, whole.stderr
    two = train(launcher=TORCHRUN, **{**both, "num_epochs": 2})
    assert two.returncode == 0, two.stderr
    one = train(resume="auto", sample__train_batch_size=8, train__batch_size=8, **both)
    assert one.returncode == 0, one.stderr
    assert_same_state(latest(train, "whole"), latest(train), tolerance=1e-6)


@pytest.mark.slow
def test_ten_kills_at_random_moments_cost_only_time(train, whole):
    """Each attempt lives a little longer than it takes to get to work."""
    moments = random.Random(0)
    for _ in range(10):
        process = train.start(num_epochs=4, resume="auto", **SHORT)
        for line in process.stdout:
            if line.startswith("run directory"):
                break
        time.sleep(moments.uniform(0, 2.5))
        process.kill()
        process.wait()
    done = train(num_epochs=4, resume="auto", **SHORT)
    assert done.returncode == 0, done.stderr
    assert_same_state(latest(whole), latest(train))
    assert_same_metrics(whole.metrics(), train.metrics())


def test_a_damaged_checkpoint_is_passed_over(train, whole):
    done = train(num_epochs=3, **SHORT)
    assert done.returncode == 0, done.stderr
    newest = train.logdir / "run/checkpoints/checkpoint-6"
    weights = newest / "state/trained.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (newest.parent / ".partial-checkpoint-8").mkdir()
    rest = train(num_epochs=4, resume="auto", **SHORT)
    assert rest.returncode == 0, rest.stderr
    assert "checkpoint-6 is incomplete or damaged; trying the one before" in rest.stdout
    assert_same_state(latest(whole), latest(train))


@pytest.mark.parametrize(
    ("signal_number", "state_freq"), [(signal.SIGTERM, 1), (signal.SIGINT, 1000)]
)
def test_a_signal_ends_the_run_in_good_order(
    train, signal_number, state_freq, tmp_path, monkeypatch
):
    """Here while it waits for rewards, so that the epoch before is what has to be saved."""
    (tmp_path / "slow_reward.py").write_text(
        "import time\n"
        "def score(images, prompts, metadata):\n"
        "    time.sleep(1)\n"
        "    return [float(i) for i, _ in enumerate(images)]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = train.start(
        num_epochs=10_000,
        eval_freq=0,
        state_freq=state_freq,
        save_freq=0,
        reward_fn="{'slow': 1.0}",
        custom_rewards="{'slow': 'slow_reward:score'}",
        eval_reward_fn="{'jpeg_compressibility': 1.0}",
    )
    for line in process.stdout:
        if line.startswith("epoch 2/"):
            break
    time.sleep(0.7)  # sampling is over, scoring is not
    process.send_signal(signal_number)
    asked = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - asked < 10
    assert process.returncode == 75
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("stopped in epoch ")
    assert last.endswith("--config.run_name=run --config.resume=auto")
    assert "Traceback" not in stderr
    lines = train.metrics()
    assert [line["epoch"] for line in lines] == list(range(len(lines)))
    checkpoint = latest(train)
    progress = json.loads((checkpoint / "state/progress.json").read_text())
    assert progress["epoch"] == len(lines) - 1


def test_a_full_disk_is_told_and_harms_nothing(train, tmp_path):
    train.logdir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(train.logdir)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root may mount the small disk that this fills")
    try:
        done = train(num_epochs=50, save_freq=1, eval_freq=0, num_checkpoint_limit=0)
        assert done.returncode == 2
        last = done.stderr.strip().splitlines()[-1]
        assert "No space left on device" in last
        assert "is intact" in last
        checkpoints = train.logdir / "run/checkpoints"
        assert not list(checkpoints.glob(".partial*"))
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", str(train.logdir)], check=True)


def test_what_cannot_be_resumed_is_named(train):
    nameless = train(run_name="", resume="auto")
    assert nameless.returncode == 2
    assert "resume=auto needs a run_name" in nameless.stderr
    nowhere = train(resume="no/such/run")
    assert nowhere.returncode == 2
    assert "resume='no/such/run' is neither a run nor a whole checkpoint" in nowhere.stderr
    assert train().returncode == 0
    other = train(resume="auto", num_epochs=2, train__lora_rank=4)
    assert other.returncode == 2
    assert "cannot resume from" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1, other.stderr
    assert len(train.metrics()) == 2  # the run itself is as it was
