"""Stopped and killed runs of scripts/train_vlm.py are resumed."""

import json
import signal
from pathlib import Path

import fault_injection
import pytest
import small_vlm
import torch
from environments import EPISODES
from runner import Runner, run_script
from safetensors.torch import load_file

FIELDS = {
    "script": "scripts/train_vlm.py",
    "config": "config/vlm.py",
    "num_epochs": 4,
    "eval_freq": 2,
    "save_freq": 2,
}
LETTERS = "{'mine': 'small_vlm:early_letters'}"


@pytest.fixture(scope="module")
def new_runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, data = small_vlm.save(folder / "model"), small_vlm.write_data(folder / "data")

    def new(**fields) -> Runner:
        return Runner(
            tmp_path_factory.mktemp("logs"),
            device="cpu",
            pretrained__model=model,
            dataset=data,
            eval_questions=2,
            log_images=4,
            question_format="{question}",
            reward_fn="{'mine': 1.0}",
            sample__questions_per_epoch=4,
            sample__group_size=4,
            sample__max_new_tokens=10,
            train__learning_rate=1e-3,
            train__lora_rank=4,
            train__ema=True,
            train__ema_update_interval=1,
            **{"custom_rewards": LETTERS, **fields},
        )

    return new


def train_uninterrupted(run: Runner) -> Runner:
    done = run(**FIELDS)
    assert done.returncode == 0, done.stderr
    return run


def state_of(run: Runner) -> dict[str, torch.Tensor]:
    """Return the resume state (weights, EMA, optimizer) and the exported weights."""
    checkpoint = run.logdir / "run/checkpoints/latest"
    moments = torch.load(checkpoint / "state/optimizer.bin")["state"]
    files = ["state/trained", "state/ema", "lora/adapter_model", "ema_lora/adapter_model"]
    return {
        **{f"{i}.{name}": value for i, state in moments.items() for name, value in state.items()},
        **{
            f"{f}.{k}": v
            for f in files
            for k, v in load_file(checkpoint / f"{f}.safetensors").items()
        },
    }


def metrics_of(run: Runner) -> list[dict]:
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
        for line in run.metrics()
    ]


def samples_of(run: Runner) -> dict[str, list[str]]:
    paths = sorted((run.logdir / "run/samples").glob("*/samples.jsonl"))
    return {path.parent.name: path.read_text().splitlines() for path in paths}


def assert_same_run(one: Runner, other: Runner) -> None:
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert metrics_of(one) == metrics_of(other)
    assert samples_of(one) == samples_of(other)


def test_two_epochs_and_two_resumed_epochs_equal_four(new_runner):
    uninterrupted, run = train_uninterrupted(new_runner()), new_runner()
    half = run(**{**FIELDS, "num_epochs": 2})
    assert half.returncode == 0, half.stderr
    assert [line["epoch"] for line in run.metrics()] == [0, 1, 2]
    incompatible = run(**FIELDS, resume="auto", train__loss="gspo")
    assert incompatible.returncode == 2
    assert "train.loss='gspo' (was 'clip')" in incompatible.stderr
    resumed = run_script(FIELDS["script"], "--resume", run.logdir / "run", "--config.num_epochs=4")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(run, uninterrupted)
    assert [line["epoch"] for line in run.metrics()] == [0, 1, 2, 3, 4]
    moved = load_file(uninterrupted.logdir / "run/checkpoints/latest/state/trained.safetensors")
    assert any(weight.any() for name, weight in moved.items() if "lora_B" in name)


# functions in whose n-th call the resumed run is killed, and its last saved epoch at that time
KILLS = [
    ("flow_grpo.vlm.environment:EnvironmentPool.step", 3, 0),  # during episodes
    # a checkpoint with half of its files
    ("flow_grpo.vlm.policy:VlmPolicy._write_lora", 1, 0),
    # published, but `latest` is the previous checkpoint
    ("flow_grpo.training.checkpoint_writer:update_link", 1, 1),
    ("flow_grpo.training.trackers:append_metrics", 1, 2),  # not yet in metrics.jsonl
]


@pytest.mark.slow
def test_a_run_of_episodes_that_is_killed_four_times_resumes_bit_identically(new_runner):
    uninterrupted, run = train_uninterrupted(new_runner(**EPISODES)), new_runner(**EPISODES)
    for target, number, reached in KILLS:
        command = run.command(**FIELDS, resume="auto")
        killed = run_script(fault_injection.__file__, target, number, *command)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert newest_epoch(run.logdir / "run/checkpoints") == reached, target
    done = run(**FIELDS, resume="auto")
    assert done.returncode == 0, done.stderr
    assert_same_run(run, uninterrupted)


def newest_epoch(checkpoints: Path) -> int:
    found = [
        json.loads(path.read_text())["epoch"]
        for path in checkpoints.glob("checkpoint-*/state/progress.json")
    ]
    return max(found, default=-1)


def test_a_solved_dataset_ends_the_training_with_a_message(new_runner):
    run = new_runner(custom_rewards="{'mine': 'small_vlm:constant_reward'}")
    done = run(**FIELDS, sample__refills=3)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = run.metrics()
    [message] = [line for line in done.stdout.splitlines() if line.startswith("epoch 1: ")]
    assert f"(mean reward {lines[-1]['reward/avg']:.3f})" in message
    assert "training ends" in message
    assert [line["epoch"] for line in lines] == [0, 1]
    assert lines[-1]["reward/zero_std_ratio"] == 1
    assert lines[-1]["step"] == 0  # nothing was trained
    assert "train/loss" not in lines[-1]
    assert (run.logdir / "run/checkpoints/latest").exists()
