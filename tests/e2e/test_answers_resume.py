"""scripts/train_vlm.py, stopped, killed and gone on with, as a user runs it."""

import json
import signal
from pathlib import Path

import dying
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
    model, data = small_vlm.save(folder / "model"), small_vlm.small_data(folder / "data")

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


def undisturbed(run: Runner) -> Runner:
    done = run(**FIELDS)
    assert done.returncode == 0, done.stderr
    return run


def state_of(run: Runner) -> dict[str, torch.Tensor]:
    """Weights, moving average and optimizer, as resumed and as others load them."""
    checkpoint = run.logdir / "run/checkpoints/latest"
    moments = torch.load(checkpoint / "state/optimizer.bin")["state"]
    files = ["state/trained", "state/ema", "lora/adapter_model", "ema_lora/adapter_model"]
    return {
        **{f"{i}.{name}": value for i, own in moments.items() for name, value in own.items()},
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


def test_two_epochs_and_two_more_are_four_bit_for_bit(new_runner):
    whole, run = undisturbed(new_runner()), new_runner()
    half = run(**{**FIELDS, "num_epochs": 2})
    assert half.returncode == 0, half.stderr
    assert [line["epoch"] for line in run.metrics()] == [0, 1, 2]
    forgotten = run(**FIELDS, resume="auto", train__loss="gspo")
    assert forgotten.returncode == 2
    assert "/run had another goal: train.loss='gspo' (it was 'clip'); go on as" in forgotten.stderr
    rest = run_script(FIELDS["script"], "--resume", run.logdir / "run", "--config.num_epochs=4")
    assert rest.returncode == 0, rest.stderr
    assert_same_run(run, whole)
    assert [line["epoch"] for line in run.metrics()] == [0, 1, 2, 3, 4]
    moved = load_file(whole.logdir / "run/checkpoints/latest/state/trained.safetensors")
    assert any(weight.any() for name, weight in moved.items() if "lora_B" in name)


# where each of ten lives ends, and how far the run is then: each goes on from the one before
DEATHS = [
    ("flow_grpo.answer.network:AnswerModel.log_probs", 3, -1),  # decoding, before training
    ("flow_grpo.run.checkpoint:_finish", 1, -1),  # the first checkpoint has its files, and no name
    ("flow_grpo.answer.environment:Environments.step", 3, 0),  # amid episodes
    ("accelerate:Accelerator.backward", 1, 0),  # training, before the first update
    ("flow_grpo.run.session:take_update", 2, 0),  # between two updates
    ("flow_grpo.answer.policy:AnswerPolicy.save", 1, 0),  # a checkpoint with half its files
    ("flow_grpo.run.checkpoint:_point", 1, 1),  # whole, but `latest` is the one before
    ("flow_grpo.run.trackers:append_metrics", 1, 2),  # not yet in metrics.jsonl
    ("flow_grpo.answer.rollout:PendingAnswers.result", 1, 2),  # waiting for rewards
    ("os:fsync", 9, 2),  # while files of a checkpoint are flushed
]


@pytest.mark.slow
def test_a_run_of_episodes_that_is_killed_ten_times_ends_with_the_same_files(new_runner):
    whole, run = undisturbed(new_runner(**EPISODES)), new_runner(**EPISODES)
    for target, number, reached in DEATHS:
        command = run.command(**FIELDS, resume="auto")
        killed = run_script(dying.__file__, target, number, *command)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert newest_epoch(run.logdir / "run/checkpoints") == reached, target
    done = run(**FIELDS, resume="auto")
    assert done.returncode == 0, done.stderr
    assert_same_run(run, whole)


def newest_epoch(checkpoints: Path) -> int:
    found = [
        json.loads(path.read_text())["epoch"]
        for path in checkpoints.glob("checkpoint-*/state/progress.json")
    ]
    return max(found, default=-1)


def test_a_data_set_that_is_solved_ends_with_a_sentence(new_runner):
    run = new_runner(custom_rewards="{'mine': 'small_vlm:same_for_all'}")
    done = run(**FIELDS, sample__refills=3)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: no answer to any question drawn has an advantage" in done.stdout
    assert "training ends here" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    lines = run.metrics()
    assert [line["epoch"] for line in lines] == [0, 1]
    assert lines[-1]["reward/zero_std_ratio"] == 1
    assert lines[-1]["step"] == 0  # nothing was trained
    assert "train/loss" not in lines[-1]
    assert (run.logdir / "run/checkpoints/latest").exists()
