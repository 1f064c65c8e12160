"""Runs of scripts/train_vlm.py in two processes equal those in one."""

import json
from pathlib import Path

import pytest
import small_vlm
import torch
import vlm_runs
from environments import EPISODES
from safetensors.torch import load_file

# full fine-tuning, so that gradients of the vision tower are reduced without an image too
FULL = {"use_lora": False, "train.freeze_vision": False, "train.tokens_per_batch": 40}
# at most four of six groups are not constant: in some update one process has no gradient
REFILLED = {
    "reward": "constant_for_some",
    "sample.refills": 2,
    "sample.questions_per_epoch": 6,
}
# one epoch of the value head only, then one of all weights
WARMUP = {"num_epochs": 2, "train.critic_warmup": 1, "train.critic_learning_rate": 1e-2}
RUNS = {
    "float32": {"num_epochs": 2, "exact": False},
    "full": {**FULL, "num_epochs": 2},
    "refilled": {**REFILLED, "train.updates_per_epoch": 3, "train.beta": 0.1},
    "episodes": EPISODES,
    "ppo": {"train.advantage": "gae", "train.beta": 0.1, "train.kl_in": "reward", **WARMUP},
    "critic": {"train.advantage": "gae", "train.critic": "separate", **WARMUP},
}
# given responses; two processes stop after the first epoch and resume
GIVEN = {
    "sft": {"train.loss": "sft", "train.ema": True, "train.ema_update_interval": 1},
    "dpo": {"train.loss": "dpo", **FULL},
    "kto": {"train.loss": "kto", "train.undesirable_weight": 0.5, "train.tokens_per_batch": 40},
}
# without rollouts: pairs of responses train a reward model
PAIR_RUNS = {
    "pairs": {
        **FULL,
        "num_epochs": 2,
        "train.loss": "bradley_terry",
        "train.center_scores": 0.01,
        "sample.questions_per_epoch": 8,
        "eval_freq": 1,
        "eval_questions": 0,
    },
}
# in two processes that train on each micro-batch together
TOGETHER = {"episodes": EPISODES, "kto": GIVEN["kto"]}
# in two processes only: rank 1 fails in batches of one, after an evaluation on rank 0
BROKEN = {"run_name": "broken", "reward": "broken_on_rank_1", "sample.batch_size": 1}
BROKEN |= {"eval_questions": 1}


@pytest.fixture(scope="module")
def logdirs(tmp_path_factory) -> dict[int, Path]:
    """Log directories of the runs in one process and in two."""
    folder = tmp_path_factory.mktemp("processes")
    common = {
        "pretrained.model": str(small_vlm.save(folder / "model")),
        "dataset": str(small_vlm.write_data(folder / "data")),
        "num_epochs": 1,
        "exact": True,
    }
    # 2 processes x 4 = 1 process x 8
    given = {"dataset": str(small_vlm.write_given_data(folder / "given")), "num_epochs": 2}
    given |= {"sample.max_new_tokens": 14, "sample.group_size": 8, "eval_freq": 1}
    batches = {1: {"sample.batch_size": 8}, 2: {"sample.batch_size": 4}}

    def runs(processes: int) -> list[dict]:
        shared = {**common, **batches[processes], "logdir": str(folder / str(processes))}
        pairs = {"dataset": str(folder / "pairs")}
        found = [{**shared, "run_name": name, **fields} for name, fields in RUNS.items()]
        found += [{**shared, "run_name": n, **fields, **pairs} for n, fields in PAIR_RUNS.items()]
        for name, fields in GIVEN.items():
            own = {**shared, **given, "run_name": name, **fields}
            found += (
                [own] if processes == 1 else [{**own, "num_epochs": 1}, {**own, "resume": "auto"}]
            )
        return found

    def together() -> list[dict]:
        found = []
        for name, fields in TOGETHER.items():
            data = given if name in GIVEN else {}
            own = {**common, **batches[2], **data, **fields, "train.sequence_parallel": 2}
            found.append({**own, "run_name": f"{name}-together", "logdir": str(folder / "2")})
        return found

    small_vlm.write_pairs(folder / "pairs")
    vlm_runs.run_on_two_processes([*runs(2), *together(), {**runs(2)[0], **BROKEN}])
    for run_fields in runs(1):
        vlm_runs.run_recording(**run_fields)
    return {processes: folder / str(processes) for processes in (1, 2)}


def read_records(folder: Path) -> list[dict]:
    """Return the samples of all processes by index, and their micro-batches, for each epoch."""
    files = sorted(folder.glob("seen-*.jsonl"))
    epochs = zip(*(map(json.loads, path.read_text().splitlines()) for path in files), strict=True)
    columns = ("tokens", "rewards")
    return [
        {
            **{name: {k: v for part in parts for k, v in part[name].items()} for name in columns},
            "images": [part["images"] for part in parts],
        }
        for parts in epochs
    ]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_draw_the_same_samples_as_one(logdirs, name):
    """Batches of 4 on two processes give the same tokens and rewards as batches of 8 on one."""
    one, two = (read_records(logdir / name) for logdir in logdirs.values())
    assert len(one) == len(two) == RUNS[name].get("num_epochs", 1)
    for first, second in zip(one, two, strict=True):
        assert len(first["tokens"]) == 4 * RUNS[name].get("sample.questions_per_epoch", 4)
        assert first["tokens"] == second["tokens"]
        assert first["rewards"] == second["rewards"]
        assert len(first["images"]) == 1
        assert len(second["images"]) == 2


def test_a_reward_outage_of_one_process_is_raised_on_both(logdirs):
    messages = [(logdirs[2] / f"outage-{process}.txt").read_text() for process in (0, 1)]
    assert messages[0].startswith("reward 'mine' fails on every batch: TypeError: no such letter")
    assert messages[0] == messages[1]


def test_a_process_without_images_does_not_block_the_other(logdirs):
    """The vision tower is trained, and only one process has an image in the last micro-batch."""
    updates = []
    for epoch in read_records(logdirs[2] / "full"):
        # step: whether the last micro-batch of the update had an image
        last = [dict(map(tuple, steps)) for steps in epoch["images"]]
        assert last[0].keys() == last[1].keys()
        updates += [{last[0][step], last[1][step]} for step in last[0]]
    assert {True, False} in updates


@pytest.mark.parametrize(
    "name", [name for name in [*RUNS, *PAIR_RUNS, *GIVEN] if name != "float32"]
)
def test_two_processes_train_the_same_weights_as_one(logdirs, name):
    """The runs are in float64 and agree to the last digits."""
    lines, weights = [], []
    for folder in (logdir / name for logdir in logdirs.values()):
        lines.append(list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())))
        weights.append(load_file(folder / "checkpoints/latest/state/trained.safetensors"))
    for one, two in zip(*lines, strict=True):
        assert one.keys() == two.keys()
        for metric in one:
            if not metric.startswith(("time/", "perf/")):
                assert one[metric] == pytest.approx(two[metric], abs=1e-9), metric
    assert weights[0].keys() == weights[1].keys()
    for parameter in weights[0]:
        assert weights[0][parameter].dtype in (torch.float64, torch.float32)
        torch.testing.assert_close(
            weights[0][parameter], weights[1][parameter], rtol=0, atol=1e-8, msg=parameter
        )


@pytest.mark.parametrize("name", TOGETHER)
def test_two_processes_that_train_together_have_the_weights_of_one(logdirs, name):
    """The processes exchange their samples, with images of observations."""
    file = "checkpoints/latest/state/trained.safetensors"
    one = load_file(logdirs[1] / name / file)
    two = load_file(logdirs[2] / f"{name}-together" / file)
    assert one.keys() == two.keys()
    for parameter in one:
        torch.testing.assert_close(one[parameter], two[parameter], rtol=0, atol=1e-10)
