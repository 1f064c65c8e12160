"""scripts/train_vlm.py in two real processes."""

import json
from pathlib import Path

import answer_runs
import pytest
import small_vlm
import torch
from environments import EPISODES
from safetensors.torch import load_file

# all weights, so that the tower is waited for where a micro-batch has no picture
FULL = {"use_lora": False, "train.freeze_vision": False, "train.tokens_per_batch": 40}
# six groups of which four at most have spread: in some update, one process has nothing to learn
REFILLED = {"reward": "flat_for_some", "sample.refills": 2, "sample.questions_per_epoch": 6}
# an epoch of the value head alone, then one of all
WARMUP = {"num_epochs": 2, "train.critic_warmup": 1, "train.critic_learning_rate": 1e-2}
RUNS = {
    "float32": {"num_epochs": 2, "exact": False},
    "full": {**FULL, "num_epochs": 2},
    "refilled": {**REFILLED, "train.updates_per_epoch": 3, "train.beta": 0.1},
    "episodes": EPISODES,
    "ppo": {"train.advantage": "gae", "train.beta": 0.1, "train.kl_in": "reward", **WARMUP},
}
# by two alone: the second fails, in batches of one, and has no part in the evaluation before
BROKEN = {"run_name": "broken", "reward": "broken_elsewhere", "sample.batch_size": 1}
BROKEN |= {"eval_questions": 1}


@pytest.fixture(scope="module")
def logdirs(tmp_path_factory) -> dict[int, Path]:
    """Each run by one process and by two."""
    folder = tmp_path_factory.mktemp("processes")
    common = {
        "pretrained.model": str(small_vlm.save(folder / "model")),
        "dataset": str(small_vlm.small_data(folder / "data")),
        "num_epochs": 1,
        "exact": True,
    }
    # 2 x 4 = 1 x 8
    batches = {1: {"sample.batch_size": 8}, 2: {"sample.batch_size": 4}}

    def runs(processes: int) -> list[dict]:
        own = {**common, **batches[processes], "logdir": str(folder / str(processes))}
        return [{**own, "run_name": name, **fields} for name, fields in RUNS.items()]

    answer_runs.run_by_two([*runs(2), {**runs(2)[0], **BROKEN}])
    for one in runs(1):
        answer_runs.run_watched(**one)
    return {processes: folder / str(processes) for processes in (1, 2)}


def seen(folder: Path) -> list[dict]:
    """By epoch: what all processes sampled, by index, and the micro-batches of each."""
    files = sorted(folder.glob("seen-*.jsonl"))
    epochs = zip(*(map(json.loads, path.read_text().splitlines()) for path in files), strict=True)
    columns = ("tokens", "rewards")
    return [
        {
            **{name: {k: v for own in parts for k, v in own[name].items()} for name in columns},
            "pictures": [own["pictures"] for own in parts],
        }
        for parts in epochs
    ]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_sample_what_one_does(logdirs, name):
    """2 x 4 answers at a time and 1 x 8: the same tokens and rewards."""
    one, two = (seen(logdir / name) for logdir in logdirs.values())
    assert len(one) == len(two) == RUNS[name].get("num_epochs", 1)
    for first, second in zip(one, two, strict=True):
        assert len(first["tokens"]) == 4 * RUNS[name].get("sample.questions_per_epoch", 4)
        assert first["tokens"] == second["tokens"]
        assert first["rewards"] == second["rewards"]
        assert len(first["pictures"]) == 1
        assert len(second["pictures"]) == 2


def test_an_outage_of_one_process_is_raised_on_both(logdirs):
    told = [(logdirs[2] / f"outage-{process}.txt").read_text() for process in (0, 1)]
    assert told[0].startswith("reward 'mine' fails on every batch: TypeError: no such letter")
    assert told[0] == told[1]


def test_a_process_without_pictures_does_not_keep_the_other_waiting(logdirs):
    """Where the tower is trained: one ends an update with words alone, the other with a picture."""
    updates = []
    for epoch in seen(logdirs[2] / "full"):
        last = [dict(map(tuple, own)) for own in epoch["pictures"]]  # micro-batch of each update
        assert last[0].keys() == last[1].keys()
        updates += [{last[0][step], last[1][step]} for step in last[0]]
    assert {True, False} in updates


@pytest.mark.parametrize("name", [name for name in RUNS if name != "float32"])
def test_two_processes_train_what_one_does(logdirs, name):
    """In float64, to the last digits."""
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
