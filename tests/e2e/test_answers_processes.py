"""scripts/train_vlm.py in two real processes."""

import json
from pathlib import Path

import answer_runs
import pytest
import small_vlm
import torch
from safetensors.torch import load_file

# all weights, so that the tower is waited for where a micro-batch has no picture
FULL = {"use_lora": False, "train.freeze_vision": False, "train.tokens_per_batch": 40}
RUNS = {
    "full": {**FULL, "num_epochs": 2},
    "refilled": {"reward": "flat_for_some", "sample.refills": 2, "sample.questions_per_epoch": 2},
    "ppo": {"train.advantage": "gae", "train.beta": 0.1, "train.kl_in": "reward", "train.kl": "k1"},
}


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

    def runs(processes: int) -> list[dict]:
        own = {**common, "logdir": str(folder / str(processes))}
        return [{**own, "run_name": name, **fields} for name, fields in RUNS.items()]

    answer_runs.run_by_two(runs(2))
    for one in runs(1):
        answer_runs.run(**one)
    return {processes: folder / str(processes) for processes in (1, 2)}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_what_one_does(logdirs, name):
    """The same answers and rewards, and in float64 the same weights."""
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
